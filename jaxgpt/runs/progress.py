"""What a run shows while it trains: a live bar on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """All on stderr: stdout belongs to results."""

    def __init__(self, steps: int, done: int, *, show: bool):
        self._show = show
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._steps = steps
        self._loss: float | None = None
        self._val: float | None = None
        self._rate: float | None = None
        self._began, self._done_before = time.monotonic(), done
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not (show and sys.stderr is not None and sys.stderr.isatty()),
        )
        self._task = self._bar.add_task("", total=steps, completed=done, numbers="compiling")
        self._bar.start()

    def say(self, text: str) -> None:
        """One line of its own, above the bar."""
        if self._show:
            self._console.print(text, markup=False)

    def update(
        self,
        step: int,
        *,
        loss: float | None = None,
        rate: float | None = None,
        val_loss: float | None = None,
    ) -> None:
        """Refresh the numbers; each validation leaves a line where there is no live bar."""
        self._loss = self._loss if loss is None else loss
        self._rate = self._rate if rate is None else rate
        if val_loss is not None:
            self._val = val_loss
        numbers = " · ".join(
            text
            for value, text in (
                (self._loss, f"loss {self._loss or 0:.3f}"),
                (self._val, f"val {self._val or 0:.3f}"),
                (self._rate, f"{self._rate or 0:,.0f} tokens/s"),
            )
            if value is not None
        )
        self._bar.update(self._task, completed=step, numbers=numbers)
        if val_loss is not None and self._bar.disable:
            elapsed = time.monotonic() - self._began
            left = elapsed / max(1, step - self._done_before) * (self._steps - step)
            self.say(f"step {step}/{self._steps} · {numbers} · {int(left) // 60}:{int(left) % 60:02d} left")

    def close(self) -> None:
        self._bar.stop()
