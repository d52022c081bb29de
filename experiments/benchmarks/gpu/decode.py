"""Decoding speed of GPT-2 124M with random weights, greedy, and the share of the memory bandwidth that it uses."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from sampling import read_bandwidth

import jaxgpt
from gpu.row import Row, failed, unavailable
from gpu.setting import Setting
from gpu.steps import gpt2_experiment
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.limits import PEAKS

NUMBERS = 2**30  # float32, 4 GiB: many times a GPU's cache


def checks(setting: Setting) -> list[Callable[[], Iterator[Row]]]:
    """Return the memory's speed, and one check for each kind of weights."""
    kinds = ("bfloat16", "float32", "int8")
    return [functools.partial(bandwidth, setting), *(functools.partial(decode, setting, kind) for kind in kinds)]


def bandwidth(setting: Setting) -> Iterator[Row]:
    """Measure how fast the device reads memory."""
    read = read_bandwidth(NUMBERS if first_device().platform == "gpu" else 2**20)
    peaks = PEAKS.get(first_device().device_kind)
    beside = "data sheet: " + ("unknown" if peaks is None else f"{peaks.memory_bandwidth / 1e9:,.0f} GB/s")
    yield Row(what="memory, read by a sum", values=[read / 1e9], unit="GB/s", beside=beside)


def decode(setting: Setting, kind: str) -> Iterator[Row]:
    """Time the tokens after the first, with weights of one kind, by batch."""
    dtype = jnp.dtype("float32" if kind == "float32" else "bfloat16")  # of activations and of the cache
    config = gpt2_experiment(setting, setting.contexts[0]).model
    model = jaxgpt.GPT(config, dtype=dtype)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    model, params = jaxgpt.for_decoding(model, params, kind)
    prompts = np.random.default_rng(0).integers(0, setting.vocab_size, (max(setting.batches), setting.prompt)).tolist()
    decoding = jaxgpt.Decoding(max_new_tokens=setting.new, sampling=jaxgpt.Sampling(greedy=True), bucket=setting.prompt)

    def seconds(batch: int) -> float:
        """Return the seconds of all tokens but the first, which includes prefill."""
        items = jaxgpt.stream(model, params, prompts[:batch], decoding, key=jax.random.key(0), every=setting.new - 1)
        next(items)
        began = time.perf_counter()
        assert sum(len(row) for rows in items for row in rows) == batch * (setting.new - 1)
        return time.perf_counter() - began

    with ThreadPoolExecutor() as pool:  # compiles all batches at once
        compiled = [pool.submit(seconds, batch) for batch in setting.batches]
    weights, slots = sum(x.nbytes for x in jax.tree.leaves(params)), setting.prompt + setting.new
    for batch, first in zip(setting.batches, compiled, strict=True):
        what = f"decode, {kind}, batch {batch}"
        if error := first.exception():
            yield failed(what, error)
            continue
        each = [seconds(batch) / (setting.new - 1) for _ in range(setting.rounds)]
        yield Row(
            what=what,
            values=[batch / x for x in each],
            unit="tokens/s",
            beside=f"{1e3 * statistics.median(each):.3g} ms a token",
        )
        cache = 2 * config.n_layer * batch * slots * config.n_embd * dtype.itemsize
        yield share(f"{what}: memory bandwidth", weights, cache, each)


def share(what: str, weights: int, cache: int, seconds: list[float]) -> Row:
    """Return the row of the bandwidth of steps that each read the weights and the cache once."""
    peaks = PEAKS.get(first_device().device_kind)
    if peaks is None:
        return unavailable(what, f"the memory bandwidth of {first_device().device_kind} is unknown")
    shares = [100 * (weights + cache) / (x * peaks.memory_bandwidth) for x in seconds]
    beside = f"of the data sheet's, for {weights / 1e6:,.0f} MB of weights and {cache / 1e6:,.0f} of cache"
    return Row(what=what, values=shares, unit="%", beside=beside, target="70 %", ok=statistics.median(shares) >= 70)
