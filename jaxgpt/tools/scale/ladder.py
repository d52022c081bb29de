"""Plan a ladder of widths and horizons, and a test run of ten times the compute, that fit into given minutes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from jaxgpt.errors import UserError
from jaxgpt.tools.scale.law import Law
from jaxgpt.tools.scale.sizes import EVAL_TOKENS, Size, Speed

TEST_COMPUTE = 10  # FLOPs of the test run / those of the largest run of the ladder
HORIZONS = 4  # token counts of each size, each GROWTH times the one before
SIZES = 4  # at most; each has about STEP times the width of the one before
GROWTH, STEP = 1.75, 1.5
LEAST_TOP = 3  # width of the smallest ladder's largest size, in smallest widths: with less there are not three sizes
# Of the shortest runs. Before it, models learn what any size can learn, and the law is off by percents.
LEAST_STEPS, LEAST_TOKENS = 150, 150_000
# Least tokens per parameter of the largest run of a ladder with more than LEAST_TOP smallest widths. About 20 are optimal
# (Hoffmann et al.). Far fewer, and the test run would memorise its text, of which the law knows nothing.
RATIO = 10
# Up to 4 epochs, repeated tokens are nearly as good as new ones (arXiv:2305.16264). The ladder has at most one.
MOST_EPOCHS = 4
MOST_SEEDS = 4  # of each run of the ladder, if data and not minutes limit its size: noise limits the prediction
RESERVE = 0.1  # share of the minutes for measuring speed, fitting, and a machine that slows down
RUN_SECONDS = 3.0  # of each run, besides compilation, steps and validation: reading data, saving


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rung:
    """A run to train: a width, a horizon and a seed."""

    n_head: int
    width: int
    parameters: int
    steps: int
    seed: int
    tokens: int
    flops: float
    epochs: float  # over the training split
    seconds: float  # estimated

    @property
    def directory(self) -> str:
        """Return the path of its run directory in that of the ladder."""
        return f"width-{self.width}/steps-{self.steps}/seed-{self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of a ladder, and what the test run may take."""

    rungs: tuple[Rung, ...]
    data_tokens: int  # of the training split
    test_flops: float
    test_seconds: float  # estimated, at the FLOP/s of the largest size


def make_plan(
    unit: int, size_of: Callable[[int], Size], measure: Callable[[Size], Speed], *, minutes: float, data_tokens: int
) -> Plan:
    """Plan the largest ladder that fits, with its test run, into the minutes and into one epoch of the data.

    Args:
        unit: heads of the smallest size.
        size_of: returns the size with that many heads.
        measure: measures the speed of a size on this machine.
        minutes: for all runs.
        data_tokens: tokens of the training split.

    Raises:
        UserError: the smallest ladder takes longer, or more data.
    """
    shortest = max(LEAST_STEPS * size_of(unit).tokens_per_step, LEAST_TOKENS)
    least = math.ceil(shortest * GROWTH ** (HORIZONS - 1))
    if least > data_tokens:
        smaller = "" if shortest == LEAST_TOKENS else f", or a batch of less than {shortest // LEAST_STEPS:,} tokens"
        raise UserError(
            f"the training split has {data_tokens:,} tokens, a ladder needs {least:,}: its shortest runs have {shortest:,}, "
            f"its longest {GROWTH ** (HORIZONS - 1):.1f} times as many, all of them new. Give more text{smaller}"
        )
    budget = 60 * minutes * (1 - RESERVE)
    probe = size_of(LEAST_TOP * unit)
    probed = measure(probe)

    def guess(size: Size) -> Speed:
        return dataclasses.replace(probed, per_token=probed.per_token * size.flops_per_token / probe.flops_per_token)

    top = LEAST_TOP
    while (tokens := RATIO * size_of((top + 1) * unit).parameters) <= data_tokens:
        sizes = [size_of(n) for n in _n_heads(top + 1, unit)]
        if _longest([guess(size) for size in sizes], budget) < max(least, tokens):
            break
        top += 1
    while True:
        sizes = [size_of(n) for n in _n_heads(top, unit)]
        speeds = [probed if size is probe else measure(size) for size in sizes]
        longest = min(_longest(speeds, budget), data_tokens)
        if longest >= least:
            seeds = [n for n in range(2, MOST_SEEDS + 1) if _longest(speeds, budget, seeds=n) >= longest]
            return _lay_out(sizes, speeds, int(longest), data_tokens, seeds=max(seeds, default=1))
        if top == LEAST_TOP:
            break
        top -= 1
    fixed, per_token = _costs(speeds)
    needed = math.ceil((fixed + per_token * least) / (1 - RESERVE) / 60)
    widths = ", ".join(str(size.experiment.model.n_embd) for size in sizes)
    raise UserError(
        f"--minutes {minutes:g}: the smallest ladder here, widths {widths} and {shortest:,} to {least:,} tokens, takes about "
        f"{needed} minutes with its test run: give --minutes {needed}"
    )


