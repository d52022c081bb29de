"""Train an experiment in a run directory: check everything, then lock the directory, resume and train."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

from jaxgpt import loop
from jaxgpt.batch import Batch
from jaxgpt.cluster import multihost
from jaxgpt.cluster.signals import catch_signals
from jaxgpt.cluster.watchdog import Watchdog, watch
from jaxgpt.config import Experiment
from jaxgpt.data.dataset import prepare_for, resolve_vocab
from jaxgpt.errors import Diverged, Preempted, RaisedOnAllProcesses, UserError, shell_line
from jaxgpt.hf.source import keep_companions
from jaxgpt.parallel.device import check_memory, first_device
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.parallel.strategy import StepFn
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.run import Run, load_run
from jaxgpt.runs.callbacks import RunCallbacks, introduction
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.directory import RUNS, RunMetadata, extend_metadata, is_run, lock_run, read_metadata, write_metadata
from jaxgpt.runs.log import RunLog
from jaxgpt.runs.metrics import plot_losses, rewind_metrics
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.runs.resume import check_same_configuration, is_resumable, reopen_dataset, with_horizons
from jaxgpt.runs.training import Training
from jaxgpt.train import TrainState


def fit(
    experiment: Experiment,
    run_dir: str | Path | None = None,
    *,
    fresh: bool = False,
    extend: bool | None = None,
    progress: bool = True,
    setup: bool = True,
) -> Run:
    """Train an experiment, or resume its run from the last good checkpoint. Return the run with its best parameters.

    Args:
        experiment: what to train, and how.
        run_dir: the run directory. None means `runs/NAME`, by the name of the experiment.
        fresh: move an old run aside and start over.
        extend: whether a run may go on to more steps. None means unless its learning rate would rise again.
        progress: show a live bar on a terminal, or lines elsewhere.
        setup: call `configure_jax` first. False leaves the process as it is.

    Raises:
        UserError: for a mistake of the user, before anything is written.
        Preempted: on Ctrl-C or SIGTERM, after a save.
        Diverged: if the run no longer learns.
        CheckpointSaveError: if a checkpoint or metrics.jsonl cannot be written.
    """
    if setup:
        configure_jax()
    directory = Path(run_dir) if run_dir is not None else RUNS / experiment.name
    multihost.initialize(experiment.parallel)
    first_device()  # here, so that JAX reports a missing device before anything else is done
    with watch(experiment.parallel.watchdog) as watchdog:
        metadata = read_metadata(directory) if is_resumable(directory, fresh) else None
        _train(experiment, directory, metadata, watchdog, fresh=fresh, extend=extend, progress=progress)
        return load_run(read_metadata(directory))


def _train(
    experiment: Experiment,
    directory: Path,
    resumed: RunMetadata | None,
    watchdog: Watchdog,
    *,
    fresh: bool,
    extend: bool | None,
    progress: bool,
) -> None:
    """Check everything before anything is written, lock the directory, and train."""
    session = check_session(experiment, directory, resumed, extend=extend)
    multihost.barrier("everything is checked")
    watchdog.directory, watchdog.last_step = directory, session.checkpoints.last
    with contextlib.ExitStack() as lock:
        start = multihost.on_process_0(lambda: session.begin(lock, fresh=fresh))
        session.train(start, watchdog, progress=progress)


def check_session(
    experiment: Experiment, directory: Path, resumed: RunMetadata | None, *, extend: bool | None = None
) -> Session:
    """Check all that the user decides, without writing anything. Raises `UserError`.

    Args:
        experiment: as the user configured it.
        directory: the run directory.
        resumed: metadata of the run to resume. None means a new run.
        extend: see `fit`.
    """
    if resumed is not None:
        experiment = with_horizons(resumed, experiment, extend=extend)
        check_same_configuration(resumed, experiment)
    resolved, weights = resolve_init_from(experiment, resumed)
    if resumed is None:
        dataset = prepare_for(resolved.model, resolved.data)
    else:
        remedy = "to train it on, name that text with --data.path, or another --run-dir, or start over with --fresh"
        dataset = reopen_dataset(resumed, resolved.data, remedy=remedy)
    resolved = dataclasses.replace(resolved, model=resolve_vocab(resolved.model, dataset.tokenizer))
    trainer = make_trainer(resolved, recorded=None if resumed is None else resumed.given)
    model, train = resolved.model, experiment.train
    hidden_bytes = trainer.split.micro_batch_size * model.block_size * model.n_embd * 2  # one 16-bit activation
    check_memory(trainer.abstract_state, hidden_bytes, trainer.strategy.devices)
    return Session(
        given=experiment,
        experiment=resolved,
        directory=directory,
        is_new=resumed is None,
        is_extended=resumed is not None and resumed.given.train.steps < train.steps,
        dataset=dataset,
        trainer=trainer,
        weights=weights,
        checkpoints=Checkpoints(directory / "checkpoints", keep_last=train.keep_last, keep_every=train.keep_every),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session(Training):
    """Training of a run by this process, until it is complete or a signal arrives."""

    given: Experiment  # as the user configured it
    is_new: bool
    is_extended: bool  # beyond the steps that are recorded

    def begin(self, lock: contextlib.ExitStack, *, fresh: bool) -> int:
        """Lock the directory, make it a run, and rewind it to its newest good checkpoint, whose step is returned."""
        lock.enter_context(lock_run(self.directory, fresh))
        if self.is_new:
            self._write_metadata()
        elif self.is_extended:
            extend_metadata(self.directory, self.given)
        self.checkpoints.remove_partial()
        step = self.checkpoints.latest_valid() or 0
        self.checkpoints.quarantine_after(step)
        rewind_metrics(self.metrics, step)
        return step

    def _write_metadata(self) -> None:
        if is_run(self.directory):
            raise UserError(f"another process has just started a run in {self.directory}: to resume it, run this again")
        weights, model = None if self.weights is None else self.weights(), self.experiment.model
        if weights is not None:
            keep_companions(weights.directory, self.directory)
        write_metadata(
            self.directory,
            self.given,
            self.dataset.tokenizer,
            data=self.dataset.fingerprint,
            vocab_size=model.vocab_size,
            tokenizer_config=self.dataset.tokenizer_config,
            origin=None if weights is None else weights.describe(model),
        )

    def train(self, start: int, watchdog: Watchdog, *, progress: bool) -> None:
        """Train to the end, from the checkpoint of step `start`. 0 means from the initial parameters."""
        train_step = self.start_compiling(start)
        state, batches = self.restore_or_init(start), self.batches(start)
        log = RunLog(self, start, show=progress and multihost.is_process_0())
        is_lost = False
        try:
            for line in introduction(self, start):
                log.say(line)
            with catch_signals() as stop:
                callbacks = RunCallbacks(training=self, watchdog=watchdog, log=log, stop=stop, compared=start)
                self._run_loop(callbacks, train_step, state, batches, start)
        except Exception as e:
            is_lost = multihost.is_multiprocess() and not isinstance(e, RaisedOnAllProcesses)
            raise
        finally:
            batches.close()
            log.close()
            if not is_lost:  # otherwise this would wait for processes that are gone
                self.checkpoints.close()
            if multihost.is_process_0():
                with contextlib.suppress(OSError):  # a full disk has been reported by now
                    plot_losses(log.lines, self.directory / "loss.png", self.experiment.name)

    def _run_loop(
        self, callbacks: RunCallbacks, train_step: StepFn, state: TrainState, batches: Iterator[Batch], start: int
    ) -> None:
        config = self.experiment.train
        losses = map(self.checkpoints.val_loss, self.checkpoints.steps())  # unlike metrics.jsonl, these have checksums
        best = min((loss for loss in losses if loss is not None), default=math.inf)
        is_measured = any(line["step"] == start and "val_loss" in line for line in callbacks.log.lines)
        try:
            if start and loop.is_eval_step(start, config) and not is_measured:
                val_loss = callbacks.validate_start(start, state)
                best = best if val_loss is None else min(best, val_loss)
            if (signal := callbacks.stop(None)) is not None:
                raise Preempted(f"{signal}: step {start} of {config.steps} is saved")
            loop.train(
                train_step,
                state,
                batches,
                config=config,
                max_skipped=self.experiment.optim.max_skipped,
                key=self.dropout_key,
                start=start,
                best=best,
                log=callbacks.log,
                callbacks=callbacks,
            )
        except Preempted as e:
            command = shell_line("jaxgpt", "train", "--run-dir", self.directory)
            raise Preempted(f"{e}. To continue: {command}") from None
        except Diverged as e:
            raise Diverged(f"{e}. {self._advice()}") from None

    def _advice(self) -> str:
        """Return advice for a run that has diverged."""
        autopsy = self.directory / "autopsy"
        spikes = "" if self.experiment.optim.skip_spikes is None else " or --optim.skip-spikes"
        return (
            f"Start over (--fresh) and lower --optim.learning-rate, or raise --optim.warmup-steps{spikes}."
            f"{f' Autopsy in {autopsy}.' if autopsy.is_dir() else ''}"
            f" The last checkpoint is step {self.checkpoints.last() or 'none'}."
        )
