"""Let systems take turns, with and without busy processes, and print their times side by side."""

import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator

BUSY = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
while True:
    pass
"""  # reads until the process that started it is gone


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep that many processes computing. They end with the block, and with this process, however it ends."""
    processes = [subprocess.Popen([sys.executable, "-S", "-c", BUSY], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.communicate()


Times = dict[str, list[float]]  # by system


def take_turns(systems: dict[str, Callable[[], float]], rounds: int, busy: int = 0) -> tuple[Times, Times]:
    """Return the seconds of each system in each round: alone, and beside `busy` processes that compute, if any."""
    alone: Times = {name: [] for name in systems}
    beside: Times = {name: [] for name in systems}
    for _ in range(rounds):
        for name, seconds in systems.items():
            alone[name].append(seconds())
        if busy:
            with busy_processes(busy):
                for name, seconds in systems.items():
                    beside[name].append(seconds())
    return alone, beside


def print_table(turns: Times, title: str, last: dict[str, str]) -> None:
    """Print the table of all turns.

    Args:
        turns: seconds a step in each round, by system; ours first.
        title: heading of the last column.
        last: its cells, by system.
    """
    print(f"\n| system | ms a step: median (least to most) | jaxgpt's speed over it (least to most) | {title} |")
    print("|---|---|---|---|")
    ours, *_ = turns.values()
    for name, seconds in turns.items():
        ms = sorted(1e3 * x for x in seconds)
        print(
            f"| {name} | {statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f}) | {spread(seconds, ours)} | {last[name]} |"
        )


def spread(seconds: list[float], others: list[float]) -> str:
    """Format the ratios of each round: the median, the least and the most."""
    ratios = [a / b for a, b in zip(seconds, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
