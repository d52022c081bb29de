"""Log a run while it trains, to metrics.jsonl and to stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxgpt.errors import shell_line
from jaxgpt.loop import Line
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import PEAKS, device_kind, train_flops_per_token
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.runs.training import Training

QUIET = 10.0  # seconds without a line


class RunLog:
    """Write the lines of metrics.jsonl, and display them on stderr: the `log` of `loop.train`.

    On a terminal a live bar shows the last values. Elsewhere they are a line after each validation or QUIET seconds.
    """

    def __init__(self, training: Training, start: int, callbacks: Sequence[Callable[[Line], None]] = (), *, show: bool):
        """Open metrics.jsonl, which has lines up to step `start`.

        callbacks: see `jaxgpt.fit`. show: display the lines as well.
        """
        model, config = training.experiment.model, training.experiment.train
        self._config, self._start, self._callbacks = config, start, callbacks
        self._directory = training.metrics.parent
        self._tokens_per_step = config.batch_size * model.block_size
        self.val_losses: dict[str, float] = {}  # the sources' of a mixture, at the next validation to be logged
        self.lines = read_metrics(training.metrics)  # losses of this session are appended
        limits = PEAKS.get(device_kind())  # None for an unknown device, without MFU
        flops = train_flops_per_token(model, *training.trainer.parameters)
        devices = training.trainer.strategy.devices
        self._mfu_of_rate = None
        if limits is not None and flops is not None:
            self._mfu_of_rate = flops / (limits.flops * len(devices))
        self.clock = Clock(max((line.get("seconds") or 0.0 for line in self.lines), default=0.0))
        self._logged_at = (start, self.clock.working())
        self._file = MetricsFile(training.metrics if multihost.is_process_0() else None)
        self._values = dict.fromkeys(("loss", "val", "rate"), "")  # the last ones, formatted
        self._show, self._began = show, time.monotonic()
        self._said = self._began  # when a line was displayed last
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not (show and sys.stderr is not None and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=config.steps, completed=start, values="compiling")
        self._bar.start()  # last: once shown, the bar must be closed

    def __call__(self, line: Line) -> None:
        """Record what `loop.train` says of a step. A loss is recorded every `train.log_every` steps and at the end."""
        step, steps = line["step"], self._config.steps
        if "compiled" in line:
            self._logged_at = (step, self.clock.working())
            why = "tracing and compilation; a second start finds it compiled"
            self.say(f"first step after {line['compiled']:.1f} s ({why})")
        elif "skipped" in line:
            self._write(line)
            replay = shell_line("jaxgpt", "replay", self._directory, "--step", step)
            self.say(f"step {step} skipped: {line['skipped']}. To see where it began: {replay}")
        elif "val_loss" in line:
            if self.val_losses:
                line = line | {"val_losses": self.val_losses}
            self._write(line)
            self.lines.append(line)
            each = ", ".join(f"{Path(name).name} {loss:.3f}" for name, loss in self.val_losses.items())
            self._values["val"] = f"val {line['val_loss']:.3f}" + (f" ({each})" if each else "")
        elif step % self._config.log_every == 0 or step == steps:
            then, at = self._logged_at
            self._logged_at = (step, self.clock.working())
            tokens = (step - then) * self._tokens_per_step
            # Not measured at the first step of a session, which is mostly compilation.
            rate = None if step == self._start + 1 else tokens / max(self._logged_at[1] - at, 1e-9)
            mfu = None if rate is None or self._mfu_of_rate is None else rate * self._mfu_of_rate
            more = {"tokens_per_second": rate, "mfu": mfu, "seconds": self.clock.total()}
            self._write({"step": step, "tokens": step * self._tokens_per_step} | line | more)
            self.lines.append({"step": step, "loss": line["loss"]})
            self._values["rate"] = "" if rate is None else f"{rate:,.0f} tokens/s"
        if "loss" in line:
            self._values["loss"] = f"loss {line['loss']:.3f}"
        values = " · ".join(value for value in self._values.values() if value)
        self._bar.update(self._task, completed=step, values=values or "compiled")
        now = time.monotonic()
        if self._bar.disable and ("val_loss" in line or ("loss" in line and now - self._said > QUIET)):
            left = int((now - self._began) / max(1, step - self._start) * (steps - step))
            self.say(f"step {step}/{steps} · {values} · {left // 60}:{left % 60:02d} left")

    def _write(self, line: Line) -> None:
        self._file.write(**line)
        self.tell(line)

    def tell(self, line: Line) -> None:
        """Hand a line to the callbacks."""
        for callback in self._callbacks:
            callback(line)

    def say(self, text: str) -> None:
        """Display a line of text, above the bar."""
        self._said = time.monotonic()
        if self._show:
            self._console.print(text, markup=False)

    def close(self) -> None:
        """Remove the bar and close the file."""
        self._bar.stop()
        self._file.close()


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
