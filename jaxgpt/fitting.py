"""Train an experiment in a run directory, from the first check to the last checkpoint: `fit`.

It is not called `fit`: a module of that name would hide the function `jaxgpt.fit`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from jax.experimental import multihost_utils

from jaxgpt import loop
from jaxgpt.batch import Batch
from jaxgpt.config import Experiment
from jaxgpt.config.validate import check_value
from jaxgpt.data.mixture import parts_of
from jaxgpt.errors import CheckpointSaveError, Diverged, Preempted, RaisedOnAllProcesses, UserError, shell_line
from jaxgpt.hf.source import keep_companions
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import device_kind, first_device
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.parallel.profile import StepProfiler, parse_steps
from jaxgpt.parallel.signals import catch_signals
from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.run import Run, load_run
from jaxgpt.runs.code import is_trusting, with_classes_of
from jaxgpt.runs.directory import (
    RUNS,
    clear_beginning,
    extend_metadata,
    has_steps,
    is_resumable,
    is_run,
    lock_run,
    read_metadata,
    write_metadata,
)
from jaxgpt.runs.log import RunLog
from jaxgpt.runs.metrics import plot_losses, rewind_metrics
from jaxgpt.runs.training import Training, open_training
from jaxgpt.train import Metrics, TrainState


def fit(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    extend: bool | None = None,
    trust_code: bool = False,
    progress: bool = True,
    setup: bool = True,
    callbacks: Sequence[Callable[[loop.Line], None]] = (),
) -> Run:
    """Train an experiment, or resume its run from the last good checkpoint. Return the run with its best parameters.

    Args:
        experiment: what to train, and how.
        run_dir: the run directory. None means `runs/NAME`, by the name of the experiment.
        fresh: move an old run aside and start over.
        extend: whether a run may go on to more steps. None means yes, unless its learning rate would rise again.
        trust_code: resume a run with its own copy of the code of its classes, whatever the experiment's is.
        progress: show a live bar on a terminal, or lines elsewhere.
        setup: call `configure_jax` first. False leaves the process as it is.
        callbacks: functions that take each line of metrics.jsonl, and {"step": N, "saved": N} for a checkpoint, in
            every process.

    Raises:
        UserError: for a mistake of the user, before anything is written.
        Preempted: on Ctrl-C or SIGTERM, after a save.
        Diverged: if the run no longer learns.
        CheckpointSaveError: if a checkpoint or metrics.jsonl cannot be written.
    """
    check_value("experiment", experiment, Experiment)
    if setup:
        configure_jax()
    directory = Path(run_dir) if run_dir is not None else RUNS / experiment.name
    multihost.initialize(experiment.parallel)
    first_device()  # here, so that JAX reports a missing device before anything else is done
    is_first = multihost.is_process_0()
    with contextlib.ExitStack() as stack:
        # Resolve the experiment, open its data, build and check all that is compiled. The user can repair what fails
        # here, so nothing is written yet.
        with multihost.raise_on_all():
            recorded = read_metadata(directory, trust_code=trust_code) if is_resumable(directory, fresh) else None
            if recorded is not None and (trust_code or is_trusting()):
                experiment = with_classes_of(recorded.given, experiment)
            training = open_training(experiment, directory, recorded, extend=extend)
            profiled = parse_steps(training.experiment.train.profile)
        experiment, trainer, checkpoints = training.experiment, training.trainer, training.checkpoints
        config = experiment.train
        multihost_utils.sync_global_devices("connected")  # now: a process that compiles would come too late for it

        # Open the run directory, and rewind it to its newest good checkpoint.
        def open_directory() -> int:
            stack.enter_context(lock_run(directory, fresh))
            if recorded is None:
                if is_run(directory) and has_steps(directory):
                    raise UserError(f"another process has just started {directory}: to resume it, run this again")
                clear_beginning(directory)
                weights, dataset = None if training.weights is None else training.weights(), training.dataset
                if weights is not None:
                    keep_companions(weights.directory, directory)
                write_metadata(
                    directory,
                    training.given,
                    dataset.tokenizer,
                    data=dataset.fingerprint,
                    vocab_size=experiment.model.vocab_size,
                    tokenizer_config=dataset.tokenizer_config,
                    origin=None if weights is None else weights.describe(experiment.model),
                )
            step = checkpoints.rewind()
            rewind_metrics(training.metrics, step)
            if recorded is not None:
                extend_metadata(recorded, training.given, after=step)
            return step

        start = multihost.on_process_0(open_directory)

        # Compile, while the state is restored or made.
        compiled = training.start_compiling(start)
        state, batches = training.restore_or_init(start), training.batches(start)
        log = RunLog(training, start, callbacks, show=progress and is_first)
        profiler = StepProfiler(trainer.lower, profiled, directory / "profile", log.say)
        stack.callback(profiler.close)
        watch = stack.enter_context(multihost.watch_progress())
        is_lost = False  # whether a process is lost
        numbers = itertools.count(start + 1)

        def take_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
            watch()
            step = next(numbers)
            batch, rolled_out = training.shard_batch(step, state, batch)
            state, metrics = profiler.take(step, compiled, state, batch, key)
            return state, rolled_out | metrics

        def validate(step: int, state: TrainState) -> float | None:
            def watched(windows: Iterator[Batch]) -> Iterator[Batch]:
                for window in windows:
                    watch()
                    yield window
                    if caught(None) is not None:
                        return

            with log.clock.paused():
                params = trainer.merged_params(state)
                val_loss, log.val_losses = training.measure_val_loss(
                    lambda windows: mean_loss(trainer.eval_step, params, watched(windows))[0]
                )
            return val_loss if caught(None) is None else None

        def save(step: int, state: TrainState, val_loss: float | None) -> None:
            watch()
            if is_first and not is_run(directory):
                raise CheckpointSaveError(f"{directory} was deleted or moved, so step {step} is not saved")
            with log.clock.paused():
                to_checkpoint = trainer.strategy.to_checkpoint
                others = None if trainer.eval_params is None else to_checkpoint(trainer.eval_params(state))
                checkpoints.save(to_checkpoint(state), step, val_loss, eval_params=others)
            log.tell({"step": step, "saved": step})

        def stop(step: int | None) -> str | None:
            if step is not None:
                checkpoints.raise_if_failed()
            if (signal := caught(step)) is not None:
                log.say(f"{signal}: stopping as soon as the progress is saved; a second signal stops at once")
            return signal

        try:
            for line in introduction(training, start):
                log.say(line)
            caught = stack.enter_context(catch_signals())  # until the last save is done
            losses = map(checkpoints.val_loss, checkpoints.steps())  # unlike metrics.jsonl, these have checksums
            best = min((loss for loss in losses if loss is not None), default=math.inf)
            is_measured = any(line["step"] == start and "val_loss" in line for line in log.lines)
            is_due = start and loop.is_eval_step(start, config) and not is_measured  # a signal had interrupted it
            if is_due and (val_loss := validate(start, state)) is not None:
                if is_first:
                    checkpoints.set_val_loss(start, val_loss)
                val_loss = loop.log_validation(log, start, val_loss, config)
                best = best if val_loss is None else min(best, val_loss)
            is_new = progress and training.weights is not None and not start
            if is_new and (before := validate(start, state)) is not None:
                log.say(f"validation loss of these weights, before the first step: {before:.4f}")
            if (signal := caught(None)) is not None:
                raise Preempted(f"{signal}: step {start} of {config.steps} is saved")
            loop.train(
                take_step,
                state,
                batches,
                config=config,
                key=training.dropout_key,
                max_skipped=experiment.optim.max_skipped,
                start=start,
                best=best,
                log=log,
                validate=validate,
                save=save,
                stop=stop,
                agree=lambda number: multihost.on_process_0(lambda: number),
            )
            checkpoints.wait()
        except Preempted as e:
            checkpoints.wait()
            raise Preempted(f"{e}. To continue: {shell_line('jaxgpt', 'train', '--run-dir', directory)}") from None
        except Diverged as e:
            remedy = "Start over (--fresh) and lower --optim.learning-rate, or raise --optim.warmup-steps"
            last = f"The last checkpoint is step {checkpoints.last() or 'none'}."
            raise Diverged(f"{e}. {remedy}. {last}") from None
        except Exception as e:
            is_lost = multihost.is_multiprocess() and not isinstance(e, RaisedOnAllProcesses)
            raise
        finally:
            batches.close()
            log.close()
            if not is_lost:  # otherwise this would wait for processes that are gone
                checkpoints.close()
            if is_first:
                with contextlib.suppress(OSError):  # a full disk has been reported by now
                    plot_losses(log.lines, directory / "loss.png", experiment.name)
        return load_run(read_metadata(directory, trust_code=trust_code))


def introduction(training: Training, start: int) -> Iterator[str]:
    """Yield lines that describe a run: its model, hardware and data, and `start`, the step to resume from."""
    experiment, trainer, dataset = training.experiment, training.trainer, training.dataset
    strategy, split, train = trainer.strategy, trainer.split, experiment.train
    n_params, in_adapters = trainer.parameters
    adapters = f" and {in_adapters:,} in adapters, the only ones trained" if in_adapters else ""
    hardware = f"{len(strategy.devices)} x {device_kind()}, {trainer.options.reason}"
    yield f"{experiment.name}: {n_params:,} parameters{adapters}, {hardware}"
    if trainer.fallback is not None:
        yield trainer.fallback
    if training.weights is not None and not start:
        whole, context = training.weights().config.block_size, experiment.model.block_size
        yield f"starting from {train.init_from}, with a context of {context:,} tokens"
        if context < whole:
            yield f"the weights' context of {whole} tokens is cut to {context}: --model.block-size {whole} keeps it"
    if (parts := strategy.data_parallel_size) * (micro := split.grad_accum_steps) > 1:
        each = f"{micro} micro-batch{'es' * (micro > 1)} of {split.micro_batch_size}"
        yield f"{strategy.name}: {train.batch_size} sequences per step are {parts} parts of {each}"
    tokens = f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens"
    per_step = f"{train.batch_size * experiment.model.block_size:,} tokens per step"
    yield f"{tokens}, vocabulary {experiment.model.vocab_size}; {per_step}; run in {training.directory}"
    for name, (weight, part) in parts_of(dataset.train).items():
        if name:
            epochs = weight * train.steps * train.batch_size * experiment.model.block_size / len(part)
            yield f"{name}: {100 * weight:.4g}% of the sequences, {epochs:.3g} epochs of its {len(part):,} training tokens"
    yield from dataset.notes
    given, warmup = experiment.optim.warmup_steps, experiment.optim.warmup(train.steps)
    if given is not None and warmup < given:
        yield f"optim.warmup_steps={given} is more than the run has: the warm-up takes {warmup} steps instead"
    if start:
        yield f"continuing at step {start} of {train.steps}"
