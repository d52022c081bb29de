"""How one training step runs on the devices: what every strategy offers, and the one of a single device."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxgpt.batch import Batch
from jaxgpt.config import GPTConfig, ParallelConfig
from jaxgpt.config.validate import nearest_multiples
from jaxgpt.errors import UserError
from jaxgpt.layers.hooks import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn
from jaxgpt.train import TrainState

InitFn = Callable[..., TrainState]  # (key, params to start from or None) -> the state of step 0
StepFn = Callable[..., tuple[TrainState, dict[str, Any]]]  # (state, batch, key) -> (state, metrics)
EvalFn = Callable[..., tuple[jax.Array, jax.Array]]  # (params, batch) -> (summed nats, number of targets)


class Strategy(abc.ABC):
    """Compile and feed `train.train_step` on certain devices. Every strategy computes the same step; a test holds them equal.

    A strategy knows devices. The model, the optimizer and the data come in as arguments.
    Host batches are NumPy arrays [B, T], of which each process reads the rows that its own devices need.
    """

    name: str  # "pmap over 8 devices"
    devices: tuple[jax.Device, ...]  # of all processes, in the order in which programs count them
    data_parallel_size: int = 1  # parts that a batch is cut into
    num_replicas: int | None = None  # programs side by side, each with its own rows and dropout key; None: one for all
    sharding_hooks: ShardingHooks = NO_SHARDING  # for `GPT.sharding`
    _checkpoint: Sharding  # of the arrays of a state, where all have the same, as checkpoints are read
    _batch: Sharding  # of the arrays of a batch, where that is one of the whole batch

    def shard_attention(self, attention_fn: AttentionFn) -> AttentionFn:
        """Return the kernel as this strategy runs it."""
        return attention_fn

    def abstract_state(
        self, shapes: TrainState, config: GPTConfig, optimizer: optax.GradientTransformation
    ) -> TrainState:
        """Return the shapes of a state with shardings, in the form in which checkpoints are read."""
        return with_shardings(shapes, self._checkpoint)

    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        """Compile `init(key, params=None)`. Each array is created directly with its sharding.

        state: from `abstract_state`, as in the methods below.
        """
        return jax.jit(init, out_shardings=shardings_of(state))

    @abc.abstractmethod
    def jit_train_step(self, step: StepFn, state: TrainState) -> StepFn:
        """Compile `step(state, batch, key)`. The result donates the old state's memory to the new one."""

    @abc.abstractmethod
    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step(params, batch)`. The result's sums are over all devices."""

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        """Compile state -> uint32 [copies, parts]: a checksum of what each of `devices` holds. None: there is one copy."""
        return None

    def abstract_tokens(self, B: int, T: int) -> jax.ShapeDtypeStruct:
        """Return the shape and sharding of a training batch's tokens, to compile ahead of time."""
        return jax.ShapeDtypeStruct((B, T), np.int32, sharding=self._batch)

    def local_rows(self, B: int) -> np.ndarray:
        """Return the indices of the rows, of a batch of B, that this process reads."""
        return np.arange(B)

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this process's rows as the compiled steps take them."""
        return batch

    def to_checkpoint(self, state: Any) -> Any:
        """Return a state, or parameters alone, as every strategy's checkpoints hold them: each value once."""
        return state

    def from_checkpoint(self, state: Any) -> Any:
        """Return what was read from a checkpoint, state or parameters alone, as the compiled steps take it."""
        return state


class SingleDevice(Strategy):
    """`jax.jit` on one device."""

    name = "one device"

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Take the first of `devices`. None: of this process's."""
        self.devices = ((devices or jax.local_devices())[0],)
        self._checkpoint = self._batch = SingleDeviceSharding(self.devices[0])

    def jit_train_step(self, step: StepFn, state: TrainState) -> StepFn:
        return jax.jit(step, donate_argnums=0)

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        return jax.jit(step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How each device's part of a global batch splits into micro-batches."""

    micro_batch_size: int  # sequences at once on a device
    grad_accum_steps: int  # micro-batches that each device takes one after the other


def split_batch(batch_size: int, data_parallel_size: int, config: ParallelConfig) -> BatchSplit:
    """Return the largest micro-batches that divide a device's part of the batch and that the configuration allows."""
    if batch_size % data_parallel_size:
        near = nearest_multiples(batch_size, data_parallel_size)
        raise UserError(
            f"batch_size={batch_size} does not divide over {data_parallel_size} devices: take --train.batch-size {near}, "
            "or fewer devices (--parallel.strategy single, or the axes of mesh)"
        )
    part = batch_size // data_parallel_size
    limit = part if config.micro_batch_size is None else config.micro_batch_size
    micro = max(n for n in range(1, part + 1) if part % n == 0 and n <= limit)
    return BatchSplit(micro_batch_size=micro, grad_accum_steps=part // micro)


def shardings_of(state: TrainState) -> TrainState:
    """Return the sharding of each array."""
    return jax.tree.map(lambda x: x.sharding, state)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return shapes with shardings: one for all, or a tree of them."""
    shardings = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
