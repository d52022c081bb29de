"""Checkpoints: saved in the background by Orbax, sealed with a manifest, restored after a check of their arrays."""

from __future__ import annotations

import contextlib
import math
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import struct

from jaxgpt.cluster import multihost
from jaxgpt.errors import CheckpointSaveError, UserError, reason_of, shell_line
from jaxgpt.runs import manifest, tree_names
from jaxgpt.runs.checkpoint_index import CheckpointIndex, finite_or_none
from jaxgpt.skip import SkipState
from jaxgpt.train import Params, TrainState

if TYPE_CHECKING:  # 0.5 s to import, so functions that need it import it
    import orbax.checkpoint as ocp

# Two items per checkpoint, so that sampling does not read the optimiser's state, twice the size of the parameters.
PARAMS, REST = "params", "rest"
# Bytes to read or write concurrently, or the largest array, or a sixteenth of all, whichever is most. Without a limit
# Orbax copies and compresses all arrays at once: another model in memory.
AT_ONCE = 2**26
MOST_SECONDS = 10.0  # longest wait for each thread of a failed save
DTYPES = ("float32", "bfloat16", "float16")  # that parameters are saved in


class CheckpointRemoved(UserError):
    """A valid checkpoint was removed in the meantime, by training that keeps newer ones."""


