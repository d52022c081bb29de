"""The checkpoints in a directory, by step: which of them are finished, which are as they were saved, which are kept.

checkpoints/20/state/params  rest     arrays: see `checkpoint`
checkpoints/20/manifest.json          every file's size and SHA-256: see `manifest`
checkpoints/40.saving  30.deleting    not finished, or half removed: a finished one has a number alone for a name
checkpoints/60.damaged                put aside by the run that resumed from an earlier step
"""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxgpt.errors import UserError
from jaxgpt.files import delete
from jaxgpt.runs import manifest
from jaxgpt.runs.manifest import CorruptCheckpoint


class CheckpointIndex:
    """The finished checkpoints in a directory. What changes the directory is for the holder of the run's lock."""

    def __init__(self, directory: Path):
        self._directory = directory.absolute()
        self._manifests: dict[int, dict[str, Any]] = {}  # those that were read, by step

    def steps(self) -> list[int]:
        """Return the steps in order. Ignores directories with a name that is not a plain integer."""
        if not self._directory.is_dir():
            return []
        names = (p.name for p in self._directory.iterdir() if p.is_dir() and not p.is_symlink())
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,14}", name, re.ASCII))

    def last(self) -> int | None:
        """Return the last step."""
        return max(self.steps(), default=None)

    def val_loss(self, step: int) -> float | None:
        """Return the validation loss of a step: None if it was not measured, or its manifest cannot be read."""
        return self._read_losses([step])[0].get(step)

    def files(self, step: int) -> dict[str, list]:
        """Return [bytes, SHA-256] of each file of a checkpoint, by path."""
        return self._read(step, manifest.read)["files"]

    def arrays(self, step: int) -> dict[str, dict[str, str]]:
        """Return {item: {path: "float32[3,4]"}} of a checkpoint."""
        return self._manifest(step)["arrays"]

    def latest_valid(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """Return the last or the best step of which every file is as it was saved; None if there are no checkpoints.

        Warns of each corrupt one that it passes over. Raises `UserError` if all are corrupt.

        Args:
            which: "last", or "best" for the lowest validation loss (the last step if none was measured).
            before: consider steps below this one only.
        """
        losses, corrupt = self._read_losses([s for s in self.steps() if s < before]) if which == "best" else ({}, {})
        while left := [step for step in self.steps() if step < before and step not in corrupt]:
            step = _best({step: losses.get(step) for step in left})
            try:
                self._manifests[step] = self._read(step, manifest.check)
            except (CorruptCheckpoint, OSError) as e:
                corrupt[step] = str(e)
                continue
            for bad, reason in self._still_there(corrupt):
                message = f"checkpoint {bad} is damaged, so {step} is used: {reason}"
                warnings.warn(message, UserWarning, stacklevel=2)
            return step
        if bad := self._still_there(corrupt):
            *others, (step, reason) = bad
            others = f" (nor are {', '.join(str(other) for other, _ in others)})" if others else ""
            raise UserError(
                f"checkpoint {step} is damaged, and no other is good{others}: {reason}. Restore it from a copy."
            )
        return None

    def set_val_loss(self, step: int, val_loss: float) -> None:
        """Record the validation loss of a saved step that was preempted before it was measured."""
        manifest.rewrite(self._directory / str(step), val_loss=finite_or_none(val_loss))
        self._manifests.pop(step, None)

    def publish(self, partial: Path, step: int) -> None:
        """Give a finished directory its name, in the place of a checkpoint of the same step."""
        final = self._directory / str(step)
        if final.exists():
            self.remove(step)
        partial.rename(final)
        manifest.sync(self._directory)

    def remove_old(self, keep_last: int, keep_every: int | None) -> None:
        """Remove all but the last, the best, and the multiples of `keep_every`."""
        steps = self.steps()
        losses, corrupt = self._read_losses(steps)
        kept = {*steps[-keep_last:], *corrupt}  # a corrupt one may be the best
        if losses:
            kept.add(_best(losses))
        for step in steps:
            if step not in kept and not (keep_every and step % keep_every == 0):
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a checkpoint. It is renamed first, so that a half-removed one is never taken for a finished one."""
        doomed = self._directory / f"{step}.deleting"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)
        self._manifests.pop(step, None)

    def remove_partial(self) -> None:
        """Remove what a killed save or removal left behind."""
        for path in self._directory.glob("*.*") if self._directory.is_dir() else ():
            if re.fullmatch(r"\d+\.(saving|deleting)", path.name):
                delete(path)

    def quarantine_after(self, step: int) -> None:
        """Rename the checkpoints after a valid one, all of which are corrupt."""
        for later in (s for s in self.steps() if s > step):
            aside = self._directory / f"{later}.damaged"
            if os.path.lexists(aside):
                delete(aside)
            (self._directory / str(later)).rename(aside)

    def _still_there(self, corrupt: dict[int, str]) -> list[tuple[int, str]]:
        """Return those not removed meanwhile: a run in training removes old checkpoints while another process reads."""
        return [(step, corrupt[step]) for step in self.steps() if step in corrupt]

    def _read_losses(self, steps: list[int]) -> tuple[dict[int, float | None], dict[int, str]]:
        """Return {step: validation loss}, and {step: reason} of those with a manifest that cannot be read."""
        losses, corrupt = {}, {}
        for step in steps:
            try:
                losses[step] = self._manifest(step)["val_loss"]
            except CorruptCheckpoint as e:
                corrupt[step] = str(e)
        return losses, corrupt

    def _manifest(self, step: int) -> dict[str, Any]:
        """Return a manifest, read once. Raises `CorruptCheckpoint`."""
        if step not in self._manifests:
            self._manifests[step] = self._read(step, manifest.read)
        return self._manifests[step]

    def _read(self, step: int, read: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        directory = self._directory / str(step)
        body = read(directory)
        match body:
            case {"step": int(saved), "val_loss": float() | None, "arrays": {"params": dict(), "rest": dict()}}:
                if saved == step:
                    return body
                raise CorruptCheckpoint(f"{directory} is of step {saved}")
        raise CorruptCheckpoint(f"{directory / manifest.NAME} is not the manifest of a checkpoint")


def _best(losses: dict[int, float | None]) -> int:
    """Return the step with the lowest loss, the later of equal ones; the last step if none was measured."""
    measured = {step: loss for step, loss in losses.items() if loss is not None}
    return min(measured, key=lambda step: (measured[step], -step)) if measured else max(losses)


def finite_or_none(loss: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON does not have and which are never the best."""
    return None if loss is None or not math.isfinite(loss) else loss
