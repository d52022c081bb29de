"""Train an experiment in a run directory, from the first check to the last checkpoint: `fit`.

It is not called `fit`: a module of that name would hide the function `jaxgpt.fit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxgpt.batch import Batch
from jaxgpt.config.validate import check_value
from jaxgpt.data.corpus import service_errors
from jaxgpt.data.dataset import DataConfig, resolve_vocab
from jaxgpt.data.mixture import parts_of
from jaxgpt.data.pipeline import Dataset, Split, training_batches, validation_batches
from jaxgpt.errors import CheckpointSaveError, Diverged, Preempted, RaisedOnAllProcesses, UserError, shell_line
from jaxgpt.experiment import Experiment, TrainConfig
from jaxgpt.lora import LoraConfig, freeze, merge_adapters, thaw, thawed_shapes
from jaxgpt.parallel import multihost
from jaxgpt.parallel.jax_setup import configure_jax, first_device
from jaxgpt.parallel.limits import check_memory
from jaxgpt.parallel.profile import StepProfiler, parse_steps
from jaxgpt.parallel.signals import catch_signals
from jaxgpt.parallel.strategy import StepFn
from jaxgpt.parallel.trainer import IN_FLIGHT, Trainer, gather_params, make_trainer, mean_loss
from jaxgpt.runs import checks
from jaxgpt.runs.bucket import Bucket, address_of, name_of
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.code import check_same_code, is_trusting, name_with_place, own_classes, with_classes_of
from jaxgpt.runs.directory import (
    RUNS,
    RunMetadata,
    extend_metadata,
    is_resumable,
    is_run,
    lock_run,
    read_metadata,
    write_metadata,
)
from jaxgpt.runs.log import Line, RunLog
from jaxgpt.runs.metrics import rewind_metrics
from jaxgpt.runs.pretrained import Weights, resolve_init_from
from jaxgpt.runs.resume import check_same_configuration, reopen_dataset, with_horizons
from jaxgpt.train import Metrics, Params, TrainState, init_and_dropout_keys, why_skipped

if TYPE_CHECKING:
    from jaxgpt.run import Run

ROLLOUT = 2  # makes the key of rollouts from the key of initialisation. Adapters have 1


def fit(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    extend: bool | None = None,
    trust_code: bool = False,
    progress: bool = True,
    setup: bool = True,
    callbacks: Sequence[Callable[[Line], None]] = (),
) -> Run:
    """Train an experiment, or resume its run. Return the run with its best parameters.

    Args:
        experiment: what to train, and how.
        run_dir: the run directory, or its address in a bucket. None means `runs/NAME`, by the experiment's name.
        fresh: move an old run aside and start over.
        extend: whether a run may go on to more steps. None means unless its learning rate would rise.
        trust_code: resume a run with its own copy of its classes' code.
        progress: show lines about the progress.
        setup: call `configure_jax` first. False leaves the process as it is.
        callbacks: functions that take each line of metrics.jsonl, and {"step": N, "saved": N} for a
            checkpoint, in every process.

    Raises:
        UserError: for a mistake of the user, before anything is written.
        Preempted: on Ctrl-C or SIGTERM, after a save.
        Diverged: if the run no longer learns.
        CheckpointSaveError: if a checkpoint or metrics.jsonl cannot be written.
    """
    check_value("experiment", experiment, Experiment)
    if setup:
        configure_jax()
    directory, address = Path(RUNS / experiment.name if run_dir is None else run_dir), address_of(run_dir)
    multihost.initialize(experiment.parallel)
    first_device()  # here, so that JAX reports a missing device before anything else is done
    with contextlib.ExitStack() as stack:
        with multihost.raise_on_all():  # the user can repair what fails here, so nothing is written yet
            bucket, recorded = None, None
            if address is not None:
                bucket = hold_bucket(stack, address, fresh=fresh)
                directory = bucket.directory
            if is_resumable(directory, fresh):
                recorded = read_metadata(directory, trust_code=trust_code)
                if trust_code or is_trusting():
                    experiment = with_classes_of(recorded.given, experiment)
            training = open_training(experiment, directory, recorded, extend=extend)
            training.checkpoints.bucket = bucket
            profiled = parse_steps(training.experiment.train.profile)
        multihost_utils.sync_global_devices("connected")  # now: a process that compiles would be late
        start = multihost.on_process_0(lambda: open_directory(stack, training, recorded, fresh=fresh))
        experiment, trainer, checkpoints = training.experiment, training.trainer, training.checkpoints
        config, is_first = experiment.train, multihost.is_process_0()
        step_fn = training.start_compiling(start)
        state = training.restore_or_init(start)
        batches = stack.enter_context(contextlib.closing(training.batches(start)))
        caught = stack.enter_context(catch_signals())  # until the last save is done
        stack.push(training.close)
        log = RunLog(directory, experiment, trainer, start, callbacks, show=progress and is_first)
        stack.callback(log.close)
        profiler = StepProfiler(profiled, directory / "profile", log.say)
        stack.callback(profiler.close)
        watch = stack.enter_context(multihost.watch_progress())
        for line in introduction(training, start):
            log.say(line)

        def is_interrupted() -> bool:
            watch()
            return caught(None) is not None

        def measure(state: TrainState) -> tuple[float, dict[str, float]] | None:
            """Return the validation loss, and each source's, or None if a signal interrupts."""
            with log.clock.paused():
                losses = training.measure_val_loss(trainer.merged_params(state), is_interrupted)
            return None if is_interrupted() else losses

        def validate(step: int, state: TrainState) -> float | None:
            """Log the validation loss. Return it if it is finite, and no signal interrupts."""
            losses = measure(state)
            if losses is None:
                return None
            log.log_validation(step, *losses)
            if math.isfinite(losses[0]):
                return losses[0]
            if step == config.steps:
                raise training.diverged(f"the last validation loss is {losses[0]}")
            return None

        losses = map(checkpoints.val_loss, checkpoints.steps())  # unlike metrics.jsonl, with checksums
        best = min((loss for loss in losses if loss is not None), default=math.inf)
        is_measured = any(line["step"] == start and "val_loss" in line for line in log.lines)
        if start and is_eval_step(start, config) and not is_measured:  # a signal had interrupted it
            val_loss = validate(start, state)
            if val_loss is not None:
                best = min(best, val_loss)
                if is_first:
                    checkpoints.set_val_loss(start, val_loss)
        if progress and training.weights is not None and not start:
            before = measure(state)
            if before is not None:
                log.say(f"validation loss of these weights, before the first step: {before[0]:.4f}")
        command = shell_line("jaxgpt", "train", "--run-dir", name_of(directory))
        signal = caught(None)
        if signal is not None:
            raise Preempted(f"{signal}: step {start} of {config.steps} is saved. To continue: {command}")

        in_flight = InFlight(training, log)
        is_due = False  # whether a checkpoint is to be saved
        for step in range(start + 1, config.steps + 1):
            watch()
            began = time.monotonic()
            batch, rolled_out = training.shard_batch(step, state, next(batches))
            state, metrics = profiler.take(step, step_fn, state, batch, training.dropout_key)
            in_flight.add(step, rolled_out | metrics)
            if step == start + 1:  # which compiles, so the others wait for it
                in_flight.settle()
                log.log_first_step(step, time.monotonic() - began)
            in_flight.settle(IN_FLIGHT)
            checkpoints.raise_if_failed()

            signal = caught(step)
            val_loss = None
            if signal is None and is_eval_step(step, config):
                in_flight.settle()
                val_loss = validate(step, state)
                signal = caught(None)
            if val_loss is not None and val_loss < best:
                best, is_due = val_loss, True
            if signal is not None:
                log.say(f"{signal}: stopping as soon as the progress is saved; a second signal stops at once")
            if signal is not None or step % config.checkpoint_every == 0 or step == config.steps:
                is_due = True
            if is_due:
                in_flight.settle()
                # After skipped steps the parameters may be bad, unless the validation loss is finite.
                # They must not replace good ones: the next step taken is saved instead.
                if not in_flight.skipped_in_a_row or val_loss is not None or signal is not None:
                    watch()
                    training.save(step, state, val_loss, log)
                    is_due = False
            if signal is not None:
                checkpoints.wait()
                raise Preempted(f"{signal}: saved step {step} of {config.steps}. To continue: {command}")
        checkpoints.wait()
    from jaxgpt.run import load_run  # with all that samples, which no step needs

    return load_run(read_metadata(directory, trust_code=trust_code))


