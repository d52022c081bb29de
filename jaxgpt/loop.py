"""The training loop: the one impure part, top to bottom."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxgpt.checkpoint import Checkpoints
from jaxgpt.config import Experiment
from jaxgpt.data.dataset import prepare
from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.evaluate import mean_loss
from jaxgpt.flops import count_parameters, train_flops_per_token
from jaxgpt.interrupts import signals
from jaxgpt.metrics import MetricsFile, read_metrics, rewind_metrics
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import device_kind, keep_freed_memory
from jaxgpt.parallel.peaks import peaks
from jaxgpt.parallel.replicas import check
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.parallel.watchdog import Watchdog, watch
from jaxgpt.paths import RUNS
from jaxgpt.progress import Display
from jaxgpt.record import existing_run, make_directory, refuse_other_configuration, refuse_other_data, write_record
from jaxgpt.run import Run, load, resolve_vocab
from jaxgpt.viz.curves import plot_losses

# Steps dispatched and not yet finished. Enough to hide the host's work; more would only queue memory, and several
# fake devices on few cores hang when hundreds are in flight.
IN_FLIGHT = 2


class Interrupted(multihost.Everywhere, KeyboardInterrupt):
    """Ctrl-C or SIGTERM: the run was saved first. `str()` says how to continue."""


class Diverged(multihost.Everywhere, RuntimeError):
    """The loss is no longer a finite number; the last checkpoint is from before."""


def fit(
    experiment: Experiment, run_dir: str | Path | None = None, *, fresh: bool = False, progress: bool = True
) -> Run:
    """Train an experiment in a run directory (None: `runs/NAME`), or go on with it from its last checkpoint.

    fresh: start over, moving an old run aside. progress: show a live bar, or lines where there is no terminal.
    Returns the run with its best parameters. Raises `UserError` for whatever the user can repair, before
    anything is written; `Interrupted` after a save on Ctrl-C or SIGTERM; `Diverged` if the loss is not finite.
    """
    directory = Path(run_dir) if run_dir is not None else RUNS / experiment.name
    multihost.initialize(experiment.parallel)
    with watch(experiment.parallel.watchdog) as watchdog:
        return _fit(experiment, directory, watchdog, fresh=fresh, progress=progress)


def _fit(experiment: Experiment, directory: Path, watchdog: Watchdog, *, fresh: bool, progress: bool) -> Run:
    train, model_config = experiment.train, experiment.model

    # Setup: nothing is written until all of it has worked.
    existing = existing_run(directory, fresh)
    if existing:
        refuse_other_configuration(directory, experiment)
    dataset = prepare(experiment.data, block_size=model_config.block_size, vocab_size=model_config.vocab_size)
    if existing:
        refuse_other_data(directory, dataset)
    model_config = resolve_vocab(model_config, dataset.tokenizer)
    trainer = make_trainer(dataclasses.replace(experiment, model=model_config))
    strategy, shares = trainer.strategy, trainer.shares
    multihost.meet("everything is checked")
    leader = multihost.is_leader()
    if leader:
        make_directory(directory, fresh)
        if not existing:
            write_record(directory, experiment, dataset, model_config.vocab_size)
    multihost.meet("the directory is made")

    # State: made, or restored.
    keep_freed_memory()
    init_key, dropout_key = jax.random.split(jax.random.key(train.seed))
    checkpoints = Checkpoints(directory / "checkpoints")
    watchdog.directory, watchdog.last_step = directory, checkpoints.last
    start = checkpoints.last() or 0
    state = strategy.from_checkpoint(checkpoints.restore(start, strategy.state)) if start else strategy.init(init_key)
    if leader:
        rewind_metrics(directory / "metrics.jsonl", start)
    multihost.meet("metrics are those of the checkpoint")
    kept = read_metrics(directory / "metrics.jsonl")
    seconds_before = max((line.get("seconds") or 0.0 for line in kept), default=0.0)

    n_params = count_parameters(strategy.state.params)
    tokens_per_step = train.batch_size * model_config.block_size
    limits = peaks(device_kind())  # None: unknown, and so is the MFU
    flops_per_token = train_flops_per_token(model_config, n_params)

    display = Display(train.steps, start, show=progress and leader)
    hardware = f"{len(strategy.devices)} x {device_kind()}, {trainer.options.reason}"
    display.say(f"{experiment.name}: {n_params:,} parameters, {hardware}")
    if shares.shards * shares.accumulation > 1:
        display.say(
            f"{strategy.name}: {train.batch_size} sequences per step are {shares.shards} parts of "
            f"{shares.accumulation} micro-batch{'es' * (shares.accumulation > 1)} of {shares.micro}"
        )
    display.say(
        f"{len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
        f"vocabulary {model_config.vocab_size}; {tokens_per_step:,} tokens per step; run in {directory}"
    )
    if start:
        display.say(f"continuing at step {start} of {train.steps}")
    metrics_file = MetricsFile(directory / "metrics.jsonl" if leader else None)
    batches = training_batches(
        dataset.train,
        block_size=model_config.block_size,
        batch_size=train.batch_size,
        seed=train.seed,
        start_step=start,
        rows=strategy.rows(train.batch_size),
    )

    pending: deque = deque()  # (step, its metrics, still on the device)
    clock = _Clock(seconds_before)
    logged_at = (start, clock.working())

    checked = start

    def compare(step: int, sums) -> None:
        nonlocal checked
        check(sums, strategy.devices, checked, step)
        checked = step

    def settle(limit: int) -> None:
        """Log finished steps until at most `limit` are in flight: the loop's only wait for the device."""
        nonlocal logged_at
        while len(pending) > limit:
            step, on_device = pending.popleft()
            loss = float(on_device["loss"])
            if "checksums" in on_device:
                compare(step, on_device["checksums"])
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss is {loss} at step {step}: lower --optim.learning-rate, or raise --optim.warmup-steps. "
                    f"The last checkpoint is step {checkpoints.last() or 'none'}."
                )
            if step % train.log_every and step != train.steps:
                continue
            then, at = logged_at
            # Unknown for the first step, which is compilation.
            rate = None if step == start + 1 else (step - then) * tokens_per_step / max(clock.working() - at, 1e-9)
            logged_at = (step, clock.working())
            metrics_file.write(
                step=step,
                tokens=step * tokens_per_step,
                loss=loss,
                grad_norm=float(on_device["grad_norm"]),
                learning_rate=float(on_device["learning_rate"]),
                tokens_per_second=rate,
                mfu=None
                if limits is None or rate is None
                else rate * flops_per_token / (limits.flops * len(strategy.devices)),
                seconds=clock.total(),
            )
            display.update(step, loss=loss, rate=rate)

    def validate(step: int) -> float:
        windows = validation_batches(
            dataset.val,
            block_size=model_config.block_size,
            batch_size=shares.rows,
            max_tokens=train.eval_tokens,
            rows=strategy.rows(shares.rows),
        )
        with clock.paused():
            windows = watchdog.each(map(strategy.place, windows), step)
            val_loss, _ = mean_loss(trainer.evaluate, state.params, windows)
        metrics_file.write(step=step, val_loss=val_loss)
        display.update(step, val_loss=val_loss)
        return val_loss

    best = min((line["val_loss"] for line in kept if line.get("val_loss") is not None), default=math.inf)
    lost = False
    try:
        with signals() as caught:
            for step in range(start + 1, train.steps + 1):
                began = time.monotonic()
                batch = strategy.place(next(batches))
                watchdog.beat(step)
                state, on_device = trainer.step(state, batch, dropout_key)
                every = experiment.parallel.check_replicas_every
                if strategy.checksums and every and step % every == 0:
                    on_device["checksums"] = strategy.checksums(state)
                pending.append((step, on_device))
                if step == start + 1:  # waits once: the first step is compilation
                    settle(0)
                    logged_at = (step, clock.working())
                    display.say(
                        f"first step after {time.monotonic() - began:.1f} s (tracing and compilation; a second start finds it compiled)"
                    )
                settle(IN_FLIGHT)

                stop = bool(caught) or multihost.stop_requested(step)
                val_loss = None
                if step % train.eval_every == 0 or step == train.steps:
                    settle(0)
                    val_loss = validate(step)
                is_best = val_loss is not None and val_loss < best
                if step % train.checkpoint_every == 0 or is_best or step == train.steps or stop:
                    settle(0)  # a step whose loss is not finite is never saved
                    watchdog.beat(step, slow=True)
                    if strategy.checksums and checked < step:
                        compare(step, strategy.checksums(state))
                    with clock.paused():
                        checkpoints.save(strategy.to_checkpoint(state), step, val_loss)
                    best = val_loss if is_best else best
                if stop:
                    checkpoints.wait()
                    raise Interrupted(
                        f"{caught[0].name if caught else 'SIGTERM'}: saved step {step} of {train.steps}. "
                        f"To continue: jaxgpt train --run-dir {directory}"
                    )
    except Exception as e:
        lost = multihost.several() and not isinstance(e, multihost.Everywhere)
        raise
    finally:
        display.close()
        batches.close()
        metrics_file.close()
        if not lost:  # else this would wait for the others
            checkpoints.close()
        if leader:
            plot_losses(read_metrics(directory / "metrics.jsonl"), directory / "loss.png", experiment.name)

    return load(directory)


class _Clock:
    """Seconds of a run over all its sittings, and those of them spent on steps rather than on pauses."""

    def __init__(self, before: float):
        self._start = time.monotonic() - before
        self._pauses = 0.0

    def total(self) -> float:
        return time.monotonic() - self._start

    def working(self) -> float:
        return self.total() - self._pauses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._pauses += time.monotonic() - began
