"""What every strategy offers the loop: the same functions, on other devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jaxgpt.batch import Batch
from jaxgpt.config import LoraConfig, ParallelConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.block import ON_ONE_DEVICE, Spread
from jaxgpt.model import GPT
from jaxgpt.train import TrainState, init_state


def unchanged(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """One training step on certain devices: three spellings of `train.train_step`, which a test holds equal.

    Batches are arrays of the host, [B, T], of which each process reads its own rows.
    """

    name: str  # in words: "pmap over 8 devices"
    devices: tuple[jax.Device, ...]  # that compute, over all processes, in the order in which programs count them
    shards: int  # parts that a batch is cut into
    # programs side by side, each with a part of the rows and a key of its own, folded from its number; None: one for all
    programs: int | None = None
    # key, and parameters to start from if not from random ones -> state, compiled; each array is made where it stays
    init: Callable[..., TrainState]
    state: TrainState  # shapes and places of a state as checkpoints are read
    step: Callable[[Callable], Any]  # `train_step(state, batch, key)`, compiled; the old state's memory is given on
    evaluate: Callable[[Callable], Any]  # `eval_step(params, batch)`, compiled
    batch: Callable[[int, int], Batch]  # (B, T) -> shapes and places of a training batch, to compile ahead of time
    rows: Callable[[int], np.ndarray] = np.arange  # B -> the rows of a batch that this process reads
    place: Callable[[Batch], Batch] = unchanged  # those rows -> what `step` and `evaluate` take
    # What checkpoints hold is the same for every strategy: each number once, without an axis of devices. Of a state, or
    # of parameters alone.
    to_checkpoint: Callable[[Any], Any] = unchanged
    from_checkpoint: Callable[[Any], Any] = unchanged
    # state -> uint32 [copies of it, parts of it], a checksum of what each of `devices` holds; None: there is one copy
    checksums: Callable[[TrainState], jax.Array] | None = None
    spread: Spread = ON_ONE_DEVICE  # for GPT.spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """How a batch is worked off: `micro` sequences at once on each of `shards`, `accumulation` times."""

    micro: int
    accumulation: int
    shards: int

    @property
    def rows(self) -> int:
        """Sequences at once, over all devices."""
        return self.micro * self.shards


def share(batch_size: int, shards: int, config: ParallelConfig) -> Share:
    """The largest micro-batches that divide a device's part of the batch and that the configuration allows."""
    if batch_size % shards:
        below = batch_size // shards * shards
        near = " or ".join(str(n) for n in (below, below + shards) if n)
        raise UserError(
            f"batch_size={batch_size} does not divide over {shards} devices: take --train.batch-size {near}, "
            "or fewer devices (--parallel.strategy single, or the axes of mesh)"
        )
    part = batch_size // shards
    limit = part if config.micro_batch_size is None else config.micro_batch_size
    micro = max(n for n in range(1, part + 1) if part % n == 0 and n <= limit)
    return Share(micro=micro, accumulation=part // micro, shards=shards)


def initial(model: GPT, optimizer: optax.GradientTransformation, lora: LoraConfig) -> tuple[Callable, TrainState]:
    """(`init_state` of this model, the shapes of its result)."""
    init = functools.partial(init_state, model, optimizer, lora=lora)
    return init, jax.eval_shape(init, jax.random.key(0))


def placed(shapes: Any, shardings: Any) -> Any:
    """Shapes with places; shardings: one for all, or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def abstract_batch(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None = None) -> Batch:
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    return Batch(inputs_BT=tokens, targets_BT=tokens)