class InFlight:
    """The steps whose metrics are still on the device, so that the host runs ahead of it by a few."""

    def __init__(self, training: Training, log: RunLog) -> None:
        """Begin without steps."""
        self._training, self._log, self._steps = training, log, deque[tuple[int, Metrics]]()
        self.skipped_in_a_row = 0  # as the last settled step has it

    def add(self, step: int, metrics: Metrics) -> None:
        """Add a step that has been dispatched."""
        self._steps.append((step, metrics))

    def settle(self, most: int = 0) -> None:
        """Wait for the oldest steps and log them. Raise `Diverged` after too many skipped in a row."""
        while len(self._steps) > most:
            step, arrays = self._steps.popleft()
            metrics = {name: float(x) for name, x in arrays.items()}
            self._log.log_step(step, metrics)
            self.skipped_in_a_row = count = int(metrics["skipped_in_a_row"])
            if count >= self._training.experiment.optim.max_skipped:
                why = f"{count} steps in a row were skipped, up to step {step}: {why_skipped(metrics)}"
                raise self._training.diverged(why)


def is_eval_step(step: int, config: TrainConfig) -> bool:
    """Return whether the validation loss is measured after a step."""
    return step % config.eval_every == 0 or step == config.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run in training: its experiment, data, compiled steps and checkpoints. All mistakes are found."""

    directory: Path
    given: Experiment  # as the user configured it
    experiment: Experiment  # as it is trained: with its weights' architecture and its vocabulary's size
    dataset: Dataset
    trainer: Trainer
    weights: Callable[[], Weights] | None  # opens the weights of `train.init_from`, if there are any
    checkpoints: Checkpoints

    @functools.cached_property
    def keys(self) -> tuple[jax.Array, jax.Array]:
        """Return the keys of initialisation and of dropout, by one program instead of four."""
        return jax.jit(lambda: init_and_dropout_keys(self.experiment.train.seed))()

    @property
    def dropout_key(self) -> jax.Array:
        """Return the dropout key of the run."""
        return self.keys[1]

    def start_compiling(self, start: int) -> StepFn:
        """Compile the step in a thread, in a single process. Return a step that waits for it."""
        trainer = self.trainer
        # Several processes tune kernels of GPUs together, which nobody has tried from two threads.
        if start == self.experiment.train.steps or multihost.is_multiprocess():
            return trainer.train_step
        pool = ThreadPoolExecutor(1)
        compiled = pool.submit(trainer.lower().compile)
        pool.shutdown(wait=False)  # after this one task
        return lambda state, batch, key: compiled.result()(state, batch, key)

    def restore_or_init(self, step: int) -> TrainState:
        """Return the state after `step` steps: a checkpoint, or the initial state for 0."""
        like, from_checkpoint = self.trainer.abstract_state, self.trainer.strategy.from_checkpoint
        frozen, params = like.frozen_params, None
        if self.weights is not None and (frozen is not None or not step):
            params = self.weights().read(like.params if frozen is None else thawed_shapes(frozen))
        if not step:
            params = None if params is None else from_checkpoint(params)
            with self.trainer.draw_by_kernel():
                return self.trainer.init_state(self.keys[0], params)
        if params is not None:
            places = jax.tree.map(lambda x: x.sharding, frozen)  # as the step is compiled for
            frozen = jax.jit(freeze, static_argnums=0, out_shardings=places)(self.experiment.lora, params)
        state = dataclasses.replace(self.checkpoints.restore(step, like), frozen_params=frozen)
        return from_checkpoint(state)

    def batches(self, start: int, *, whole: bool = False) -> Generator[Batch]:
        """Yield the batches of the steps after `start`, with this process's rows, or the whole ones."""
        train, split = self.experiment.train, self.dataset.train
        batches = training_batches(
            split,
            block_size=self.experiment.model.block_size,
            batch_size=train.batch_size,
            seed=train.seed,
            start_step=start,
            rows=None if whole else self.trainer.strategy.local_rows(train.batch_size),
        )
        blame = checks.blame_own_classes(self.experiment.data, split.training_rows)
        with blame, contextlib.closing(batches):
            yield from batches

    def whole_batch(self, step: int, state: TrainState | None = None) -> Batch:
        """Return a step's batch with all rows. state: the one before it, to roll out, if any."""
        with contextlib.closing(self.batches(step - 1, whole=True)) as batches:
            batch = next(batches)
        return batch if state is None else self._roll_out(step, state, batch)[0]

    def shard_batch(self, step: int, state: TrainState, batch: Batch) -> tuple[Batch, Metrics]:
        """Return a step's batch as the compiled step takes it, and its rollout's metrics, if any.

        state: the state before the step.
        """
        batch, metrics = self._roll_out(step, state, batch)
        return self.trainer.strategy.shard_batch(batch), metrics

    def _roll_out(self, step: int, state: TrainState, batch: Batch) -> tuple[Batch, Metrics]:
        if self.dataset.roll_out is None:
            return batch, {}
        params = gather_params(self.trainer, state, merge=functools.partial(_merge, self.experiment.lora))
        key = jax.random.fold_in(jax.random.fold_in(self.keys[0], ROLLOUT), step)
        return self.dataset.roll_out(self.trainer, params, batch, key)

    def take_steps(self, state: TrainState, start: int, stop: int) -> Iterator[tuple[int, TrainState, Metrics]]:
        """Take the steps from `start` + 1 to `stop`. Each donates the state that the last has made.

        Yields each step's number, the state after it and its metrics.
        """
        with contextlib.closing(self.batches(start)) as batches:
            for step in range(start + 1, stop + 1):
                batch, rolled_out = self.shard_batch(step, state, next(batches))
                state, metrics = self.trainer.train_step(state, batch, self.dropout_key)
                float(metrics["loss"])  # waits, so that one step is in flight
                yield step, state, rolled_out | metrics

    def measure_val_loss(
        self, params: Params, is_interrupted: Callable[[], bool] = lambda: False
    ) -> tuple[float, dict[str, float]]:
        """Return (validation loss, loss of each source of a mixture), the first averaged by weight.

        params: as `Trainer.merged_params` returns them. is_interrupted: asked after each batch.
        """
        parts, most = parts_of(self.dataset.val), self.experiment.train.eval_tokens
        each = None if most is None else max(most // len(parts), 1)
        losses = {}
        for name, (_, split) in parts.items():
            windows = self._validation_windows(split, each, is_interrupted)
            losses[name], _ = mean_loss(self.trainer.eval_step, params, windows)
        return sum(parts[name][0] * x for name, x in losses.items()), {} if "" in losses else losses

    def _validation_windows(
        self, split: Split, max_tokens: int | None, is_interrupted: Callable[[], bool]
    ) -> Iterator[Batch]:
        """Yield the batches over which a split's loss is measured, sharded over the devices."""
        strategy = self.trainer.strategy
        size = strategy.data_parallel_size * self.trainer.split.micro_batch_size
        with checks.blame_own_classes(self.experiment.data, split.validation_rows):
            windows = validation_batches(
                split,
                block_size=self.experiment.model.block_size,
                batch_size=size,
                max_tokens=max_tokens,
                rows=strategy.local_rows(size),
            )
            for batch in windows:
                yield strategy.shard_batch(batch)
                if is_interrupted():
                    return

    def diverged(self, why: str) -> Diverged:
        """Return the error of a run that no longer learns."""
        remedy = "Start over (--fresh) and lower --optim.learning-rate, or raise --optim.warmup-steps"
        return Diverged(f"{why}. {remedy}. The last checkpoint is step {self.checkpoints.last() or 'none'}.")

    def save(self, step: int, state: TrainState, val_loss: float | None, log: RunLog) -> None:
        """Start to save a checkpoint. Raise `CheckpointSaveError` if the run directory is gone."""
        if multihost.is_process_0() and not is_run(self.directory):
            raise CheckpointSaveError(f"{self.directory} was deleted or moved, so step {step} is not saved")
        trainer, to_checkpoint = self.trainer, self.trainer.strategy.to_checkpoint
        with log.clock.paused():
            others = None if trainer.eval_params is None else to_checkpoint(trainer.eval_params(state))
            self.checkpoints.save(to_checkpoint(state), step, val_loss, eval_params=others)
        log.tell({"step": step, "saved": step})

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Wait for the last save, unless this process's error leaves another one waiting for it."""
        is_lost = isinstance(error, Exception) and not isinstance(error, RaisedOnAllProcesses)
        if not (is_lost and multihost.is_multiprocess()):
            self.checkpoints.close()


def _merge(config: LoraConfig, params: Params, frozen_params: Params | None) -> Params:
    if frozen_params is None:
        return params
    return jax.jit(merge_adapters, static_argnums=0)(config, params, jax.jit(thaw)(frozen_params))


def open_training(
    experiment: Experiment,
    directory: Path,
    recorded: RunMetadata | None,
    *,
    extend: bool | None = None,
    remedy: str = "to train it on, name that text with --data.path, or another --run-dir, or start over with --fresh",
) -> Training:
    """Check all that the user decides, writing nothing, and return the training.

    recorded: the metadata of the run to resume, or to take steps of again. None means a new run. See
    `jaxgpt.fit` for `extend`, and `reopen_dataset` for `remedy`.
    """
    if recorded is not None:
        experiment = with_horizons(recorded, experiment, extend=extend)
        check_same_code(experiment, directory, recorded.code)
        check_same_configuration(recorded, experiment)
    train = experiment.train
    checkpoints = Checkpoints(directory / "checkpoints", train.keep_last, train.keep_every)
    resolved, weights = resolve_init_from(experiment, recorded)
    data_class = type(resolved.data).__name__
    is_own = any(own_classes(resolved.data))
    with checks.blame_own_classes(resolved.data, resolved.data.open_dataset):
        if recorded is None:
            dataset = resolved.data.open_dataset(resolved.model)
        else:
            dataset = reopen_dataset(recorded, resolved.data, remedy=remedy)
        needs = "its fingerprint needs tokenizer_sha256=fingerprint(tokenizer) of data.tokenizer"
        if not isinstance(dataset, Dataset):
            raise TypeError(f"it returns a {type(dataset).__name__}, and must return a Dataset of jaxgpt.data.pipeline")
        if is_own and "tokenizer_sha256" not in dataset.fingerprint:
            raise UserError(f"{data_class}.open_dataset: {needs}")
    if dataset.roll_out is not None and multihost.is_multiprocess():
        raise UserError(f"{data_class} draws its rows from the model, in one process: start only one")
    resolved = dataclasses.replace(resolved, model=resolve_vocab(resolved.model, dataset.tokenizer))
    with checks.blame_own_classes(resolved):
        trainer = make_trainer(resolved, recorded=None if recorded is None else recorded.given)
    width = resolved.model.block_size * resolved.model.n_embd
    activation = trainer.split.micro_batch_size * width * 2  # bytes of a single one
    check_memory(trainer.abstract_state, activation, trainer.strategy.devices)
    training = Training(
        directory=directory,
        given=experiment,
        experiment=resolved,
        dataset=dataset,
        trainer=trainer,
        weights=weights,
        checkpoints=checkpoints,
    )
    if recorded is None:
        if is_own and dataset.roll_out is None:
            checks.check_rows(resolved, dataset)
        check_first_step(training)
        if resolved.model.is_foreign:
            checks.check_model(resolved, training.whole_batch(1))
    return training


def check_first_step(training: Training) -> None:
    """Raise `UserError` if the first step or validation is not finite, with pieces of a user's own.

    The step is the compiled one, and the state that it makes is dropped.
    """
    own = [cls for cls in own_classes(training.experiment) if not issubclass(cls, DataConfig)]
    trainer = training.trainer
    if not own or trainer.parameters[0] > checks.LARGEST_CHECKED:
        return
    with checks.blame_own_classes(training.experiment):
        state = training.restore_or_init(0)
        nats, _ = training.measure_val_loss(trainer.merged_params(state), lambda: True)  # of one batch
        ((_, state, metrics),) = training.take_steps(state, 0, 1)
    to_blame, how = name_with_place(own[0]), None
    skipped = why_skipped(metrics)
    if skipped is not None:
        how = f"at the first step the {skipped}"
    elif not np.isfinite(nats):
        how = f"the validation loss of the first batch is {nats}"
    elif not all(jnp.isfinite(x).all() for x in jax.tree.leaves(state.params)):
        to_blame, how = name_with_place(type(training.experiment.optim)), "its first update does"
    if how is not None:
        raise UserError(f"{to_blame} gives NaN or infinity: {how}")


def hold_bucket(stack: contextlib.ExitStack, address: str, *, fresh: bool) -> Bucket:
    """Open a run in a bucket, which no other process trains until `stack` ends."""
    if multihost.is_multiprocess():
        raise UserError(f"{address}: several processes need a --run-dir that all of them see, such as a mounted bucket")
    with service_errors("train in", address):
        bucket = Bucket(address)
        stack.callback(lock_run(bucket.directory, fresh=False).release, force=True)
        bucket.hold(stack)
    if fresh and is_run(bucket.directory):
        raise UserError(f"{address} holds a run, which --fresh does not move: delete it, or name another --run-dir")
    return bucket


def open_directory(
    stack: contextlib.ExitStack, training: Training, recorded: RunMetadata | None, *, fresh: bool
) -> int:
    """Begin a run directory, or rewind it to its newest good checkpoint. Return that step.

    stack: keeps the directory locked. recorded: the run to resume. None means a new one.
    """
    directory, bucket = training.directory, training.checkpoints.bucket
    if bucket is None:
        stack.callback(lock_run(directory, fresh).release, force=True)
    if recorded is None:
        if is_run(directory):
            raise UserError(f"another process has just started {directory}: to resume it, run this again")
        dataset, model, origin = training.dataset, training.experiment.model, None
        if training.weights is not None:
            from jaxgpt.hf.source import keep_companions

            weights = training.weights()
            keep_companions(weights.directory, directory)
            origin = weights.describe(model)
        write_metadata(
            directory,
            training.given,
            dataset.tokenizer,
            data=dataset.fingerprint,
            vocab_size=model.vocab_size,
            tokenizer_config=dataset.tokenizer_config,
            origin=origin,
        )
    step = training.checkpoints.rewind()
    rewind_metrics(directory / "metrics.jsonl", step)
    if recorded is not None:
        extend_metadata(recorded, training.given, after=step)
    if bucket is not None:
        with service_errors("write", bucket.address):
            bucket.synchronise()
        stack.callback(bucket.push, is_last=True)
    return step


def introduction(training: Training, start: int) -> Iterator[str]:
    """Yield lines about a run's model, hardware and data, and `start`, the step to resume from."""
    experiment, trainer, dataset = training.experiment, training.trainer, training.dataset
    strategy, split, train = trainer.strategy, trainer.split, experiment.train
    context, rows = experiment.model.block_size, train.batch_size
    n_params, in_adapters = trainer.parameters
    adapters = f" and {in_adapters:,} in adapters, the only ones trained" if in_adapters else ""
    hardware = f"{len(strategy.devices)} x {first_device().device_kind}, {trainer.options.reason}"
    yield f"{experiment.name}: {n_params:,} parameters{adapters}, {hardware}"
    if training.weights is not None and not start:
        whole = training.weights().config.block_size
        yield f"starting from {train.init_from}, with a context of {context:,} tokens"
        if context < whole:
            yield f"the weights' context of {whole} tokens is cut to {context}: --model.block-size {whole} keeps it"
    parts = strategy.data_parallel_size
    if parts * split.grad_accum_steps > 1:
        micro = split.micro_batch_size
        yield f"{strategy.name}: {rows} sequences per step are {parts} parts, in micro-batches of {micro}"
    tokens = f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens"
    size = f"vocabulary {experiment.model.vocab_size}; {rows * context:,} tokens per step"
    yield f"{tokens}, {size}; run in {name_of(training.directory)}"
    for name, (weight, part) in parts_of(dataset.train).items():
        if name:
            epochs = weight * train.steps * rows * context / len(part)
            yield f"{name}: {100 * weight:.4g}% of the sequences, {epochs:.3g} epochs of its {len(part):,} training tokens"
    yield from dataset.notes
    given, warmup = experiment.optim.warmup_steps, experiment.optim.warmup(train.steps)
    if given is not None and warmup < given:
        yield f"optim.warmup_steps={given} is more than the run has: the warm-up takes {warmup} steps instead"
    if start:
        yield f"continuing at step {start} of {train.steps}"
