"""Log a run while it trains: lines of metrics.jsonl, and of the display."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxgpt import callbacks
from jaxgpt.config import TrainConfig
from jaxgpt.parallel.device import device_kind
from jaxgpt.parallel.peaks import PEAKS
from jaxgpt.runs.metrics import MetricsFile
from jaxgpt.runs.progress import Display


class Log(callbacks.Log):
    """Write lines of metrics.jsonl, and show them."""

    def __init__(
        self,
        config: TrainConfig,
        metrics: Path | None,
        lines: list[dict[str, Any]],
        *,
        start: int,
        tokens_per_step: int,
        flops_per_token: float,
        devices: int,
        show: bool,
    ):
        """metrics: metrics.jsonl; None: another process writes it. lines: those that it has, to which losses are added."""
        self._config, self._start, self._tokens_per_step = config, start, tokens_per_step
        self.lines = lines
        limits = PEAKS.get(device_kind())  # None: unknown, and so is the MFU
        self._mfu_of_rate = None if limits is None else flops_per_token / (limits.flops * devices)
        self.clock = Clock(max((line.get("seconds") or 0.0 for line in lines), default=0.0))
        self._logged_at = (start, self.clock.working())
        self._file = MetricsFile(metrics)
        self._display = Display(config.steps, start, show=show)  # last: a bar that is shown has to be closed

    def compiled(self, step: int, seconds: float) -> None:
        """Show how long the first step took."""
        self._logged_at = (step, self.clock.working())
        self._display.say(
            f"first step after {seconds:.1f} s (tracing and compilation; a second start finds it compiled)"
        )

    def step(self, step: int, *, loss: float, grad_norm: float, learning_rate: float) -> None:
        """Write and show a step that was taken, every so many steps."""
        if step % self._config.log_every and step != self._config.steps:
            return
        then, at = self._logged_at
        self._logged_at = (step, self.clock.working())
        tokens = (step - then) * self._tokens_per_step
        # Unknown for the first step, which is compilation.
        rate = None if step == self._start + 1 else tokens / max(self._logged_at[1] - at, 1e-9)
        self._file.write(
            step=step,
            tokens=step * self._tokens_per_step,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=rate,
            mfu=None if rate is None or self._mfu_of_rate is None else rate * self._mfu_of_rate,
            seconds=self.clock.total(),
        )
        self.lines.append({"step": step, "loss": loss})
        self._display.update(step, loss=loss, rate=rate)

    def skipped(self, step: int, why: str) -> None:
        """Record a step that was skipped."""
        self._file.write(step=step, skipped=why)

    def say(self, text: str) -> None:
        """Show a line."""
        self._display.say(text)

    def validation(self, step: int, val_loss: float) -> None:
        """Write and show a validation loss."""
        self._file.write(step=step, val_loss=val_loss)
        self.lines.append({"step": step, "val_loss": val_loss})
        self._display.update(step, val_loss=val_loss)

    def close(self) -> None:
        """Take the display away and close the file."""
        self._display.close()
        self._file.close()


class Clock:
    """Seconds of a run over all its sessions, and those of them spent on steps rather than on pauses."""

    def __init__(self, before: float):
        self._start = time.monotonic() - before
        self._pauses = 0.0

    def total(self) -> float:
        """Return all seconds."""
        return time.monotonic() - self._start

    def working(self) -> float:
        """Return the seconds without pauses."""
        return self.total() - self._pauses

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count what happens inside as a pause."""
        began = time.monotonic()
        yield
        self._pauses += time.monotonic() - began