class Checkpoints(CheckpointIndex):
    """The checkpoints of one run. `save` returns at once; `wait` returns when the checkpoint is on disk.

    With several processes all of them save, and process 0 seals the new checkpoint and removes old ones.

    Args:
        directory: `RUN/checkpoints`.
        keep_last: how many of the last checkpoints to keep. The best is kept as well.
        keep_every: keep the multiples of this many steps as well. None means no others.
    """

    def __init__(self, directory: Path, *, keep_last: int = 1, keep_every: int | None = None):
        """Open a directory, which need not exist."""
        super().__init__(directory)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sealing: Future | None = None

    def save(self, state: TrainState, step: int, val_loss: float | None) -> None:
        """Start to save a state. Raises `CheckpointSaveError`, for this save or for the previous one.

        val_loss: of this step, to choose the best checkpoint. None means it was not measured.
        """
        self._save(_to_items(state), step, val_loss)

    def save_params(self, params: Params, step: int) -> None:
        """Start to save only parameters, of any dtype: they can be loaded, but training cannot resume from them."""
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
            raise self._fail(step, e) from None
        if multihost.is_process_0():
            assert self._pool is not None
            about = {
                "jaxgpt": metadata.version("jaxgpt"),
                "step": step,
                "val_loss": finite_or_none(val_loss),
                "arrays": {PARAMS: {}, REST: {}} | {name: _describe(tree) for name, tree in items.items()},
            }
            self._sealing = self._pool.submit(self._seal, partial, about)

    def _seal(self, partial: Path, about: dict[str, Any]) -> None:
        """Wait for the arrays, write the manifest, publish the checkpoint and remove old ones, in the background."""
        step = about["step"]
        try:
            assert self._writer is not None
            self._writer.wait_until_finished()
            manifest.write(partial, about)
            self.publish(partial, step)
            self.remove_old(self._keep_last, self._keep_every)
        except Exception as e:
            raise self._fail(step, e) from None

    def _fail(self, step: int, e: Exception) -> CheckpointSaveError:
        for thread in threading.enumerate():
            if type(thread).__module__.startswith("orbax."):  # after one has failed, the others still write
                with contextlib.suppress(Exception):  # joining one raises its exception again
                    thread.join(MOST_SECONDS)
        shutil.rmtree(self._directory / f"{step}.saving", ignore_errors=True)
        last = max(self.steps(), default="none")
        return CheckpointSaveError(
            f"step {step} could not be saved in {self._directory}: {reason_of(e)}. The last checkpoint is step {last}."
        )

    def raise_if_failed(self) -> None:
        """Raise `CheckpointSaveError` if the last save has failed by now, without waiting for it."""
        if self._sealing is not None and self._sealing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is published. Raises `CheckpointSaveError` if it has failed."""
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()
        elif self._writer is not None and not multihost.is_process_0():
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Wait for the last save and end the background threads. Raises `CheckpointSaveError` if it has failed."""
        try:
            self.wait()
        finally:
            if self._writer is not None and self._pool is not None:
                self._pool.shutdown()
                with contextlib.suppress(Exception):  # of a failed save, which `wait` has raised
                    self._writer.close()

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Restore a state without frozen parameters, which are not saved. like: its shapes, dtypes and shardings."""
        items = self._restore(step, **_to_items(like))
        rest, guard = items[REST], items[REST]["guard"]
        opt_state = SkipState(rest["opt_state"], guard.skipped, guard.in_row, guard.norms, like.opt_state.spikes)
        return TrainState(rest["step"], items[PARAMS], opt_state)

    def restore_params(self, step: int, like: Params) -> Params:
        """Restore only the parameters, in the dtype in which they were saved. like: their shapes and shardings."""
        saved = self.arrays(step)[PARAMS]

        def with_saved_type(path: Any, x: Any) -> Any:
            kind = saved.get(jax.tree_util.keystr(path), "").partition("[")[0]
            return jax.ShapeDtypeStruct(x.shape, kind if kind in DTYPES else x.dtype, sharding=x.sharding)

        like = jax.tree.map_with_path(with_saved_type, tree_names.as_saved(like, saved))
        return self._restore(step, **{PARAMS: like})[PARAMS]

    def _restore(self, step: int, **like: Any) -> Any:
        import orbax.checkpoint as ocp

        directory = self._directory / str(step)
        saved = self.arrays(step)
        like = {name: tree_names.as_saved(tree, saved[name]) for name, tree in like.items()}
        for name, tree in like.items():  # before anything is allocated
            wanted = _describe(tree)
            for path in sorted(saved[name].keys() ^ wanted.keys()):
                here = "the checkpoint" if path in saved[name] else "experiment.json"
                raise UserError(
                    f"{directory}: only {here} has {name}{path}. Does experiment.json belong to another run?"
                )
            for path, what in wanted.items():
                if saved[name][path] != what:
                    raise UserError(
                        f"{directory}: {name}{path} is {saved[name][path]}, experiment.json makes it {what}. "
                        "Does experiment.json belong to another run?"
                    )
        abstract = {name: jax.tree.map(ocp.utils.to_shape_dtype_struct, tree) for name, tree in like.items()}
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
        with ocp.Checkpointer(_handler(abstract)) as reader:
            try:
                restored: Any = reader.restore(directory / "state", args=args)
                return {name: tree_names.as_now(restored[name], saved[name]) for name in like}
            except Exception:
                if directory.exists():
                    raise
                message = f"{directory} was removed by training while it was being read: try again"
                raise CheckpointRemoved(message) from None


def open_checkpoints(run: Path) -> Checkpoints:
    """Open the checkpoints of an existing run. Raises `UserError` if it has none yet."""
    checkpoints = Checkpoints(run / "checkpoints")
    if not checkpoints.steps():
        raise UserError(
            f"{run} has no checkpoint yet: train it with `{shell_line('jaxgpt', 'train', '--run-dir', run)}`"
        )
    return checkpoints


def _handler(items: dict[str, Any]) -> ocp.CompositeCheckpointHandler:
    """Return Orbax's handler of these trees, which reads and writes a limited number of bytes concurrently."""
    import orbax.checkpoint as ocp

    def of(tree: Any) -> ocp.StandardCheckpointHandler:
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
        limit: Any = (max([AT_ONCE, *sizes, sum(sizes) // 16]) + 1) / 1e9  # Orbax refuses an array that is not smaller
        return ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)

    handlers: Any = {name: of(tree) for name, tree in items.items()}
    return ocp.CompositeCheckpointHandler(**handlers)


def _describe(tree: Any) -> dict[str, str]:
    """Return the type and shape of each array: {path: "float32[3,4]"}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}".replace(" ", "") for path, x in leaves}


@struct.dataclass
class _Guard:
    """The counters of `SkipState`, saved next to the state of the optimizer, not around it."""

    skipped: Any
    in_row: Any
    norms: Any


def _to_items(state: TrainState) -> dict[str, Any]:
    """Return the parts of a state to save, all but frozen parameters, in the layout of version 0.1.0."""
    s = state.opt_state
    guard = _Guard(skipped=s.skipped, in_row=s.in_a_row, norms=s.norms)
    return {PARAMS: state.params, REST: {"step": state.step, "opt_state": s.inner_state, "guard": guard}}
