"""The training loop: the one impure part, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from jaxgpt.cluster import multihost
from jaxgpt.cluster.replicas import check
from jaxgpt.cluster.signals import signals
from jaxgpt.cluster.watchdog import Watchdog, watch
from jaxgpt.config import Experiment
from jaxgpt.data.dataset import prepare_for, resolve_vocab
from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import SaveFailed, UserError, shell_line
from jaxgpt.hf.source import keep_companions
from jaxgpt.parallel.device import first_device, refuse_what_cannot_fit
from jaxgpt.parallel.trainer import Trainer, make_trainer
from jaxgpt.run import Run, load_run
from jaxgpt.runs.autopsy import why_skipped, write_autopsy
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.curves import plot_losses
from jaxgpt.runs.find import RUNS, is_run
from jaxgpt.runs.lock import lock_run
from jaxgpt.runs.log import Log
from jaxgpt.runs.metadata import RunMetadata, read_metadata, write_metadata
from jaxgpt.runs.metrics import read_metrics, rewind_metrics
from jaxgpt.runs.pretrained import Weights, begun, origin_of, state_at
from jaxgpt.runs.reopen import reopen_dataset
from jaxgpt.runs.resume import check_same_configuration, is_resumable
from jaxgpt.train import NOT_FINITE, mean_loss, run_keys

# Steps dispatched and not yet finished. Enough to hide the host's work; more would only queue memory, and several
# fake devices on few cores hang when hundreds are in flight.
IN_FLIGHT = 2
LONG = 1.0  # seconds of a step from which on none is left in flight: a signal would have to wait for them all
# Steps between two decisions of the first process on how many steps are in flight. All settle the same step at the same
# place: one that raises there must not leave behind steps that it has dispatched and the others have not.
AGREE_EVERY = 100


class Interrupted(multihost.Everywhere, KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run was saved first. `str()` says how to continue."""


class Diverged(multihost.Everywhere, RuntimeError):
    """Too many steps in a row could not be taken; the last checkpoint is from before them."""


def fit(
    experiment: Experiment, run_dir: str | Path | None = None, *, fresh: bool = False, progress: bool = True
) -> Run:
    """Train an experiment in a run directory (None: `runs/NAME`), or go on with it from its last good checkpoint.

    fresh: start over, moving an old run aside. progress: show a live bar, or lines where there is no terminal.
    Returns the run with its best parameters. Raises `UserError` for whatever the user can repair, before
    anything is written; `Interrupted` after a save on Ctrl-C or SIGTERM; `Diverged` where it no longer learns;
    `SaveFailed` if a checkpoint or the metrics cannot be written. It never ends the process of the program that
    called it, unless that is one of several: see `parallel.watchdog`.
    """
    return _run(experiment, run_dir, None, fresh, progress, is_command=False)


def fit_as_command(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    progress: bool = True,
    metadata: RunMetadata | None = None,
) -> Run:
    """Do what `fit` does, for a command: the process is the run's own, and a watchdog ends it if it hangs.

    metadata: of the run in `run_dir`, if the command has read it.
    """
    return _run(experiment, run_dir, metadata, fresh, progress, is_command=True)


def _run(
    experiment: Experiment,
    run_dir: str | Path | None,
    metadata: RunMetadata | None,
    fresh: bool,
    progress: bool,
    is_command: bool,
) -> Run:
    directory = Path(run_dir) if run_dir is not None else RUNS / experiment.name
    multihost.initialize(experiment.parallel)
    first_device()  # the first use of JAX that needs one, and the place for its error
    with watch(experiment.parallel.watchdog if is_command or multihost.several() else None) as watchdog:
        if not is_resumable(directory, fresh):
            metadata = None
        elif metadata is None or metadata.directory != directory:
            metadata = read_metadata(directory)
        _fit(experiment, directory, metadata, watchdog, fresh, progress)
        return load_run(metadata or read_metadata(directory))


