"""Save checkpoints in the background by Orbax, seal each with a manifest, and verify it before it is restored.

- `checkpoints/20/state/params`, `rest`: arrays, so that sampling does not read the optimiser's state
- `checkpoints/20/manifest.json`: size and SHA-256 of each file, since Orbax loads flipped bits without an error
- `checkpoints/40.saving`, `30.deleting`: unfinished, or half removed. The name of a finished one is its step
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
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import struct

from jaxgpt.errors import CheckpointSaveError, UserError, reason_of, shell_line
from jaxgpt.files import json_sha256, read_bytes, write_whole
from jaxgpt.model import GPTConfig
from jaxgpt.parallel import multihost
from jaxgpt.train import Params, TrainState

if TYPE_CHECKING:  # 0.5 s to import, so functions that need it import it
    import orbax.checkpoint as ocp

MANIFEST = "manifest.json"
FORMAT = 1  # version of the manifest and of the files it lists
PARAMS, REST = "params", "rest"
TRAINED = "trained"  # in REST: the parameters that are trained, where `OptimConfig.eval_params` makes others of them
# Bytes to read or write concurrently, or the largest array, or a sixteenth of all, whichever is most. Without a limit
# Orbax copies and compresses all arrays at once: another model in memory.
AT_ONCE = 2**26
DTYPES = ("float32", "bfloat16", "float16")  # that parameters are saved in


class CorruptCheckpoint(UserError):
    """A checkpoint has changed since it was saved. The message names the file and the difference."""


@struct.dataclass
class _Guard:
    """The counters of skipped steps in a `TrainState`, under the names that the first version gave them."""

    skipped: Any
    in_row: Any
    norms: Any = None  # gradient norms, which an earlier version saved


class Checkpoints:
    """The checkpoints of one run. `save` returns at once. `wait` returns when the checkpoint is on disk.

    With several processes all of them save, and process 0 seals the new checkpoint and removes old ones. Only the
    process that holds the run's lock may change them.

    Args:
        directory: `RUN/checkpoints`, which need not exist.
        keep_last: how many of the last checkpoints to keep. The best is kept as well.
        keep_every: keep the multiples of this many steps as well. None means no others.
    """

    def __init__(self, directory: Path, *, keep_last: int = 1, keep_every: int | None = None):
        self._directory = directory.absolute()
        if re.search(r"[\\\ud800-\udfff]", self._directory.as_posix()):
            why = "a backslash or is not UTF-8, so that TensorStore would write elsewhere"
            raise UserError(f"{self._directory}: its path has {why}: rename that directory, or name another")
        self._keep_last, self._keep_every = keep_last, keep_every
        # A thread of our own, which starts with the first save: Orbax calls back before it renames
        # what it wrote, and taking the SHA-256 in a step would delay it.
        self._pool = ThreadPoolExecutor(1)
        self._sealing: Future | None = None

    def steps(self) -> list[int]:
        """Return the steps in order. Directories with a name that is not a plain integer are ignored."""
        names = (p.name for p in self._directory.iterdir()) if self._directory.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,14}", name, re.ASCII))

    def last(self) -> int | None:
        """Return the last step, or None if there are no checkpoints."""
        return max(self.steps(), default=None)

    def manifest(self, step: int) -> dict[str, Any]:
        """Return what was written with a checkpoint: `val_loss`, `arrays`, `files` and others.

        Raises `CorruptCheckpoint` if it was changed, or if a field has another type than is written.
        """
        path = self._directory / str(step) / MANIFEST
        try:
            raw = read_bytes(path, 2**28)  # as of about a million arrays
        except UserError as e:
            raise CorruptCheckpoint(str(e)) from None
        with contextlib.suppress(ValueError, RecursionError, AttributeError, KeyError, TypeError):
            body = json.loads(raw)
            is_sealed = body.pop("sha256", None) and _render(body).encode() == raw
            if is_sealed and body["format"] == FORMAT and isinstance(body["val_loss"], float | None):
                measured = {(type(size), type(digest)) for size, digest in body["files"].values()}
                described = {type(x) for name in (PARAMS, REST) for x in body["arrays"][name].values()}
                if measured <= {(int, str)} and described <= {str}:
                    return body
        raise CorruptCheckpoint(f"{path} is not what was written: its own SHA-256 does not match, or a field's type")

    def check_depth(self, model: GPTConfig) -> None:
        """Raise `UserError` for more blocks than arrays were saved, before a model is traced, which could take minutes."""
        with contextlib.suppress(CorruptCheckpoint, IndexError):  # it has no checkpoint yet
            arrays = len(self.manifest(self.steps()[-1])["arrays"][PARAMS])
            if model.n_layer > arrays and not (model.scan_layers or model.is_foreign):
                said = f"{arrays} arrays, n_layer={model.n_layer}: is experiment.json another's?"
                raise UserError(f"{self._directory}: {said}")

    def val_loss(self, step: int) -> float | None:
        """Return the validation loss of a step in nats per token. None if not measured, or if the manifest is damaged."""
        loss = self._loss(step)
        return loss if math.isfinite(loss) else None

    def _loss(self, step: int) -> float:
        """Return the validation loss to rank a step by, or -inf if its manifest is damaged, since it may be the best."""
        try:
            loss = self.manifest(step)["val_loss"]
        except CorruptCheckpoint:
            return -math.inf
        return math.inf if loss is None else loss

    def set_val_loss(self, step: int, val_loss: float) -> None:
        """Record the validation loss of a saved step that was preempted before it was measured."""
        body = self.manifest(step) | {"val_loss": _finite(val_loss)}
        write_whole(self._directory / str(step) / MANIFEST, _render(body))

    def verify(self, step: int) -> None:
        """Raise `CorruptCheckpoint` for the first file of a checkpoint that is not what was saved."""
        directory, manifest = self._directory / str(step), self.manifest(step)
        found = _measure(directory)
        if lost := _find_unmerged(manifest):
            raise CorruptCheckpoint(f"{directory} was saved without {lost}")
        for name, (size, digest) in manifest["files"].items():
            if [size, digest] != found.get(name):
                raise CorruptCheckpoint(f"{directory / name} is not what was saved: {size:,} bytes, SHA-256 {digest}")

    def latest_valid(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """Return the step of the last or the best undamaged checkpoint, or None if there are no checkpoints.

        Each damaged one that is passed over gives a warning. Raises `UserError` if all are damaged.

        Args:
            which: "last", or "best" for the lowest validation loss (the last step if none was measured).
            before: consider only steps below this one.
        """
        losses = {step: self._loss(step) if which == "best" else 0.0 for step in self.steps() if step < before}
        damaged: dict[int, str] = {}
        for step in sorted(losses, key=lambda step: (losses[step], -step)):
            try:
                self.verify(step)
            except (CorruptCheckpoint, OSError) as e:
                if step in self.steps():  # otherwise another process, which trains the run, has removed it
                    damaged[step] = str(e)
                continue
            for bad, reason in damaged.items():
                warnings.warn(f"checkpoint {bad} is damaged, so {step} is used: {reason}", stacklevel=2)
            return step
        for step, reason in damaged.items():
            raise UserError(f"checkpoint {step} is damaged, and no other is good: {reason}. Restore it from a copy.")
        return self.latest_valid(which, before=before) if losses else None

    def rewind(self) -> int:
        """Return the last undamaged step, 0 if there is none. Remove what kills have left, and move damaged ones aside."""
        for path in self._directory.glob("*.*"):
            if re.fullmatch(r"\d+\.(saving|deleting)", path.name):
                shutil.rmtree(path)
        step = self.latest_valid() or 0
        for later in (s for s in self.steps() if s > step):
            aside = self._directory / f"{later}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (self._directory / str(later)).rename(aside)
        return step

    def remove(self, step: int) -> None:
        """Remove a checkpoint, renaming it first, so that a half-removed one is never taken for a finished one."""
        doomed = self._directory / f"{step}.deleting"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def save(self, state: TrainState, step: int, val_loss: float | None, *, eval_params: Params | None = None) -> None:
        """Start to save a state. Raises `CheckpointSaveError`, for this save or for the previous one.

        val_loss: the step's, to choose the best checkpoint. None means it was not measured.
        eval_params: the parameters that are loaded as the model, saved as well as the trained ones. None means the latter.
        """
        self._save(_to_items(state, eval_params), step, val_loss)

    def save_params(self, params: Params, step: int) -> None:
        """Start to save only parameters, of any dtype: they can be loaded, but training cannot resume from them."""
        self._save({PARAMS: params}, step, None)

    def _save(self, items: dict[str, Any], step: int, val_loss: float | None) -> None:
        import orbax.checkpoint as ocp

        self.wait()
        partial, writer = self._directory / f"{step}.saving", ocp.AsyncCheckpointer(_handler(items))
        try:
            if multihost.is_process_0():
                partial.mkdir(parents=True)
            args = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
            writer.save(_literal(partial / "state"), args=ocp.args.Composite(**args))
        except Exception as e:
            raise self._fail(step, e) from None
        arrays = {PARAMS: {}, REST: {}} | {name: _describe(tree) for name, tree in items.items()}
        about = {"format": FORMAT, "jaxgpt": version("jaxgpt"), "step": step}
        about |= {"val_loss": _finite(val_loss), "arrays": arrays}
        self._sealing = self._pool.submit(self._seal, writer, partial, about)

    def _seal(self, writer: ocp.AsyncCheckpointer, partial: Path, about: dict[str, Any]) -> None:
        """Wait for the arrays, write the manifest, publish the checkpoint and remove old ones, in the background."""
        step = about["step"]
        try:
            with writer:
                writer.wait_until_finished()
            if not multihost.is_process_0():
                return
            about["files"] = _measure(partial)
            if lost := _find_unmerged(about):
                raise FileNotFoundError(f"Orbax has not written {partial / lost}")
            write_whole(partial / MANIFEST, _render(about))
            for path in (*partial.rglob("*"), partial):
                _sync(path)
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
        return CheckpointSaveError(
            f"step {step} could not be saved in {self._directory}: {reason_of(e)}. "
            f"The last checkpoint is step {max(self.steps(), default='none')}."
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

    def close(self) -> None:
        """Wait for the last save, and end the thread. Raises `CheckpointSaveError` as `wait` does."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Restore a state without frozen parameters, which are not saved. like: its shapes, dtypes and shardings."""
        saved = self.manifest(step)["arrays"][REST]
        has_both = any(path.startswith(f"[{TRAINED!r}]") for path in saved)
        items = _to_items(like, like.params if has_both else None)
        if "['guard'].norms" in saved:
            norms = jax.ShapeDtypeStruct((128,), "float32", sharding=like.skipped.sharding)
            items[REST]["guard"] = items[REST]["guard"].replace(norms=norms)
        items = self._restore(step, items)
        rest, guard = items[REST], items[REST]["guard"]
        params = rest.get(TRAINED, items[PARAMS])
        return TrainState(rest["step"], params, rest["opt_state"], guard.skipped, guard.in_row)

    def restore_params(self, step: int, like: Params) -> Params:
        """Restore only the parameters, in the dtype in which they were saved. like: their shapes and shardings."""
        return self._restore(step, {PARAMS: like}, as_saved=DTYPES)[PARAMS]

    def _restore(self, step: int, like: dict[str, Any], as_saved: Sequence[str] = ()) -> dict[str, Any]:
        """Restore trees by name, in the dtypes of `like`, except for arrays that were saved in one of `as_saved`."""
        import orbax.checkpoint as ocp

        directory, arrays = self._directory / str(step), self.manifest(step)["arrays"]
        like = {name: _to_shapes(tree, arrays[name], as_saved) for name, tree in like.items()}
        for name, tree in like.items():  # before anything is allocated
            saved, wanted = arrays[name], _describe(tree)
            for path in sorted(saved | wanted):
                has, needs = saved.get(path, "missing"), wanted.get(path, "nothing")
                if has != needs:
                    what = f"{directory}: {name}{path} is {has}, experiment.json makes it {needs}"
                    raise UserError(f"{what}. Does experiment.json belong to another run?")
        args = ocp.args.Composite(**{name: ocp.args.StandardRestore(tree) for name, tree in like.items()})
        with ocp.Checkpointer(_handler(like)) as reader:
            restored: Any = reader.restore(_literal(directory / "state"), args=args)
        return {name: _rename_heads(restored[name], arrays[name], back=True) for name in like}


