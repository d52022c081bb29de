"""How one training step runs on the devices: what every strategy offers, and the plain case of a single device."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

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

    name: str  # in words: "pmap over 8 devices"
    devices: tuple[jax.Device, ...]  # of all processes, in the order in which programs count them
    data_parallel_size: int = 1  # parts that a batch is cut into
    num_replicas: int | None = None  # programs side by side, each with its own rows and dropout key; None: one for all
    sharding_hooks: ShardingHooks = NO_SHARDING  # for `GPT.sharding`

    def shard_attention(self, attention_fn: AttentionFn) -> AttentionFn:
        """Return the kernel as this strategy runs it."""
        return attention_fn

    @abc.abstractmethod
    def abstract_state(self, init: InitFn, config: GPTConfig, optimizer: optax.GradientTransformation) -> TrainState:
        """Return the shapes and shardings of `init`'s state in the form in which checkpoints are read."""

    @abc.abstractmethod
    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        """Compile `init(key, params=None)`. Each array is created directly with its sharding.

        state: from `abstract_state`, as in the methods below.
        """

    @abc.abstractmethod
    def jit_train_step(self, step: StepFn, state: TrainState) -> StepFn:
        """Compile `step(state, batch, key)`. The result donates the old state's memory to the new one."""

    @abc.abstractmethod
    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step(params, batch)`. The result's sums are over all devices."""

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        """Compile state -> uint32 [copies, parts]: a checksum of what each of `devices` holds. None: there is one copy."""
        return None

    @abc.abstractmethod
    def abstract_batch(self, B: int, T: int) -> Batch:
        """Return the shapes and shardings of a training batch, to compile ahead of time."""

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
        """Take the first of `devices`. None: those of this process."""
        self.devices = ((devices or jax.local_devices())[0],)
        self._sharding = SingleDeviceSharding(self.devices[0])

    def abstract_state(self, init: InitFn, config: GPTConfig, optimizer: optax.GradientTransformation) -> TrainState:
        return with_shardings(eval_shape(init), self._sharding)

    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        return jax.jit(init, out_shardings=self._sharding)

    def jit_train_step(self, step: StepFn, state: TrainState) -> StepFn:
        return jax.jit(step, donate_argnums=0)

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        return jax.jit(step)

    def abstract_batch(self, B: int, T: int) -> Batch:
        return token_batch((B, T), self._sharding)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """How a global batch splits into devices, micro-batches and accumulation steps."""

    micro_batch_size: int  # sequences at once on a device
    grad_accum_steps: int  # micro-batches that each device takes one after the other
    data_parallel_size: int

    @property
    def sequences_at_once(self) -> int:
        """Count the sequences that all devices together compute at once."""
        return self.micro_batch_size * self.data_parallel_size


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
    return BatchSplit(micro_batch_size=micro, grad_accum_steps=part // micro, data_parallel_size=data_parallel_size)


def eval_shape(init: InitFn) -> TrainState:
    """Return the shapes of the state that `init` makes of a key alone."""
    return jax.eval_shape(init, jax.random.key(0))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return shapes with shardings: one for all, or a tree of them."""
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def token_batch(shape: tuple[int, ...], sharding: jax.sharding.Sharding | None = None) -> Batch:
    """Return the shape of a batch of tokens and targets, with nothing masked."""
    tokens = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
    return Batch(inputs_BT=tokens, targets_BT=tokens)