def _fit(
    experiment: Experiment, directory: Path, old: RunMetadata | None, watchdog: Watchdog, fresh: bool, progress: bool
) -> None:
    """Check everything before anything is written, then make the directory ours, then train."""
    if old is not None:
        check_same_configuration(old, experiment)
    full, weights = begun(experiment, old)
    if old is not None:
        remedy = "to train it on, name that text with --data.path, or another --run-dir, or start over with --fresh"
        dataset = reopen_dataset(old, full.data, remedy=remedy)
    else:
        dataset = prepare_for(full.model, full.data)
    resolved = dataclasses.replace(full, model=resolve_vocab(full.model, dataset.tokenizer))
    trainer = make_trainer(resolved, recorded=None if old is None else old.given)
    strategy, model = trainer.strategy, resolved.model
    hidden_bytes = trainer.split.micro_batch_size * model.block_size * model.n_embd * 2  # of one activation in 16 bits
    refuse_what_cannot_fit(trainer.abstract_state, hidden_bytes, strategy.devices)
    multihost.meet("everything is checked")

    with contextlib.ExitStack() as owned:
        train = experiment.train
        checkpoints = Checkpoints(directory / "checkpoints", keep_last=train.keep_last, keep_every=train.keep_every)
        watchdog.directory, watchdog.last_step = directory, checkpoints.last

        def begin() -> int:
            """The directory is ours, a run, and as its newest good checkpoint left it: that step."""
            owned.enter_context(lock_run(directory, fresh))
            if old is None:
                if is_run(directory):
                    raise UserError(
                        f"another process has just begun a run in {directory}: start again to go on with it"
                    )
                if weights is not None:
                    keep_companions(weights().directory, directory)
                write_metadata(
                    directory,
                    experiment,
                    dataset.tokenizer,
                    data=dataset.fingerprint,
                    vocab_size=resolved.model.vocab_size,
                    tokenizer_config=dataset.tokenizer_config,
                    origin=None if weights is None else origin_of(weights(), resolved.model),
                )
            checkpoints.clean()
            step = checkpoints.good() or 0
            checkpoints.set_aside_after(step)
            rewind_metrics(directory / "metrics.jsonl", step)
            return step

        start = multihost.by_leader(begin)
        _train(resolved, directory, dataset, trainer, weights, checkpoints, watchdog, start, progress)