def open_checkpoints(run: Path) -> Checkpoints:
    """Open the checkpoints of an existing run. Raises `UserError` if it has none yet."""
    checkpoints = Checkpoints(run / "checkpoints")
    if not checkpoints.steps():
        command = shell_line("jaxgpt", "train", "--run-dir", run)
        raise UserError(f"{run} has no checkpoint yet: train it with `{command}`")
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


def _to_items(state: TrainState, eval_params: Params | None) -> dict[str, Any]:
    """Return the parts of a state to save, all but frozen parameters. eval_params: see `Checkpoints.save`."""
    guard = _Guard(skipped=state.skipped, in_row=state.in_a_row)
    rest = {"step": state.step, "opt_state": state.opt_state, "guard": guard}
    if eval_params is None:
        return {PARAMS: state.params, REST: rest}
    return {PARAMS: eval_params, REST: rest | {TRAINED: state.params}}


def _describe(tree: Any) -> dict[str, str]:
    """Return the type and shape of each array: {path: "float32[3,4]"}."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}".replace(" ", "") for path, x in leaves}


def _to_shapes(tree: Any, saved: dict[str, str], as_saved: Sequence[str]) -> Any:
    """Return the shapes to read, with the names of a checkpoint, and its dtypes if they are in `as_saved`."""

    def to_shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        kind = saved.get(jax.tree_util.keystr(path), "").partition("[")[0]
        dtype = kind if kind in as_saved else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree.map_with_path(to_shape, _rename_heads(tree, saved))


def _rename_heads(tree: Any, saved: dict[str, str], *, back: bool = False) -> Any:
    """Return a tree with the names of a checkpoint, which has the paths `saved`. back: with the names of now instead.

    Earlier versions saved `lm_head` as an array, not as a module with a `kernel`.
    """
    if not any(path.endswith("['lm_head']") for path in saved):
        return tree

    def rename(x: Any) -> Any:
        if not isinstance(x, dict) or "lm_head" not in x:
            return x
        head = x["lm_head"]
        return x | {"lm_head": {"kernel": head} if back else head["kernel"]}

    return jax.tree.map(rename, tree, is_leaf=lambda x: isinstance(x, dict) and "lm_head" in x)


def _literal(directory: Path) -> Any:
    """Return a path for Orbax whose `glob`, by which it finds each process's files, takes no name as a pattern."""
    from etils import epath

    class LiteralPath(type(epath.Path())):
        def glob(self, pattern: str) -> Any:
            return map(type(self), Path(self).glob(pattern))

    return LiteralPath(directory)


def _find_unmerged(manifest: dict[str, Any]) -> str | None:
    """Return the file without which a checkpoint cannot be read, although Orbax saved it without an error."""
    merged = (f"state/{name}/manifest.ocdbt" for name in (PARAMS, REST) if manifest["arrays"][name])
    return next((name for name in merged if name not in manifest["files"]), None)


def _finite(loss: float | None) -> float | None:
    """Replace NaN and infinity, which JSON lacks and which are never the best, by None."""
    return None if loss is None or not math.isfinite(loss) else loss


def _measure(directory: Path) -> dict[str, list]:
    """Return {relative path: [bytes, SHA-256]} of all files but the manifest."""

    def measure(path: Path) -> list:
        with path.open("rb") as f:  # an `OSError` if training has removed it
            return [path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]

    paths = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(MANIFEST))
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        found = pool.map(measure, paths)
        return {path.relative_to(directory).as_posix(): measured for path, measured in zip(paths, found, strict=True)}


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _render(body: dict[str, Any]) -> str:
    """Return the canonical text of a manifest, with its SHA-256, so that any changed bit is detected."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n"
