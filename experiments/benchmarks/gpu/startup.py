"""Seconds to the first step of GPT-2 124M, imports included, with a cold and a warm compilation cache."""

import functools
import tempfile
from collections.abc import Callable, Iterator

from training import Worker  # of training.py beside gpu.py

from gpu.row import Row
from gpu.setting import Setting


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return the one check."""
    return [functools.partial(start, setting)]


def start(setting: Setting) -> Iterator[Row]:
    """Start a process with an empty cache, then two with what it has left there."""
    context = setting.contexts[0]
    with tempfile.TemporaryDirectory() as cache:
        for kind, rounds in (("cold", 1), ("warm", 2)):
            seconds = []
            for _ in range(rounds):
                worker = Worker(setting.command("jaxgpt", context), JAX_COMPILATION_CACHE_DIR=cache)
                seconds.append(worker.wait_until_ready())
                worker.close()
            what = f"first step, {kind} cache"
            yield Row(what=what, values=seconds, unit="s", beside="from the start of the process, imports included")