def _train(
    experiment: Experiment,
    directory: Path,
    dataset: Dataset,
    trainer: Trainer,
    weights: Callable[[], Weights] | None,
    checkpoints: Checkpoints,
    watchdog: Watchdog,
    start: int,
    progress: bool,
) -> None:
    """From the checkpoint of step `start`, 0 for none, to the end. experiment: with the size of its vocabulary.
    weights: see `state_at`."""
    train, strategy, split = experiment.train, trainer.strategy, trainer.split
    leader = multihost.is_leader()
    init_key, dropout_key = run_keys(train.seed)
    state = state_at(trainer, weights, init_key, checkpoints, start)
    kept = read_metrics(directory / "metrics.jsonl")
    losses = map(checkpoints.val_loss, checkpoints.steps())  # with digests, which those in metrics.jsonl have not
    best = min((loss for loss in losses if loss is not None), default=math.inf)

    batches = training_batches(
        dataset.train,
        block_size=experiment.model.block_size,
        batch_size=train.batch_size,
        seed=train.seed,
        start_step=start,
        rows=strategy.local_rows(train.batch_size),
    )
    pending: deque = deque()  # (step, its metrics, still on the device)
    in_row, examined = 0, False  # steps skipped up to the last one settled; whether an autopsy was made

    checked = start

    def compare(step: int, sums) -> None:
        nonlocal checked
        check(sums, strategy.devices, checked, step)
        checked = step

    def settle(limit: int) -> None:
        """Log finished steps until at most `limit` are in flight: the loop's only wait for the device."""
        nonlocal in_row
        while len(pending) > limit:
            step, on_device = pending.popleft()
            if "checksums" in on_device:
                compare(step, on_device["checksums"])
            in_row = int(on_device["in_row"])
            if in_row:
                skip(step, on_device)
            else:
                log.step(step, **{name: float(on_device[name]) for name in ("loss", "grad_norm", "learning_rate")})

    def skip(step: int, on_device: dict) -> None:
        """Tell of a step that was not taken; the first that is not finite is looked into."""
        nonlocal examined
        why = why_skipped(on_device)
        log.skipped(step, why)
        if int(on_device["skipped"]) == NOT_FINITE and not examined:
            examined = True
            if leader:
                watchdog.beat(step, slow=True)
                with log.clock.paused():
                    why = write_autopsy(
                        directory,
                        experiment=experiment,
                        trainer=trainer,
                        dataset=dataset,
                        state=state,
                        key=dropout_key,
                        step=step,
                        metrics=on_device,
                        later=[later for _, later in pending],
                    )
        log.say(f"step {step} skipped: {why}")
        if in_row >= experiment.optim.max_skipped:
            raise Diverged(
                diverged(f"{in_row} steps in a row were skipped, up to step {step}: {why_skipped(on_device)}")
            )

    def diverged(what: str) -> str:
        looked = f" Autopsy in {directory / 'autopsy'}." if (directory / "autopsy").is_dir() else ""
        return (
            f"{what}. Start over (--fresh) and lower --optim.learning-rate, or raise --optim.warmup-steps"
            f"{'' if experiment.optim.skip_spikes is None else ' or --optim.skip-spikes'}."
            f"{looked} The last checkpoint is step {checkpoints.last() or 'none'}."
        )

    def validate(step: int) -> float | None:
        """None: a signal came between, and saving goes first."""
        windows = validation_batches(
            dataset.val,
            block_size=experiment.model.block_size,
            batch_size=split.sequences_at_once,
            max_tokens=train.eval_tokens,
            rows=strategy.local_rows(split.sequences_at_once),
        )

        def until_asked() -> Iterable:
            for window in windows:
                yield strategy.shard_batch(window)
                if caught:
                    return

        with log.clock.paused():
            val_loss, _ = mean_loss(trainer.eval_step, trainer.merged_params(state), watchdog.each(until_asked(), step))
        return None if caught else val_loss

    def refuse_last(step: int, val_loss: float) -> None:
        if step == train.steps and not math.isfinite(val_loss):
            raise Diverged(diverged(f"the last validation loss is {val_loss}"))

    def measures(step: int) -> bool:
        return step % train.eval_every == 0 or step == train.steps

    again = f"To continue: {shell_line('jaxgpt', 'train', '--run-dir', directory)}"
    lost, due = False, False
    in_flight = 0  # the first steps are waited for: they hold compilation, and tell how long one takes
    log = Log(experiment, trainer, directory, start, kept, show=progress and leader)
    try:
        log.introduce(dataset)
        with signals() as caught:
            if start and measures(start) and not any(x["step"] == start and "val_loss" in x for x in kept):
                # The signal that ended the last sitting came before this could be measured.
                val_loss = validate(start)
                if val_loss is not None:
                    if leader:
                        checkpoints.measured(start, val_loss)
                    log.validation(start, val_loss)
                    refuse_last(start, val_loss)
                    best = min(best, val_loss)  # which is best where the other is NaN
            if caught:
                raise Interrupted(f"{caught[0].name}: step {start} of {train.steps} is saved. {again}")
            for step in range(start + 1, train.steps + 1):
                began = time.monotonic()
                batch = strategy.shard_batch(next(batches))
                watchdog.beat(step)
                state, on_device = trainer.train_step(state, batch, dropout_key)
                every = experiment.parallel.check_replicas_every
                if trainer.checksums and every and step % every == 0:
                    on_device["checksums"] = trainer.checksums(state)
                pending.append((step, on_device))
                settle(in_flight)
                took = time.monotonic() - began
                if step == start + 1:
                    log.compiled(step, took)
                if step == start + 2 or step % AGREE_EVERY == 0:
                    in_flight = multihost.by_leader(lambda took=took: IN_FLIGHT if took < LONG else 0)
                checkpoints.raise_if_failed()

                stop = bool(caught) or multihost.stop_requested(step)
                val_loss = None
                if measures(step) and not stop:
                    settle(0)
                    val_loss = validate(step)
                    stop = bool(caught)
                if val_loss is not None:
                    log.validation(step, val_loss)
                    refuse_last(step, val_loss)
                    if not math.isfinite(val_loss):  # never the best
                        val_loss = None
                is_best = val_loss is not None and val_loss < best
                due = due or step % train.checkpoint_every == 0 or is_best or step == train.steps or stop
                if due:
                    settle(0)
                # After skipped steps the parameters may be ruined, and are not to replace good ones: the next taken
                # step is saved instead. A finite validation loss says that they are not.
                if due and (not in_row or val_loss is not None or stop):
                    due = False
                    watchdog.beat(step, slow=True)
                    if trainer.checksums and checked < step:
                        compare(step, trainer.checksums(state))
                    if leader and not is_run(directory):
                        raise SaveFailed(f"{directory} was deleted or moved, so step {step} is not saved")
                    with log.clock.paused():
                        checkpoints.save(strategy.to_checkpoint(state), step, val_loss)
                    best = val_loss if is_best else best
                if stop:
                    checkpoints.wait()
                    raise Interrupted(
                        f"{caught[0].name if caught else 'SIGTERM'}: saved step {step} of {train.steps}. {again}"
                    )
            checkpoints.wait()
    except Exception as e:
        lost = multihost.several() and not isinstance(e, multihost.Everywhere)
        raise
    finally:
        batches.close()
        log.close()
        if not lost:  # else this would wait for the others
            checkpoints.close()
        if leader:
            with contextlib.suppress(OSError):  # a full disk has been told by now
                plot_losses(read_metrics(directory / "metrics.jsonl"), directory / "loss.png", experiment.name)
