"""Log a run while it trains, to metrics.jsonl and to stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.errors import shell_line
from jaxgpt.experiment import Experiment
from jaxgpt.parallel import multihost
from jaxgpt.parallel.limits import PEAKS, train_flops_per_token
from jaxgpt.parallel.trainer import Trainer
from jaxgpt.runs.bucket import name_of
from jaxgpt.runs.metrics import MetricsFile, plot_losses, read_metrics
from jaxgpt.train import Metrics, why_skipped

Line = dict[str, Any]  #: a line of metrics.jsonl, or what else happened at a step
QUIET = 10.0  # seconds without a line
FIRST = ("loss", "grad_norm", "learning_rate")  # the metrics that every line has


class RunLog:
    """Write metrics.jsonl, and display the last values after a validation, or after QUIET seconds without a line."""

    def __init__(
        self,
        directory: Path,
        experiment: Experiment,
        trainer: Trainer,
        start: int,
        callbacks: Sequence[Callable[[Line], None]] = (),
        *,
        show: bool,
    ):
        """Open metrics.jsonl, which has lines up to step `start`. See `jaxgpt.fit` for callbacks."""
        self._config, self._start, self._callbacks = experiment.train, start, callbacks
        self._directory, self._name = directory, experiment.name
        self._tokens_per_step = experiment.train.batch_size * experiment.model.block_size
        self.lines = read_metrics(directory / "metrics.jsonl")  # losses of this session are appended
        limits = PEAKS.get(trainer.strategy.devices[0].device_kind)  # None for an unknown device, without MFU
        flops = train_flops_per_token(experiment.model, *trainer.parameters)
        self._mfu_of_rate = flops / (limits.flops * len(trainer.strategy.devices)) if limits and flops else None
        self.clock = Clock(max((line.get("seconds") or 0.0 for line in self.lines), default=0.0))
        self._logged_at = (start, self.clock.working())
        self._file = MetricsFile(directory / "metrics.jsonl" if multihost.is_process_0() else None)
        self._values = dict.fromkeys(("loss", "val", "rate"), "")  # the last ones, formatted
        self._show = show
        self._began = self._said = time.monotonic()  # when a line was displayed last

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Record why a step was skipped, or every `train.log_every` steps the metrics of one."""
        if why := why_skipped(metrics):
            self._write({"step": step, "skipped": why})
            replay = shell_line("jaxgpt", "replay", name_of(self._directory), "--step", step)
            self.say(f"step {step} skipped: {why}. To see where it began: {replay}")
            return
        if step % self._config.log_every == 0 or step == self._config.steps:
            (then, at), now = self._logged_at, self.clock.working()
            self._logged_at = (step, now)
            tokens = (step - then) * self._tokens_per_step
            # Not measured at the first step of a session, which is mostly compilation.
            rate = None if step == self._start + 1 else tokens / max(now - at, 1e-9)
            mfu = rate * self._mfu_of_rate if rate and self._mfu_of_rate else None
            own = sorted(metrics.keys() - {*FIRST, "skipped_in_a_row"})  # the objective's metrics
            line: Line = {"step": step, "tokens": step * self._tokens_per_step}
            line |= {name: metrics[name] for name in (*FIRST, *own)}
            self._write(line | {"tokens_per_second": rate, "mfu": mfu, "seconds": self.clock.total()})
            self.lines.append({"step": step, "loss": metrics["loss"]})
            self._values["rate"] = "" if rate is None else f"{rate:,.0f} tokens/s"
        self._values["loss"] = f"loss {metrics['loss']:.3f}"
        if time.monotonic() - self._said > QUIET:
            self._display(step)

    def log_first_step(self, step: int, seconds: float) -> None:
        """Say how long the first step took. The rate is measured from here on."""
        self._logged_at = (step, self.clock.working())
        self.say(f"first step after {seconds:.1f} s (tracing and compilation; a second start finds it compiled)")

    def log_validation(self, step: int, val_loss: float, val_losses: dict[str, float]) -> None:
        """Record a validation loss, and the loss of each source of a mixture."""
        line: Line = {"step": step, "val_loss": val_loss}
        if val_losses:
            line["val_losses"] = val_losses
        self._write(line)
        self.lines.append(line)
        each = ", ".join(f"{Path(name).name} {loss:.3f}" for name, loss in val_losses.items())
        self._values["val"] = f"val {val_loss:.3f}" + (f" ({each})" if each else "")
        self._display(step)

    def _display(self, step: int) -> None:
        """Display the last values."""
        values, steps = " · ".join(filter(None, self._values.values())), self._config.steps
        left = int((time.monotonic() - self._began) / max(1, step - self._start) * (steps - step))
        self.say(f"step {step}/{steps} · {values} · {left // 60}:{left % 60:02d} left")

    def _write(self, line: Line) -> None:
        self._file.write(**line)
        self.tell(line)

    def tell(self, line: Line) -> None:
        """Hand a line to the callbacks."""
        for callback in self._callbacks:
            callback(line)

    def say(self, text: str) -> None:
        """Display a line of text."""
        self._said = time.monotonic()
        if self._show:
            sys.stderr.write(f"{text}\n")

    def close(self) -> None:
        """Close the file and plot its losses."""
        self._file.close()
        if multihost.is_process_0():
            with contextlib.suppress(OSError):  # a full disk is reported otherwise
                plot_losses(self.lines, self._directory / "loss.png", self._name)


class Clock:
    """Measure the seconds of a run, summed over its sessions, with and without pauses."""

    def __init__(self, before: float):
        """Start the clock. before: seconds of the previous sessions."""
        self._start = time.monotonic() - before
        self._pauses = 0.0

    def total(self) -> float:
        """Return the seconds with pauses."""
        return time.monotonic() - self._start

    def working(self) -> float:
        """Return the seconds without pauses."""
        return self.total() - self._pauses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time in this context as a pause."""
        began = time.monotonic()
        yield
        self._pauses += time.monotonic() - began
