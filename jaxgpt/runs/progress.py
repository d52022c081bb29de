"""Show a run while it trains: a live bar on a terminal, plain lines elsewhere, nothing if asked."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """Write to stderr: stdout belongs to results."""

    def __init__(self, steps: int, done: int, *, show: bool):
        self._show = show
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._steps = steps
        self._texts: dict[str, str] = {}  # of the last values, by their formats
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
        """Refresh the values; each validation leaves a line where there is no live bar."""
        formats = {"loss {:.3f}": loss, "val {:.3f}": val_loss, "{:,.0f} tokens/s": rate}
        self._texts |= {form: form.format(value) for form, value in formats.items() if value is not None}
        values = " · ".join(self._texts[form] for form in formats if form in self._texts)
        self._bar.update(self._task, completed=step, values=values)
        if val_loss is not None and self._bar.disable:
            elapsed = time.monotonic() - self._began
            left = elapsed / max(1, step - self._done_before) * (self._steps - step)
            self.say(f"step {step}/{self._steps} · {values} · {int(left) // 60}:{int(left) % 60:02d} left")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()
