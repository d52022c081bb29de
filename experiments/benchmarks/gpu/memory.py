"""The peak memory of a training step, as measured and as `jaxgpt plan` counts it."""

import functools
from collections.abc import Callable, Iterator

import jax

from gpu.row import Row, unavailable
from gpu.setting import Setting
from gpu.steps import gpt2_experiment, random_batches
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.tools.plan.plan import memory_of_program


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return one check for each context. A peak is that of the process, so that only a higher one shows."""
    return [functools.partial(compare, setting, context) for context in setting.contexts]


def compare(setting: Setting, context: int) -> Iterator[Row]:
    """Take three steps, and compare the peak with the program's size."""
    experiment = gpt2_experiment(setting, context)
    trainer = make_trainer(experiment)
    step = trainer.lower().compile()
    planned = memory_of_program(step) / 2**30
    what = f"peak of a step, {experiment.train.batch_size} x {context:,} tokens"
    compiled = peak()
    state, key = trainer.init_state(jax.random.key(0)), jax.random.key(1)
    for _, batch in zip(range(3), random_batches(experiment), strict=False):
        state, metrics = step(state, jax.device_put(batch, first_device()), key)
        jax.block_until_ready(metrics)
    found = peak()
    if compiled is None or found is None:
        yield unavailable(what, f"{first_device().device_kind} does not count its memory; planned: {planned:.3g} GiB")
        return
    at_most = "" if found > compiled else "; at most: no more than before the first step"
    yield Row(
        what=what,
        values=[found],
        unit="GiB",
        beside=f"planned: {planned:.4g} GiB, {found / planned:.3f} of it{at_most}",
    )


def peak() -> float | None:
    """Return the most GiB that this process has used of the device. None: unknown."""
    stats = first_device().memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None
