"""Log a run while it trains, to metrics.jsonl and to stderr."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxgpt.loop import Line
from jaxgpt.parallel import multihost
from jaxgpt.parallel.device import PEAKS, device_kind, train_flops_per_token
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.runs.training import Training


class RunLog:
    """Write the lines of metrics.jsonl, and display them: the `log` of `loop.train`."""

    def __init__(self, training: Training, start: int, callbacks: Sequence[Callable[[Line], None]] = (), *, show: bool):
        """Open metrics.jsonl, which has lines up to step `start`.

        callbacks: see `jaxgpt.fit`. show: display the lines as well.
        """
        model, config, devices = training.experiment.model, training.experiment.train, training.trainer.strategy.devices
        self._config, self._start, self._tokens_per_step = config, start, config.batch_size * model.block_size
        self._callbacks = callbacks
        self.lines = read_metrics(training.metrics)  # losses of this session are appended
        limits = PEAKS.get(device_kind())  # None: an unknown device, without MFU
        flops_per_token = train_flops_per_token(model, *training.trainer.parameters)
        self._mfu_of_rate = None if limits is None else flops_per_token / (limits.flops * len(devices))
        self.clock = Clock(max((line.get("seconds") or 0.0 for line in self.lines), default=0.0))
        self._logged_at = (start, self.clock.working())
        self._file = MetricsFile(training.metrics if multihost.is_process_0() else None)
        self._display = Display(config.steps, start, show=show)  # last: once shown, the bar must be closed

    def __call__(self, line: Line) -> None:
        """Record what `loop.train` says of a step. A loss is recorded every `train.log_every` steps and at the end."""
        step = line["step"]
        if "compiled" in line:
            self._logged_at = (step, self.clock.working())
            self.say(
                f"first step after {line['compiled']:.1f} s (tracing and compilation; a second start finds it compiled)"
            )
        elif "skipped" in line:
            self._write(line)
        elif "val_loss" in line:
            self._write(line)
            self.lines.append(line)
            self._display.update(step, val_loss=line["val_loss"])
        elif step % self._config.log_every == 0 or step == self._config.steps:
            then, at = self._logged_at
            self._logged_at = (step, self.clock.working())
            tokens = (step - then) * self._tokens_per_step
            # Not measured at the first step of a session, which is mostly compilation.
            rate = None if step == self._start + 1 else tokens / max(self._logged_at[1] - at, 1e-9)
            more = {
                "tokens_per_second": rate,
                "mfu": None if rate is None or self._mfu_of_rate is None else rate * self._mfu_of_rate,
                "seconds": self.clock.total(),
            }
            self._write({"step": step, "tokens": step * self._tokens_per_step} | line | more)
            self.lines.append({"step": step, "loss": line["loss"]})
            self._display.update(step, loss=line["loss"], rate=rate)

    def _write(self, line: Line) -> None:
        self._file.write(**line)
        self.tell(line)

    def tell(self, line: Line) -> None:
        """Hand a line to the callbacks."""
        for callback in self._callbacks:
            callback(line)

    def say(self, text: str) -> None:
        """Display a line of text."""
        self._display.say(text)

    def close(self) -> None:
        """Remove the display and close the file."""
        self._display.close()
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


class Display:
    """Display a run on stderr: a live bar on a terminal, plain lines elsewhere."""

    def __init__(self, steps: int, done: int, *, show: bool):
        """Show the bar, with `done` of `steps` steps completed. show: False displays nothing."""
        self._show = show
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._steps = steps
        self._texts: dict[str, str] = {}  # the last values, formatted, by format
        self._began, self._done_before = time.monotonic(), done
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not (show and sys.stderr is not None and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=steps, completed=done, values="compiling")
        self._bar.start()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._show:
            self._console.print(text, markup=False)

    def update(
        self, step: int, *, loss: float | None = None, rate: float | None = None, val_loss: float | None = None
    ) -> None:
        """Update the values of the bar. Without a bar, print a line for each validation."""
        formats = {"loss {:.3f}": loss, "val {:.3f}": val_loss, "{:,.0f} tokens/s": rate}
        self._texts |= {form: form.format(value) for form, value in formats.items() if value is not None}
        values = " · ".join(self._texts[form] for form in formats if form in self._texts)
        self._bar.update(self._task, completed=step, values=values)
        if val_loss is not None and self._bar.disable:
            elapsed = time.monotonic() - self._began
            left = elapsed / max(1, step - self._done_before) * (self._steps - step)
            self.say(f"step {step}/{self._steps} · {values} · {int(left) // 60}:{int(left) % 60:02d} left")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()
