"""The checkpoints in a directory, by step: which are finished, which are undamaged, which to keep.

- `checkpoints/20/state/params`, `rest`: arrays; see `checkpoint`
- `checkpoints/20/manifest.json`: size and SHA-256 of each file; see `manifest`
- `checkpoints/40.saving`, `30.deleting`: unfinished, or half removed; the name of a finished one is its step
- `checkpoints/60.damaged`: moved aside when the run resumed from an earlier step
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
    """The finished checkpoints in a directory. Only the process that holds the run's lock may change them."""

    def __init__(self, directory: Path):
        """Open a directory, which need not exist."""
        self._directory = directory.absolute()
        self._manifests: dict[int, dict[str, Any]] = {}  # those read so far, by step

    def steps(self) -> list[int]:
        """Return the steps in order. Directories with a name that is not a plain integer are ignored."""
        if not self._directory.is_dir():
            return []
        names = (p.name for p in self._directory.iterdir() if p.is_dir() and not p.is_symlink())
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,14}", name, re.ASCII))

    def last(self) -> int | None:
        """Return the last step, or None if there are no checkpoints."""
        return max(self.steps(), default=None)

    def val_loss(self, step: int) -> float | None:
        """Return the validation loss of a step in nats per token. None: not measured, or the manifest is damaged."""
        return self._read_losses([step])[0].get(step)

    def files(self, step: int) -> dict[str, list]:
        """Return {path: [bytes, SHA-256]} of the files of a checkpoint."""
        return self._read(step, manifest.read)["files"]

    def arrays(self, step: int) -> dict[str, dict[str, str]]:
        """Return {item: {path: "float32[3,4]"}}, the types and shapes of the arrays of a checkpoint."""
        return self._manifest(step)["arrays"]

    def verify(self, step: int) -> None:
        """Raise `CorruptCheckpoint` if a file of a checkpoint is not what was saved."""
        self._manifests[step] = self._read(step, manifest.check)

    def latest_valid(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """Return the step of the last or the best undamaged checkpoint, or None if there are no checkpoints.

        Each damaged one that is passed over gives a warning. Raises `UserError` if all are damaged.

        Args:
            which: "last", or "best" for the lowest validation loss (the last step if none was measured).
            before: consider only steps below this one.
        """
        losses, corrupt = self._read_losses([s for s in self.steps() if s < before]) if which == "best" else ({}, {})
        while left := [step for step in self.steps() if step < before and step not in corrupt]:
            step = _best({step: losses.get(step) for step in left})
            try:
                self.verify(step)
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
        """Rename a finished directory to its step, replacing a checkpoint of the same step."""
        final = self._directory / str(step)
        if final.exists():
            self.remove(step)
        partial.rename(final)
        manifest.sync(self._directory)

    def remove_old(self, keep_last: int, keep_every: int | None) -> None:
        """Remove all but the last `keep_last`, the best, and the multiples of `keep_every`."""
        steps = self.steps()
        losses, corrupt = self._read_losses(steps)
        kept = {*steps[-keep_last:], *corrupt}  # a damaged one may be the best
        if losses:
            kept.add(_best(losses))
        for step in steps:
            if step not in kept and not (keep_every and step % keep_every == 0):
                self.remove(step)

    def remove(self, step: int) -> None:
        """Remove a checkpoint, renaming it first, so that a half-removed one is never taken for a finished one."""
        doomed = self._directory / f"{step}.deleting"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)
        self._manifests.pop(step, None)

    def remove_partial(self) -> None:
        """Remove what interrupted saves and removals have left."""
        for path in self._directory.glob("*.*") if self._directory.is_dir() else ():
            if re.fullmatch(r"\d+\.(saving|deleting)", path.name):
                delete(path)

    def quarantine_after(self, step: int) -> None:
        """Move aside the checkpoints after `step`, the last undamaged one."""
        for later in (s for s in self.steps() if s > step):
            aside = self._directory / f"{later}.damaged"
            if os.path.lexists(aside):
                delete(aside)
            (self._directory / str(later)).rename(aside)

    def _still_there(self, corrupt: dict[int, str]) -> list[tuple[int, str]]:
        """Return those not removed in the meantime by another process that trains the run."""
        return [(step, corrupt[step]) for step in self.steps() if step in corrupt]

    def _read_losses(self, steps: list[int]) -> tuple[dict[int, float | None], dict[int, str]]:
        """Return {step: validation loss}, and {step: reason} for damaged manifests."""
        losses, corrupt = {}, {}
        for step in steps:
            try:
                losses[step] = self._manifest(step)["val_loss"]
            except CorruptCheckpoint as e:
                corrupt[step] = str(e)
        return losses, corrupt

    def _manifest(self, step: int) -> dict[str, Any]:
        """Return a manifest, which is read once. Raises `CorruptCheckpoint`."""
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
    """Return the step with the lowest loss, the last of several, or the last step if no loss was measured."""
    measured = {step: loss for step, loss in losses.items() if loss is not None}
    return min(measured, key=lambda step: (measured[step], -step)) if measured else max(losses)


def finite_or_none(loss: float | None) -> float | None:
    """Replace NaN and infinity, which JSON lacks and which are never the best, by None."""
    return None if loss is None or not math.isfinite(loss) else loss
