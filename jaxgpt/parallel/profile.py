"""Trace training steps with JAX's profiler, and list the operations that took longest."""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError

LISTED = 10  # operations to list


def parse_steps(text: str | None) -> range:
    """Return the steps of `train.profile`, such as 20:25. Raises `UserError` unless it names a first and a last step."""
    if text is None:
        return range(0)
    named = re.fullmatch(r"([1-9]\d{0,9}):([1-9]\d{0,9})", text, re.ASCII)
    steps = range(int(named[1]), int(named[2]) + 1) if named else range(0)
    if not steps:
        raise UserError(f"profile={short(text)}: needs the first and the last step to trace, such as 20:25")
    return steps


class StepProfiler:
    """Trace some steps of a run into a directory, for XProf or https://ui.perfetto.dev, and say what took longest."""

    def __init__(self, lower: Callable[[], Any], steps: range, directory: Path, say: Callable[[str], None]):
        """Trace `steps`, counted from 1. lower: lowers the step, to name its operations. say: displays a line of text."""
        self._lower, self._steps, self._directory, self._say = lower, steps, directory, say
        self._traced = 0  # steps in the trace that is being recorded

    def take(self, number: int, step: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a step returns, and trace it if it is one of those to trace."""
        if number not in self._steps:
            return step(*arguments)
        if not self._traced:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # else each call of a Python function is an event
            jax.profiler.start_trace(self._directory, profiler_options=options)
        self._traced += 1
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            out = jax.block_until_ready(step(*arguments))  # so that the trace is whole whenever it ends
        if number == self._steps[-1]:
            self.close()
        return out

    def close(self) -> None:
        """End the trace and list its longest operations, if it has not ended."""
        steps, self._traced = self._traced, 0
        if steps:
            jax.profiler.stop_trace()
            traces = self._directory.glob("plugins/profile/*/*.xplane.pb")
            newest = max(traces, key=lambda path: path.stat().st_mtime)
            self._say(f"trace in {newest.parent}; where a step spends most, the mean of {steps}, over all threads:")
            for line in list_operations(newest, steps, self._lower().compile().as_text()):
                self._say(line)


def list_operations(trace: Path, steps: int, program: str) -> Iterator[str]:
    """Yield a line for each of the operations that took longest: milliseconds per step, share of all, and its place.

    Loops include what they run. program: the text of the compiled step, which has the place in the model.
    """
    nanoseconds = Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.13 warns of the types of jaxlib's reader
        lines = [line for plane in jax.profiler.ProfileData.from_file(str(trace)).planes for line in plane.lines]
        for line in lines:
            for event in line.events:
                name = event.name if line.name == "XLA Ops" else dict(event.stats).get("hlo_op")  # the first on TPUs
                if name is not None:
                    nanoseconds[name] += event.duration_ns
    places = dict(re.findall(r'%?([\w.-]+) = [^\n]*op_name="([^"]*)"', program))
    for name, time in nanoseconds.most_common(LISTED):
        share = time / max(1, nanoseconds.total())
        yield f"{time / steps / 1e6:10.3f} ms  {share:6.1%}  {places.get(name, 'unknown')} ({name})"
