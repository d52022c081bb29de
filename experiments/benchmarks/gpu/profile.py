"""The longest kernels of a training step, from a trace."""

import collections
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from gpu.row import Row, unavailable
from gpu.setting import Setting
from gpu.steps import gpt2_experiment, make_steps

STEPS, LONGEST = 3, 10
TRIES = 3  # a trace of short steps on a busy machine has been empty


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return the one check."""
    return [functools.partial(trace, setting)]


def trace(setting: Setting) -> Iterator[Row]:
    """Trace a few steps, and list the kernels that take longest in total."""
    _, run = make_steps(gpt2_experiment(setting, setting.contexts[0]))
    run(STEPS)
    for _ in range(TRIES):
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory):
                began = time.perf_counter()
                run(STEPS)
                wall = 1e3 * (time.perf_counter() - began) / STEPS
            kernels, calls = read_kernels(next(Path(directory).rglob("*.xplane.pb")))
        if total := sum(kernels.values()):
            break
    else:
        yield unavailable("kernels", "the trace has none of the device")
        return
    beside = f"{100 * total / wall:.0f}% of a traced step of {wall:.3g} ms; streams may overlap"
    yield Row(what=f"all {len(kernels)} kernels of a step", values=[total], unit="ms", beside=beside)
    for place, (name, ms) in enumerate(kernels.most_common(LONGEST), start=1):
        beside = f"{100 * ms / total:.1f}% of the kernels' time, {calls[name] / STEPS:g} a step"
        yield Row(what=f"{place}. {name[:80]}", values=[ms], unit="ms", beside=beside)


def read_kernels(path: Path) -> tuple[collections.Counter, collections.Counter]:
    """Return the milliseconds a step, and the calls, of each kernel. On CPU: of each operation of XLA's."""
    kernels, calls = collections.Counter(), collections.Counter()
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):  # other lines of a GPU sum up those of its streams
                continue
            for event in line.events:
                if devices or "hlo_op" in (name for name, _ in event.stats):
                    kernels[event.name] += event.duration_ns / 1e6 / STEPS
                    calls[event.name] += 1
    return kernels, calls
