"""Checkpoints: written in the background by Orbax, sealed with a manifest, kept by policy, checked when read.

checkpoints/20/state/params  rest     Orbax
checkpoints/20/manifest.json          every file's size and SHA-256: see `manifest`
checkpoints/40.saving                 not finished; a name that is a number alone is a finished one
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxgpt.cluster import multihost
from jaxgpt.errors import SaveFailed, UserError, reason_of, shell_line
from jaxgpt.files import delete
from jaxgpt.runs import manifest
from jaxgpt.runs.manifest import Damaged, Removed
from jaxgpt.runs.state_layout import PARAMS, REST, from_items, to_items
from jaxgpt.train import TrainState

if TYPE_CHECKING:  # half a second to import: only where it is used
    import orbax.checkpoint as ocp

# Bytes that are read or written at once, if not a sixteenth of all or the largest array are more: what Orbax copies and
# compresses for all of them together would be another model in memory.
AT_ONCE = 2**26
DTYPES = ("float32", "bfloat16", "float16")  # of parameters


class Checkpoints:
    """The checkpoints of one run, by step. `save` returns at once; `wait` says when it is true.

    keep_last, keep_every: see `TrainConfig`; the best is always kept. In several processes all save; the first one
    seals and removes.
    """

    def __init__(self, directory: Path, *, keep_last: int = 1, keep_every: int | None = None):
        self._directory = directory.absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sealing: Future | None = None
        self._about: dict[int, dict[str, Any]] = {}  # manifests that were read, by step

    # Writing

    def clean(self) -> None:
        """Remove what a killed save or removal left behind. Only for who holds the run's lock."""
        for path in self._directory.glob("*.*") if self._directory.is_dir() else ():
            if re.fullmatch(r"\d+\.(saving|deleting)", path.name):
                delete(path)

    def save(self, state: TrainState, step: int, val_loss: float | None) -> None:
        """val_loss: of this very step, by which the best is chosen; None if it was not measured.

        Raises `SaveFailed`, for this step or for the one before it.
        """
        self._save(to_items(state), step, val_loss)

    def save_params(self, params: Any, step: int) -> None:
        """Parameters that nothing was trained with here, in whatever dtype: to be used, and no run to go on with."""
        self._save({PARAMS: params}, step, None)

    def _save(self, items: dict[str, Any], step: int, val_loss: float | None) -> None:
        import orbax.checkpoint as ocp

        self.wait()
        if self._writer is None:
            self._writer = ocp.AsyncCheckpointer(_handler(items))
            self._pool = ThreadPoolExecutor(1)
        partial = self._directory / f"{step}.saving"
        try:
            if multihost.is_process_0():
                partial.mkdir(parents=True)
            self._writer.save(
                partial / "state",
                args=ocp.args.Composite(**{name: ocp.args.StandardSave(tree) for name, tree in items.items()}),
            )
        except Exception as e:
            raise self._failed(step, e) from None
        if multihost.is_process_0():
            assert self._pool is not None
            about = {
                "jaxgpt": metadata.version("jaxgpt"),
                "step": step,
                "val_loss": _finite(val_loss),
                "arrays": {PARAMS: {}, REST: {}} | {name: _describe(tree) for name, tree in items.items()},
            }
            self._sealing = self._pool.submit(self._seal, partial, about)

    def _seal(self, partial: Path, about: dict[str, Any]) -> None:
        """In the background: once the data is written, give it its manifest and then its name."""
        step = about["step"]
        try:
            assert self._writer is not None
            self._writer.wait_until_finished()
            manifest.write(partial, about)
            final = self._directory / str(step)
            if final.exists():  # an earlier sitting saved it too
                self._remove(final)
            partial.rename(final)
            manifest.sync(self._directory)
            self._about[step] = about
            for old in set(self.steps()) - self._kept():
                self._remove(self._directory / str(old))
        except Exception as e:
            raise self._failed(step, e) from None

    def _failed(self, step: int, e: Exception) -> SaveFailed:
        shutil.rmtree(self._directory / f"{step}.saving", ignore_errors=True)
        good = max(self.steps(), default="none")
        return SaveFailed(
            f"step {step} could not be saved in {self._directory}: {reason_of(e)}. The last checkpoint is step {good}."
        )

    def _kept(self) -> set[int]:
        steps = sorted(self.steps())
        best = self.best()
        return {
            *steps[-self._keep_last :],
            *([] if best is None else [best]),
            *self._illegible(steps),  # each may be the best
            *(s for s in steps if self._keep_every and s % self._keep_every == 0),
        }

    def _remove(self, path: Path) -> None:
        """By another name first, so that a half-removed one is never taken for a checkpoint."""
        gone = path.with_name(f"{path.name}.deleting")
        path.rename(gone)
        shutil.rmtree(gone)
        self._about.pop(int(path.name), None)

    def measured(self, step: int, val_loss: float) -> None:
        """The validation loss of a saved step, where a signal had come between."""
        manifest.rewrite(self._directory / str(step), val_loss=_finite(val_loss))
        self._about.pop(step, None)

    def raise_if_failed(self) -> None:
        """Raise `SaveFailed` if the last save has failed by now; does not wait."""
        if self._sealing is not None and self._sealing.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save is on disk under its name. Raises `SaveFailed`."""
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()
        elif self._writer is not None and not multihost.is_process_0():
            self._writer.wait_until_finished()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._writer is not None and self._pool is not None:
                self._pool.shutdown()
                with contextlib.suppress(Exception):  # of a failed save, which `wait` has raised
                    self._writer.close()

    # Reading

    def steps(self) -> list[int]:
        """Those that were finished. Names that are no plain number are none of ours."""
        if not self._directory.is_dir():
            return []
        names = (p.name for p in self._directory.iterdir() if p.is_dir() and not p.is_symlink())
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,14}", name, re.ASCII))

    def last(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest validation loss; the last one if none was measured."""
        return self._best(self.steps())

    def _best(self, steps: list[int]) -> int | None:
        losses = {step: loss for step in steps if (loss := self.val_loss(step)) is not None}
        return min(losses, key=lambda step: (losses[step], -step)) if losses else max(steps, default=None)

    def val_loss(self, step: int) -> float | None:
        """None: not measured, or the manifest cannot be read."""
        try:
            return self._manifest(step)["val_loss"]
        except Damaged:
            return None

    def _illegible(self, steps: list[int]) -> dict[int, str]:
        """The steps with a manifest that cannot be read, and why. Their losses are unknown."""
        found = {}
        for step in steps:
            try:
                self._manifest(step)
            except Damaged as e:
                found[step] = str(e)
        return found

    def _manifest(self, step: int) -> dict[str, Any]:
        """Read once. Raises `Damaged`."""
        if step not in self._about:
            self._about[step] = self._read(step, manifest.read)
        return self._about[step]

    def _read(self, step: int, how: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        directory = self._directory / str(step)
        about = how(directory)
        match about:
            case {"step": int(saved), "val_loss": float() | None, "arrays": {"params": dict(), "rest": dict()}}:
                if saved == step:
                    return about
                raise Damaged(f"{directory} is of step {saved}")
        raise Damaged(f"{directory / manifest.NAME} is none of a checkpoint")

    def good(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """The last or the best checkpoint of which every file is as it was saved; None if there are no checkpoints.

        before: of the steps below this one. Warns of each damaged one that it passes over. Raises `UserError` if no
        good one is left.
        """
        damaged = self._illegible([step for step in self.steps() if step < before]) if which == "best" else {}
        while left := [step for step in self.steps() if step < before and step not in damaged]:
            step = self._best(left) if which == "best" else max(left)
            assert step is not None
            try:
                self._about[step] = self._read(step, manifest.check)
            except (Damaged, OSError) as e:
                damaged[step] = str(e)
                continue
            for bad, why in self._there(damaged):
                warnings.warn(f"checkpoint {bad} is damaged, so {step} is used: {why}", UserWarning, stacklevel=2)
            return step
        if bad := self._there(damaged):
            *others, (step, why) = bad
            others = f" (nor are {', '.join(str(other) for other, _ in others)})" if others else ""
            raise UserError(
                f"checkpoint {step} is damaged, and no other is good{others}: {why}. Restore it from a copy."
            )
        return None

    def _there(self, damaged: dict[int, str]) -> list[tuple[int, str]]:
        """Those that are still there: a run that is being trained removes old checkpoints while another process reads."""
        return [(step, damaged[step]) for step in self.steps() if step in damaged]

    def files(self, step: int) -> dict[str, list]:
        """Each file of a good checkpoint: its bytes and SHA-256."""
        return self._read(step, manifest.read)["files"]

    def set_aside_after(self, step: int) -> None:
        """Give damaged checkpoints after a good one another name. Only for who holds the run's lock."""
        for later in (s for s in self.steps() if s > step):
            aside = self._directory / f"{later}.damaged"
            if os.path.lexists(aside):
                delete(aside)
            (self._directory / str(later)).rename(aside)

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The whole state but for what adapters are of, which is not saved; `like` gives shapes, dtypes and places."""
        return from_items(self._restore(step, **to_items(like)), spikes=like.opt_state.spikes)

    def restore_params(self, step: int, like: Any) -> Any:
        """The parameters alone, in the dtype in which they were saved; `like` gives shapes and places."""
        saved = self._arrays(step)[PARAMS]

        def as_saved(path: Any, x: Any) -> Any:
            kind = saved.get(jax.tree_util.keystr(path), "").partition("[")[0]
            return jax.ShapeDtypeStruct(x.shape, kind if kind in DTYPES else x.dtype, sharding=x.sharding)

        return self._restore(step, **{PARAMS: jax.tree.map_with_path(as_saved, like)})[PARAMS]

    def _arrays(self, step: int) -> dict[str, dict[str, str]]:
        return self._manifest(step)["arrays"]

    def _restore(self, step: int, **like: Any) -> Any:
        import orbax.checkpoint as ocp

        directory = self._directory / str(step)
        saved = self._arrays(step)
        for name, tree in like.items():  # before anything is allocated
            wanted = _describe(tree)
            for path in sorted(saved[name].keys() ^ wanted.keys()):
                here = "the checkpoint" if path in saved[name] else "experiment.json"
                raise UserError(f"{directory}: only {here} has {name}{path}. Is experiment.json of another run?")
            for path, what in wanted.items():
                if saved[name][path] != what:
                    raise UserError(
                        f"{directory}: {name}{path} is {saved[name][path]}, experiment.json makes it {what}. "
                        "Is experiment.json of another run?"
                    )
        abstract = {name: jax.tree.map(ocp.utils.to_shape_dtype_struct, tree) for name, tree in like.items()}
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
        with ocp.Checkpointer(_handler(abstract)) as reader:
            try:
                return reader.restore(directory / "state", args=args)
            except Exception:
                if directory.exists():
                    raise
                raise Removed(f"{directory} was removed while it was read, by its training: try again") from None


def _handler(items: dict[str, Any]) -> ocp.CompositeCheckpointHandler:
    """Orbax's, for trees by name: it begins with all arrays at once, unless it is told how many gigabytes are allowed."""

    import orbax.checkpoint as ocp

    def of(tree: Any) -> ocp.StandardCheckpointHandler:
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
        limit: Any = (max([AT_ONCE, *sizes, sum(sizes) // 16]) + 1) / 1e9  # refused is an array that is not below it
        return ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)

    handlers: Any = {name: of(tree) for name, tree in items.items()}
    return ocp.CompositeCheckpointHandler(**handlers)


def _finite(loss: float | None) -> float | None:
    """JSON has no NaN; such a loss is never the best."""
    return None if loss is None or not math.isfinite(loss) else loss


def open_checkpoints(run: Path) -> Checkpoints:
    """Of an existing run; raises `UserError` if it has none yet."""
    checkpoints = Checkpoints(run / "checkpoints")
    if not checkpoints.steps():
        raise UserError(
            f"{run} has no checkpoint yet: train it with `{shell_line('jaxgpt', 'train', '--run-dir', run)}`"
        )
    return checkpoints


def _describe(tree: Any) -> dict[str, str]:
    """{path: "float32[3,4]"} of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}".replace(" ", "") for path, x in leaves}
