"""Training speed of GPT-2 124M compared with nanoGPT's with torch.compile, in turns on the same device."""

import functools
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from training import Worker  # of training.py beside gpu.py

from gpu.row import Row, unavailable
from gpu.setting import Setting

# Both systems hold their memory while they take turns: XLA reserves this share, and torch takes what it needs.
SHARE = {"XLA_CLIENT_MEM_FRACTION": "0.45"}


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return one check for each context."""
    return [functools.partial(compare, setting, context) for context in setting.contexts]


def compare(setting: Setting, context: int) -> Iterator[Row]:
    """Time our steps, in turns with nanoGPT's if it is there."""
    batch = f"{setting.tokens // context} x {context:,} tokens"
    missing = why_not_nanogpt(setting)
    # Both compile at the same time, and then wait for their turns.
    theirs = None if missing else Worker(setting.command("nanogpt", context))
    ours = Worker(setting.command("jaxgpt", context), **SHARE)
    ours.wait_until_ready()
    if theirs is not None:
        try:
            theirs.wait_until_ready(0.4 * setting.seconds - ours.facts["first"])
        except SystemExit as e:  # it failed, or compiles for too long
            theirs, missing = None, str(e)[-200:]
    workers = [ours] if theirs is None else [ours, theirs]
    steps = [max(1, round(setting.turn / worker.seconds(3))) for worker in workers]
    turns = [[x.seconds(n) for x, n in zip(workers, steps, strict=True)] for _ in range(setting.rounds)]
    seconds = list(zip(*turns, strict=True))
    for name, worker, each in zip(("jaxgpt", "nanoGPT"), workers, seconds, strict=False):
        beside = f"{1e3 * statistics.median(each):.4g} ms a step; {worker.facts['said']}"
        rates = [setting.tokens / x for x in each]
        yield Row(what=f"{name}, {batch}", values=rates, unit="tokens/s", beside=beside)
    yield utilization(f"jaxgpt, {batch}: MFU", seconds[0], ours.facts)
    if theirs is None:
        yield unavailable(f"nanoGPT, {batch}", str(missing))
    else:
        ratios = [b / a for a, b in turns]
        met, what = statistics.median(ratios) > 1, f"jaxgpt over nanoGPT, {batch}"
        yield Row(what=what, values=ratios, beside="tokens/s, in turns", target="more than 1", ok=met)
    for worker in workers:
        worker.close()


def why_not_nanogpt(setting: Setting) -> str | None:
    """Return why nanoGPT cannot run here, or None."""
    if setting.nanogpt is None:
        return "give --nanogpt DIR, a checkout of github.com/karpathy/nanoGPT"
    if not Path(setting.nanogpt, "model.py").is_file():
        return f"{setting.nanogpt} has no model.py"
    return None if importlib.util.find_spec("torch") else "torch is not installed"


def utilization(what: str, seconds: Sequence[float], facts: dict) -> Row:
    """Return the row of the MFU of steps that take so long."""
    if facts["peak"] is None:
        return unavailable(what, f"the peak FLOP/s of {facts['device']} are unknown")
    shares = [100 * facts["flops"] / (x * facts["peak"]) for x in seconds]
    beside = f"{facts['flops']:.4g} FLOPs a step, masked scores included; peak {facts['peak']:.3g}/s"
    return Row(what=what, values=shares, unit="%", beside=beside, target="50 %", ok=statistics.median(shares) >= 50)
