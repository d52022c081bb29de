"""Checkpoints: saved in the background by Orbax, sealed with a manifest, verified before they are restored.

- `checkpoints/20/state/params`, `rest`: arrays, so that sampling does not read the optimiser's state
- `checkpoints/20/manifest.json`: size and SHA-256 of each file, since Orbax loads flipped bits without an error
- `checkpoints/40.saving`, `30.deleting`: unfinished, or half removed; the name of a finished one is its step
- `checkpoints/60.damaged`: moved aside when the run resumed from an earlier step

Orbax's `CheckpointManager` publishes a step before anything else can be added to it, so a kill could leave a step
without a manifest. It cannot record a validation loss later, and opening it is a barrier of all processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import threading
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import struct

from jaxgpt.errors import CheckpointSaveError, UserError, reason_of, shell_line
from jaxgpt.files import json_sha256, write_whole
from jaxgpt.parallel import multihost
from jaxgpt.runs import tree_names
from jaxgpt.train import Params, SkipState, TrainState

if TYPE_CHECKING:  # 0.5 s to import, so functions that need it import it
    import orbax.checkpoint as ocp

MANIFEST = "manifest.json"
FORMAT = 1  # version of the manifest and of the files it lists
PARAMS, REST = "params", "rest"
# Bytes to read or write concurrently, or the largest array, or a sixteenth of all, whichever is most. Without a limit
# Orbax copies and compresses all arrays at once: another model in memory.
AT_ONCE = 2**26
MOST_SECONDS = 10.0  # longest wait for each thread of a failed save
DTYPES = ("float32", "bfloat16", "float16")  # that parameters are saved in


class CorruptCheckpoint(UserError):
    """A checkpoint has changed since it was saved. The message names the file and the difference."""


class CheckpointRemoved(UserError):
    """A valid checkpoint was removed in the meantime, by training that keeps newer ones."""


class Checkpoints:
    """The checkpoints of one run. `save` returns at once; `wait` returns when the checkpoint is on disk.

    With several processes all of them save, and process 0 seals the new checkpoint and removes old ones. Only the
    process that holds the run's lock may change them.

    Args:
        directory: `RUN/checkpoints`, which need not exist.
        keep_last: how many of the last checkpoints to keep. The best is kept as well.
        keep_every: keep the multiples of this many steps as well. None means no others.
    """

    def __init__(self, directory: Path, *, keep_last: int = 1, keep_every: int | None = None):
        """Open a directory, which need not exist."""
        self._directory = directory.absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._manifests: dict[int, dict[str, Any]] = {}  # those read so far, by step
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._sealing: Future | None = None

    def steps(self) -> list[int]:
        """Return the steps in order. Directories with a name that is not a plain integer are ignored."""
        names = (p.name for p in self._directory.iterdir() if p.is_dir()) if self._directory.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,14}", name, re.ASCII))

    def last(self) -> int | None:
        """Return the last step, or None if there are no checkpoints."""
        return max(self.steps(), default=None)

    def manifest(self, step: int) -> dict[str, Any]:
        """Return what was written beside a checkpoint: `val_loss`, `arrays`, `files` and others.

        Raises `CorruptCheckpoint` if it was changed.
        """
        if step not in self._manifests:
            self._manifests[step] = read_manifest(self._directory / str(step))
        return self._manifests[step]

    def val_loss(self, step: int) -> float | None:
        """Return the validation loss of a step in nats per token. None: not measured, or the manifest is damaged."""
        loss = self._loss(step)
        return loss if math.isfinite(loss) else None

    def _loss(self, step: int) -> float:
        """Return the validation loss to rank a step by; -inf if its manifest is damaged, since it may be the best."""
        try:
            loss = self.manifest(step)["val_loss"]
        except CorruptCheckpoint:
            return -math.inf
        return math.inf if loss is None else loss

    def set_val_loss(self, step: int, val_loss: float) -> None:
        """Record the validation loss of a saved step that was preempted before it was measured."""
        body = read_manifest(self._directory / str(step)) | {"val_loss": _finite(val_loss)}
        write_whole(self._directory / str(step) / MANIFEST, _render(body))
        self._manifests.pop(step, None)

    def verify(self, step: int) -> None:
        """Raise `CorruptCheckpoint` if a file of a checkpoint is not what was saved."""
        self._manifests[step] = check_files(self._directory / str(step))

    def latest_valid(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """Return the step of the last or the best undamaged checkpoint, or None if there are no checkpoints.

        Each damaged one that is passed over gives a warning. Raises `UserError` if all are damaged.

        Args:
            which: "last", or "best" for the lowest validation loss (the last step if none was measured).
            before: consider only steps below this one.
        """
        steps = [step for step in self.steps() if step < before]
        losses = {step: self._loss(step) if which == "best" else 0.0 for step in steps}
        good, corrupt = None, {}
        for step in sorted(steps, key=lambda step: (losses[step], -step)):
            try:
                self.verify(step)
                good = step
                break
            except (CorruptCheckpoint, OSError) as e:
                corrupt[step] = str(e)
        # Those that another process, which trains the run, removed in the meantime were not damaged.
        bad = [(step, corrupt[step]) for step in self.steps() if step in corrupt]
        if good is None and bad:
            *others, (step, reason) = bad
            others = f" (nor are {', '.join(str(other) for other, _ in others)})" if others else ""
            raise UserError(
                f"checkpoint {step} is damaged, and no other is good{others}: {reason}. Restore it from a copy."
            )
        for step, reason in bad:
            warnings.warn(f"checkpoint {step} is damaged, so {good} is used: {reason}", UserWarning, stacklevel=2)
        return good

    def remove(self, step: int) -> None:
        """Remove a checkpoint, renaming it first, so that a half-removed one is never taken for a finished one."""
        doomed = self._directory / f"{step}.deleting"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)
        self._manifests.pop(step, None)

    def remove_partial(self) -> None:
        """Remove what interrupted saves and removals have left."""
        for path in self._directory.glob("*.*"):
            if re.fullmatch(r"\d+\.(saving|deleting)", path.name):
                shutil.rmtree(path)

    def quarantine_after(self, step: int) -> None:
        """Move aside the checkpoints after `step`, the last undamaged one."""
        for later in (s for s in self.steps() if s > step):
            aside = self._directory / f"{later}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self._directory / str(later)).rename(aside)

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
            self._writer, self._pool = ocp.AsyncCheckpointer(_handler(items)), ThreadPoolExecutor(1)
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
                "val_loss": _finite(val_loss),
                "arrays": {PARAMS: {}, REST: {}} | {name: _describe(tree) for name, tree in items.items()},
            }
            self._sealing = self._pool.submit(self._seal, partial, about)

    def _seal(self, partial: Path, about: dict[str, Any]) -> None:
        """Wait for the arrays, write the manifest, publish the checkpoint and remove old ones, in the background."""
        step = about["step"]
        try:
            assert self._writer is not None
            self._writer.wait_until_finished()
            write_manifest(partial, about)
            if step in self.steps():
                self.remove(step)
            partial.rename(self._directory / str(step))
            _sync(self._directory)
            losses = {saved: self._loss(saved) for saved in self.steps()}
            damaged = {saved for saved, loss in losses.items() if loss == -math.inf}  # one of them may be the best
            best = min(losses.keys() - damaged, key=lambda saved: (losses[saved], -saved))
            for old in losses.keys() - damaged - {best, *sorted(losses)[-self._keep_last :]}:
                if not self._keep_every or old % self._keep_every:
                    self.remove(old)
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
        items = self._restore(step, _to_items(like))
        rest, guard = items[REST], items[REST]["guard"]
        opt_state = SkipState(rest["opt_state"], guard.skipped, guard.in_row, guard.norms)
        return TrainState(rest["step"], items[PARAMS], opt_state)

    def restore_params(self, step: int, like: Params) -> Params:
        """Restore only the parameters, in the dtype in which they were saved. like: their shapes and shardings."""
        saved = self.manifest(step)["arrays"][PARAMS]

        def with_saved_type(path: Any, x: Any) -> Any:
            kind = saved.get(jax.tree_util.keystr(path), "").partition("[")[0]
            return jax.ShapeDtypeStruct(x.shape, kind if kind in DTYPES else x.dtype, sharding=x.sharding)

        like = jax.tree.map_with_path(with_saved_type, tree_names.as_saved(like, saved))
        return self._restore(step, {PARAMS: like})[PARAMS]

    def _restore(self, step: int, like: dict[str, Any]) -> Any:
        import orbax.checkpoint as ocp

        directory, arrays = self._directory / str(step), self.manifest(step)["arrays"]
        like = {name: tree_names.as_saved(tree, arrays[name]) for name, tree in like.items()}
        for name, tree in like.items():  # before anything is allocated
            saved, wanted = arrays[name], _describe(tree)
            for path in sorted(saved.keys() | wanted.keys()):
                if saved.get(path) != wanted.get(path):
                    raise UserError(
                        f"{directory}: {name}{path} is {saved.get(path, 'missing')}, experiment.json makes it "
                        f"{wanted.get(path, 'nothing')}. Does experiment.json belong to another run?"
                    )
        abstract = {name: jax.tree.map(ocp.utils.to_shape_dtype_struct, tree) for name, tree in like.items()}
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()})
        with ocp.Checkpointer(_handler(abstract)) as reader:
            try:
                restored: Any = reader.restore(directory / "state", args=args)
                return {name: tree_names.as_now(restored[name], arrays[name]) for name in like}
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

    handlers: Any = {}
    for name, tree in items.items():
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
        limit: Any = (max([AT_ONCE, *sizes, sum(sizes) // 16]) + 1) / 1e9  # Orbax refuses an array that is not smaller
        handlers[name] = ocp.StandardCheckpointHandler(save_concurrent_gb=limit, restore_concurrent_gb=limit)
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
    """Return the parts of a state to save, all but frozen parameters."""
    s = state.opt_state
    guard = _Guard(skipped=s.skipped, in_row=s.in_a_row, norms=s.norms)
    return {PARAMS: state.params, REST: {"step": state.step, "opt_state": s.inner_state, "guard": guard}}


def _finite(loss: float | None) -> float | None:
    """Replace NaN and infinity, which JSON lacks and which are never the best, by None."""
    return None if loss is None or not math.isfinite(loss) else loss


def write_manifest(directory: Path, about: dict[str, Any]) -> None:
    """Seal an unpublished checkpoint: write a manifest of `about` and the size and SHA-256 of each file."""
    paths = _list_files(directory)
    with ThreadPoolExecutor() as pool:  # hashing and fsync release the GIL
        files = dict(zip(paths, pool.map(lambda p: _measure(directory / p, sync=True), paths), strict=True))
    for folder in {(directory / p).parent for p in paths}:
        _sync(folder)
    write_whole(directory / MANIFEST, _render({"format": FORMAT, **about, "files": files}))
    _sync(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises `CorruptCheckpoint` if it is not what was written for this step."""
    path = directory / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as e:
        raise CorruptCheckpoint(f"{path} cannot be read: {e.strerror}") from None
    body, is_whole = {}, False
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
        body = json.loads(raw)
        is_whole = body.pop("sha256") and _render(body).encode() == raw
    if not is_whole:
        raise CorruptCheckpoint(f"{path} is not what was written: its own SHA-256 does not match")
    if body["format"] != FORMAT:
        raise CorruptCheckpoint(
            f"{path} has format {body['format']!r} of jaxgpt {body.get('jaxgpt')}, this jaxgpt reads {FORMAT}"
        )
    if directory.name not in (str(body["step"]), f"{body['step']}.saving"):
        raise CorruptCheckpoint(f"{directory} is of step {body['step']}")
    return body


