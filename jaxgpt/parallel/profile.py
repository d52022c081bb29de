"""Trace training steps with JAX's profiler."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError


def parse_steps(text: str | None) -> range:
    """Return the steps of `train.profile`, such as 20:25. Raises `UserError` unless it names a first and a last step."""
    if text is None:
        return range(0)
    named = re.fullmatch(r"([1-9]\d{0,9}):([1-9]\d{0,9})", text, re.ASCII)
    first, last = map(int, named.groups()) if named else (1, 0)
    if last < first:
        raise UserError(f"profile={short(text)}: needs the first and the last step to trace, such as 20:25")
    return range(first, last + 1)


class StepProfiler:
    """Trace some steps of a run into a directory, for XProf or https://ui.perfetto.dev."""

    def __init__(self, steps: range, directory: Path, say: Callable[[str], None]):
        """Trace `steps`, counted from 1. say: displays a line of text."""
        self._steps, self._directory, self._say = steps, directory, say
        self._is_tracing = False

    def take(self, number: int, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a step returns, and trace it if it is one of those to trace."""
        if number not in self._steps:
            return step(*arguments)
        if not self._is_tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else each call of a Python function is an event
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            out = jax.block_until_ready(step(*arguments))  # so that the trace is whole whenever it ends
        if number == self._steps[-1]:
            self.close()
        return out

    def close(self) -> None:
        """End the trace, if it has not ended."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
            self._say(f"trace in {self._directory}: open it in XProf or https://ui.perfetto.dev")