def _n_heads(top: int, unit: int) -> list[int]:
    """Return the heads of a ladder's sizes, from the smallest. top: the largest, in smallest sizes."""
    return [n * unit for n in sorted({max(1, round(top / STEP**i)) for i in range(SIZES)})]


def _costs(speeds: Sequence[Speed], seeds: int = 1) -> tuple[float, float]:
    """Return the seconds of ladder and test run that are fixed, and those per token of the longest horizon.

    The test run is taken for one of the largest size, which computes as fast.
    """
    horizons = sum(GROWTH**-i for i in range(HORIZONS))
    fixed = seeds * HORIZONS * sum(map(_overhead, speeds)) + _overhead(speeds[-1])
    per_token = seeds * horizons * sum(speed.per_token for speed in speeds)
    return fixed, per_token + TEST_COMPUTE * speeds[-1].per_token


def _overhead(speed: Speed) -> float:
    """Return the seconds of a run besides its steps. Validation takes a third of training."""
    return RUN_SECONDS + speed.first_step + speed.per_token * EVAL_TOKENS / 3


def _longest(speeds: Sequence[Speed], budget: float, seeds: int = 1) -> float:
    """Return the tokens of the longest horizon if all runs take `budget` seconds."""
    fixed, per_token = _costs(speeds, seeds)
    return (budget - fixed) / per_token


def _lay_out(sizes: Sequence[Size], speeds: Sequence[Speed], longest: int, data_tokens: int, *, seeds: int) -> Plan:
    steps = longest / sizes[0].tokens_per_step
    horizons = [int(steps / GROWTH**i) for i in reversed(range(HORIZONS))]
    rungs = [
        _make_rung(size, steps, seed, data_tokens, speed)
        for seed in range(seeds)
        for size, speed in zip(sizes, speeds, strict=True)
        for steps in horizons
    ]
    # The test run will be wider, and shorter.
    test = _make_rung(sizes[-1], TEST_COMPUTE * horizons[-1], 0, data_tokens, speeds[-1])
    return Plan(rungs=tuple(rungs), data_tokens=data_tokens, test_flops=test.flops, test_seconds=test.seconds)


def _make_rung(size: Size, steps: int, seed: int, data_tokens: int, speed: Speed) -> Rung:
    tokens = steps * size.tokens_per_step
    return Rung(
        n_head=size.experiment.model.n_head,
        width=size.experiment.model.n_embd,
        parameters=size.parameters,
        steps=steps,
        seed=seed,
        tokens=tokens,
        flops=tokens * size.flops_per_token,
        epochs=tokens / data_tokens,
        seconds=_overhead(speed) + tokens * speed.per_token,
    )


def choose_test(plan: Plan, law: Law, unit: int, size_of: Callable[[int], Size]) -> Rung:
    """Return the run of `plan.test_flops` with the least fitted loss.

    Both its parameters and its tokens are at least those of the ladder's largest run, which leaves neither of them more
    than ten times as many; its tokens are at most `MOST_EPOCHS` epochs.
    """
    top, choices = plan.rungs[-1], []
    for n_head in range(top.n_head, TEST_COMPUTE * top.n_head + 1, unit):
        size = size_of(n_head)
        steps = round(plan.test_flops / (size.flops_per_token * size.tokens_per_step))
        tokens = steps * size.tokens_per_step
        if tokens < top.tokens:
            break
        if tokens <= MOST_EPOCHS * plan.data_tokens:
            rung = _make_rung(size, steps, 0, plan.data_tokens, Speed(first_step=0.0, per_token=0.0))
            choices.append(dataclasses.replace(rung, seconds=plan.test_seconds))
    return min(choices, key=lambda rung: law.loss(rung.parameters, rung.tokens))
