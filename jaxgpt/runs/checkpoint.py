"""Save checkpoints in the background by Orbax, seal each, and verify it before it is restored.

- `checkpoints/20/state/params`, `rest`: arrays. Sampling does not read the optimiser's state
- `checkpoints/20/manifest.json`: size and SHA-256 of each file, as Orbax loads flipped bits
- `checkpoints/40.saving`, `30.deleting`: unfinished, or half removed
- `checkpoints/60.damaged`: moved aside when the run resumed from an earlier step

Orbax's `CheckpointManager` publishes a step before anything else can be added to it, so that a kill
could leave a step without a manifest. It cannot record a validation loss later, and opening it is a
barrier of all processes.
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
from jaxgpt.files import Json, json_sha256, read_bytes, write_whole
from jaxgpt.parallel import multihost
from jaxgpt.runs.bucket import Bucket, name_of
from jaxgpt.train import Params, TrainState

if TYPE_CHECKING:  # 0.5 s to import, so functions that need it import it
    import orbax.checkpoint as ocp

MANIFEST = "manifest.json"
FORMAT = 1  # version of the manifest and of the files it lists
PARAMS, REST = "params", "rest"
Trees = dict[str, Any]  # by these names
TRAINED = "trained"  # in REST: the parameters that `OptimConfig.eval_params` makes others of
# Bytes to read or write at once, or the largest array, or a sixteenth of all, whichever is most.
# Without a limit Orbax copies all arrays at once: another model in memory.
AT_ONCE = 2**26
DTYPES = ("float32", "bfloat16", "float16")  # that parameters are saved in


class CorruptCheckpoint(UserError):
    """A checkpoint has changed since it was saved. The message names the file."""


@struct.dataclass
class _Guard:
    """The counters of skipped steps in a `TrainState`, as the first version named them."""

    skipped: Any
    in_row: Any
    norms: Any = None  # gradient norms, which an earlier version saved


class Checkpoints:
    """The checkpoints of one run. `save` returns at once, `wait` when the checkpoint is on disk.

    With several processes all of them save, and process 0 seals the new checkpoint and removes old
    ones. Only the process that holds the run's lock may change them.

    Args:
        directory: `RUN/checkpoints`, which need not exist.
        keep_last: how many of the last checkpoints to keep. The best is kept as well.
        keep_every: keep the multiples of this many steps as well. None means no others.
    """

    def __init__(self, directory: Path, keep_last: int = 1, keep_every: int | None = None):
        self._directory = directory.absolute()
        if re.search(r"[\\\ud800-\udfff]", self._directory.as_posix()):
            why = "a backslash or is not UTF-8, so that TensorStore would write elsewhere"
            raise UserError(f"{directory}: its path has {why}: rename that directory, or name another")
        self._keep_last, self._keep_every = keep_last, keep_every
        # A thread of our own, which starts with the first save: Orbax calls back before it renames
        # what it wrote, and taking the SHA-256 in a step would delay it.
        self._pool = ThreadPoolExecutor(1)
        self._sealing: Future | None = None
        self.bucket: Bucket | None = None  # where each checkpoint is sent

    def steps(self) -> list[int]:
        """Return the steps in order. Directories whose name is no plain integer are ignored."""
        names = os.listdir(self._directory) if self._directory.is_dir() else ()
        return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,14}", name))

    def last(self) -> int | None:
        """Return the last step, or None if there are no checkpoints."""
        return max(self.steps(), default=None)

    def manifest(self, step: int) -> Json:
        """Return what was written with a checkpoint: `val_loss`, `arrays`, `files` and others.

        Raises `CorruptCheckpoint` if it was changed, or if a field has another type.
        """
        path = self._directory / str(step) / MANIFEST
        try:
            raw = read_bytes(path, 2**28)  # as of about a million arrays
        except UserError as e:
            raise CorruptCheckpoint(str(e)) from None
        with contextlib.suppress(ValueError, RecursionError, AttributeError, KeyError, TypeError):
            body = json.loads(raw)
            is_sealed = body.pop("sha256", None) and _render(body).encode() == raw
            arrays = [*body["arrays"][PARAMS].values(), *body["arrays"][REST].values()]
            sizes, digests = zip(*body["files"].values(), strict=True)
            is_typed = set(map(type, sizes)) <= {int} and set(map(type, [*arrays, *digests])) <= {str}
            if is_sealed and is_typed and isinstance(body["val_loss"], float | None) and body["format"] == FORMAT:
                return body
        why = "its own SHA-256 does not match, or a field's type"
        raise CorruptCheckpoint(f"{path} is not what was written: {why}")

    def val_loss(self, step: int) -> float | None:
        """Return a step's validation loss in nats per token. None if not measured, or damaged."""
        return _finite(self._loss(step))

    def _loss(self, step: int) -> float:
        """Return the loss to rank a step by: -inf if it is damaged, since it may be the best."""
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
        """Raise `CorruptCheckpoint` for the first file of a step that is not what was saved."""
        directory, manifest = self._directory / str(step), self.manifest(step)
        found = _measure(directory)
        for name, (size, digest) in manifest["files"].items():
            if [size, digest] != found.get(name):
                raise CorruptCheckpoint(f"{directory / name} is not what was saved: {size:,} bytes, SHA-256 {digest}")

    def latest_valid(self, which: str = "last", *, before: float = math.inf) -> int | None:
        """Return the last or the best undamaged step, or None if there are no checkpoints.

        Each damaged one that is passed over gives a warning. Raises `UserError` if all are damaged.

        Args:
            which: "last", or "best" for the lowest validation loss, if any was measured.
            before: consider only steps below this one.
        """
        steps = [step for step in reversed(self.steps()) if step < before]
        if which == "best":
            steps.sort(key=self._loss)
        damaged: list[tuple[int, Exception]] = []
        for step in steps:
            try:
                self.verify(step)
            except (CorruptCheckpoint, OSError) as e:
                damaged.append((step, e))
                continue
            for bad, why in damaged:
                warnings.warn(f"checkpoint {bad} is damaged, so {step} is used: {why}", stacklevel=2)
            return step
        for bad, why in damaged:
            said = f"checkpoint {bad} is damaged, and no other is good: {why}"
            raise UserError(f"{said}. Restore it from a copy.")
        return None

    def rewind(self) -> int:
        """Return the last undamaged step, or 0. Remove what kills left, move damaged ones aside."""
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
        """Remove a checkpoint, renaming it first: half of one is never taken for a whole one."""
        doomed = self._directory / f"{step}.deleting"
        (self._directory / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def save(self, state: TrainState, step: int, val_loss: float | None, *, eval_params: Params | None = None) -> None:
        """Start to save a state. Raises `CheckpointSaveError`, for this save or the previous one.

        val_loss: the step's, to choose the best checkpoint. None means it was not measured.
        eval_params: the parameters to load as the model, if they are not the trained ones.
        """
        self._save(_to_items(state, eval_params), step, val_loss)

    def save_params(self, params: Params, step: int) -> None:
        """Start to save only parameters, of any dtype: training cannot resume from them."""
        self._save({PARAMS: params}, step, None)

    def _save(self, items: Trees, step: int, val_loss: float | None) -> None:
        import orbax.checkpoint as ocp

        self.wait()
        partial, writer = self._directory / f"{step}.saving", ocp.AsyncCheckpointer(_handler(items))
        try:
            if multihost.is_process_0():
                partial.mkdir(parents=True)
            args = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
            writer.save(_literal(partial / "state"), args=ocp.args.Composite(**args))
        except Exception as e:
            raise self._fail(step, e) from None
        arrays = {PARAMS: {}, REST: {}} | {name: _describe(tree) for name, tree in items.items()}
        about = {"format": FORMAT, "jaxgpt": version("jaxgpt"), "step": step}
        about |= {"val_loss": _finite(val_loss), "arrays": arrays}
        self._sealing = self._pool.submit(self._seal, writer, partial, about)

    def _seal(self, writer: ocp.AsyncCheckpointer, partial: Path, about: Json) -> None:
        """Wait for the arrays, write the manifest, publish the checkpoint, and remove old ones."""
        step = about["step"]
        try:
            with writer:
                writer.wait_until_finished()
            if not multihost.is_process_0():
                return
            about["files"] = _measure(partial)
            write_whole(partial / MANIFEST, _render(about))
            for path in (*partial.rglob("*"), partial):
                _sync(path)
            if step in self.steps():
                self.remove(step)
            partial.rename(self._directory / str(step))
            _sync(self._directory)
            losses = {saved: self._loss(saved) for saved in self.steps()}
            damaged = {saved for saved in losses if losses[saved] == -math.inf}  # or the best
            best = min(losses.keys() - damaged, key=lambda saved: (losses[saved], -saved))
            for old in losses.keys() - damaged - {best, *sorted(losses)[-self._keep_last :]}:
                if not self._keep_every or old % self._keep_every:
                    self.remove(old)
        except Exception as e:
            raise self._fail(step, e) from None
        if self.bucket is not None:
            self.bucket.push()

    def _fail(self, step: int, e: Exception) -> CheckpointSaveError:
        said = f"step {step} could not be saved in {self._directory}: {reason_of(e)}"
        return CheckpointSaveError(f"{said}. The last checkpoint is step {max(self.steps(), default='none')}.")

    def raise_if_failed(self) -> None:
        """Raise `CheckpointSaveError` if the last save has failed by now, without waiting."""
        if self._sealing is not None and self._sealing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is published. Raises `CheckpointSaveError` if it has failed."""
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    def close(self) -> None:
        """Wait for the last save, as `wait` does, and end the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Restore a state but for frozen parameters. like: its shapes, dtypes and shardings."""
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
        """Restore the parameters, in the dtypes that were saved. like: shapes and shardings."""
        return self._restore(step, {PARAMS: like}, as_saved=DTYPES)[PARAMS]

    def _restore(self, step: int, like: Trees, as_saved: Sequence[str] = ()) -> Trees:
        """Restore trees by name, in the dtypes of `like`, or the saved ones if in `as_saved`."""
        import orbax.checkpoint as ocp

        directory, arrays = self._directory / str(step), self.manifest(step)["arrays"]
        shapes = {name: _to_shapes(tree, arrays[name], as_saved) for name, tree in like.items()}
        for name, tree in shapes.items():  # before anything is allocated
            saved, wanted = arrays[name], _describe(tree)
            for path in sorted(saved | wanted):
                has, needs = saved.get(path, "missing"), wanted.get(path, "nothing")
                if has != needs:
                    what = f"{directory}: {name}{path} is {has}, experiment.json makes it {needs}"
                    raise UserError(f"{what}. Does experiment.json belong to another run?")
        args = {
            name: ocp.args.PyTreeRestore(tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree))
            for name, tree in shapes.items()
        }
        with ocp.Checkpointer(_handler(shapes)) as reader:
            found: Any = reader.restore(_literal(directory / "state"), args=ocp.args.Composite(**args))
        leaves = jax.tree.leaves({name: found[name] for name in like})
        return jax.tree.unflatten(jax.tree.structure(like), leaves)  # with the names of now


def open_checkpoints(run: Path) -> Checkpoints:
    """Open the checkpoints of an existing run. Raises `UserError` if it has none yet."""
    checkpoints = Checkpoints(run / "checkpoints")
    if not checkpoints.steps():
        command = shell_line("jaxgpt", "train", "--run-dir", name_of(run))
        raise UserError(f"{name_of(run)} has no checkpoint yet: train it with `{command}`")
    return checkpoints


def _handler(items: Trees) -> ocp.CompositeCheckpointHandler:
    """Return Orbax's handler of these trees, which limits the bytes that it moves at once.

    What it saves is not compressed: zstd makes trained weights 7% smaller, and takes twice the time to
    save and three times the time to restore.
    """
    import orbax.checkpoint as ocp

    made: Any = {}
    for name, tree in items.items():
        sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree)]
        most = max([AT_ONCE, *sizes, sum(sizes) // 16])
        gb: Any = (most + 1) / 1e9  # Orbax refuses an array that is not smaller
        made[name] = ocp.PyTreeCheckpointHandler(save_concurrent_gb=gb, restore_concurrent_gb=gb, use_compression=False)
    return ocp.CompositeCheckpointHandler(**made)


def _to_items(state: TrainState, eval_params: Params | None) -> Trees:
    """Return what is saved of a state: all but frozen parameters. See `Checkpoints.save`."""
    guard = _Guard(skipped=state.skipped, in_row=state.skipped_in_a_row)
    rest = {"step": state.step, "opt_state": state.opt_state, "guard": guard}
    if eval_params is None:
        return {PARAMS: state.params, REST: rest}
    return {PARAMS: eval_params, REST: rest | {TRAINED: state.params}}


def _describe(tree: Any) -> dict[str, str]:
    """Return the type and shape of each array: {path: "float32[3,4]"}."""
    kinds = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}".replace(" ", ""), tree)
    return {jax.tree_util.keystr(path): kind for path, kind in jax.tree.leaves_with_path(kinds)}


def _to_shapes(tree: Any, saved: dict[str, str], as_saved: Sequence[str]) -> Any:
    """Return the shapes to read, by a checkpoint's names, in its dtypes if they are in `as_saved`.

    Earlier versions saved `lm_head` as an array, not as a module with a `kernel`.
    """

    def has_head(x: Any) -> bool:
        return isinstance(x, dict) and "lm_head" in x

    def to_shape(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        kind = saved.get(jax.tree_util.keystr(path), "").partition("[")[0]
        dtype = kind if kind in as_saved else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    def to_array(x: Any) -> Any:
        return x | {"lm_head": x["lm_head"]["kernel"]} if has_head(x) else x

    if any(path.endswith("['lm_head']") for path in saved):
        tree = jax.tree.map(to_array, tree, is_leaf=has_head)
    return jax.tree.map_with_path(to_shape, tree)


def _literal(directory: Path) -> Any:
    """Return a path for Orbax, which globs the files of processes: no name is a pattern."""
    from etils import epath

    class LiteralPath(type(epath.Path())):
        def glob(self, pattern: str) -> Any:
            return map(type(self), Path(self).glob(pattern))

    return LiteralPath(directory)


def _finite(loss: float | None) -> float | None:
    """Replace NaN and infinity, which JSON lacks and which are never the best, by None."""
    return None if loss is None or not math.isfinite(loss) else loss


def _measure(directory: Path) -> dict[str, list]:
    """Return {relative path: [bytes, SHA-256]} of all files but the manifest."""

    def measure(path: Path) -> list:
        with path.open("rb") as f:  # an `OSError` if training has removed it
            return [path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]

    files = [path for path in directory.rglob("*") if path.is_file()]
    paths = sorted(path for path in files if not path.name.startswith(MANIFEST))
    names = [path.relative_to(directory).as_posix() for path in paths]
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        return dict(zip(names, pool.map(measure, paths), strict=True))


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _render(body: Json) -> str:
    """Return the canonical text of a manifest, with its SHA-256: any changed bit is detected."""
    return json.dumps({**body, "sha256": json_sha256(body)}, indent=1) + "\n"
