"""Strategies: how one training step runs on the devices. Here are the base class and the strategy for one device."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
from jaxgpt.train import Params, TrainState

InitFn = Callable[..., TrainState]  # (key, params to start from or None) -> the state of step 0
StepFn = Callable[..., tuple[TrainState, dict[str, Any]]]  # (state, batch, key) -> (state, metrics)
EvalFn = Callable[..., tuple[jax.Array, jax.Array]]  # (params, batch) -> (summed nats, number of targets)
Tree = TypeVar("Tree", bound=TrainState | Params)


class Strategy(abc.ABC):
    """Compile `train.train_step` for a set of devices, and shard its batches.

    All strategies compute the same step, which a test checks. A strategy knows only devices: the model, the optimiser
    and the data are arguments. Host batches are NumPy arrays [B, T]; each process reads the rows for its own devices.
    """

    name: str  # as logged, such as "pmap over 8 devices"
    devices: tuple[jax.Device, ...]  # of all processes, in the order of the devices in a program
    data_parallel_size: int = 1  # number of parts that a batch is split into
    num_replicas: int | None = None  # programs, if each has its own rows and dropout key; None: one
    sharding_hooks: ShardingHooks = NO_SHARDING  # for `GPT.sharding`
    _checkpoint: Sharding  # for restoring checkpoints, if all arrays of the state share it

    def shard_attention(self, attention_fn: AttentionFn) -> AttentionFn:
        """Return an attention kernel that runs on this strategy's devices."""
        return attention_fn

    def abstract_state(
        self, shapes: TrainState, config: GPTConfig, optimizer: optax.GradientTransformation
    ) -> TrainState:
        """Return the shapes of a state, with the shardings to restore checkpoints with."""
        return with_shardings(shapes, self._checkpoint)

    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        """Compile `init(key, params=None)`: each array is created directly with its sharding.

        Here and in the methods below, `state` is the result of `abstract_state`.
        """
        return jax.jit(init, out_shardings=shardings_of(state))

    @abc.abstractmethod
    def jit_train_step(self, step: StepFn, state: TrainState, *, accumulates: bool = False) -> StepFn:
        """Compile `step(state, batch, key)` and donate the old state: the new one reuses its memory.

        `accumulates` says that the step adds up gradients of micro-batches, without dropout.
        """

    @abc.abstractmethod
    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step(params, batch)` with sums over all devices."""

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        """Compile a function from a state to the checksums of its shards on `devices`, uint32 [copies, parts].

        Returns None if there is only one copy.
        """
        return None

    def abstract_tokens(self, B: int, T: int) -> jax.ShapeDtypeStruct:
        """Return the shape of a training batch's tokens, with their sharding if `shard_batch` shards them."""
        return jax.ShapeDtypeStruct((B, T), np.int32)

    def local_rows(self, B: int) -> np.ndarray:
        """Return the indices, in a batch of B rows, of the rows that this process reads."""
        return np.arange(B)

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this process's rows in the form that the compiled steps take."""
        return batch

    def to_checkpoint(self, state: Tree) -> Tree:
        """Return a state, or only parameters, in the form that checkpoints of all strategies have: one copy."""
        return state

    def from_checkpoint(self, state: Tree) -> Tree:
        """Return a restored state, or only parameters, in the form that the compiled steps take."""
        return state


class SingleDevice(Strategy):
    """Run the step on one device, by `jax.jit`."""

    name = "one device"

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Use the first of `devices`, by default of this process's devices."""
        self.devices = ((devices or jax.local_devices())[0],)
        self._checkpoint = SingleDeviceSharding(self.devices[0])

    def jit_train_step(self, step: StepFn, state: TrainState, *, accumulates: bool = False) -> StepFn:
        """Compile `step` and donate the state."""
        return jax.jit(step, donate_argnums=0)

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step`."""
        return jax.jit(step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """The split of each device's part of a global batch into micro-batches."""

    micro_batch_size: int  # sequences that a device processes at once
    grad_accum_steps: int  # micro-batches that each device processes in turn


def split_batch(batch_size: int, data_parallel_size: int, config: ParallelConfig) -> BatchSplit:
    """Split a batch into the largest micro-batches that the configuration allows and that divide each device's part.

    Raises `UserError` if the batch does not divide over the devices.
    """
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
    """Return the sharding of each array of a state."""
    return jax.tree.map(lambda x: x.sharding, state)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return shapes with the given shardings: one for all arrays, or a tree of them."""
    shardings = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