def check_files(directory: Path) -> dict[str, Any]:
    """Return the manifest. Raises `CorruptCheckpoint` for the first file that differs from it."""
    body = read_manifest(directory)
    stated, found = body["files"], _list_files(directory)
    for name in sorted(stated.keys() ^ set(found)):
        how = "is missing" if name in stated else "is not part of the checkpoint"
        raise CorruptCheckpoint(f"{directory / name} {how}")
    with ThreadPoolExecutor() as pool:
        for name, (size, digest) in zip(found, pool.map(lambda n: _measure(directory / n), found), strict=True):
            if [size, digest] != stated[name]:
                raise CorruptCheckpoint(
                    f"{directory / name} has {size:,} bytes with SHA-256 {digest[:12]}..., {stated[name][0]:,} bytes "
                    f"with {stated[name][1][:12]}... were saved"
                )
    return body


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _list_files(directory: Path) -> list[str]:
    """Return the relative paths of all files on disk except the manifest, and what a kill left of a new one."""
    found = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir())
    return sorted(path for path in found if not path.startswith(MANIFEST))


def _measure(path: Path, *, sync: bool = False) -> list:
    """Return [bytes, SHA-256]."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
        if sync:
            os.fsync(f.fileno())
        return [f.tell(), digest]


def _render(body: dict[str, Any]) -> str:
    """Return the canonical text of a manifest, with its SHA-256, so that any changed bit is detected."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n"
