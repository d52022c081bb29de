"""Define how the compiled steps run on a set of devices: the record of a strategy, and the one for one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxgpt.batch import Batch
from jaxgpt.errors import UserError
from jaxgpt.experiment import ParallelConfig
from jaxgpt.layers.block import NO_SHARDING, ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn
from jaxgpt.model import GPTConfig
from jaxgpt.train import TrainState

StepFn = Callable[..., tuple[TrainState, dict[str, Any]]]  # (state, batch, key) -> (state, metrics)
EvalFn = Callable[..., tuple[jax.Array, jax.Array]]  # (params, batch) -> (summed nats, number of targets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """The functions that compile `train.train_step` for a set of devices, and that shard its state and batches.

    All compute the same step (tested), and know only devices. Host batches are NumPy arrays [B, T], of which each process
    reads the rows for its own devices. What is not given is right for one device.
    """

    name: str  # as logged, such as "pmap over 8 devices"
    devices: tuple[jax.Device, ...]  # devices of all processes, in the order of a program
    data_parallel_size: int = 1  # number of parts that a batch is split into
    num_replicas: int | None = None  # programs, if each has its own rows and dropout key. None means one
    sharding_hooks: ShardingHooks = NO_SHARDING  # for `GPT.sharding`
    shard_attention: Callable[[AttentionFn], AttentionFn] = lambda kernel: kernel  # -> a kernel for these devices

    # (shapes of a state, the model's configuration, optimizer) -> the state's shardings: one for all arrays, or a tree
    state_shardings: Callable[[TrainState, GPTConfig, optax.GradientTransformation], Any]
    checkpoint_sharding: Sharding | None = None  # of checkpoints. None means as in the state

    # Compile (step, the state's shardings, does the step add up micro-batches without dropout). The old state is donated.
    jit_train_step: Callable[[StepFn, Any, bool], StepFn]
    jit_eval_step: Callable[[EvalFn], EvalFn]  # with sums over all devices
    # (B, T) -> the shape of a training batch's tokens, with their sharding if `shard_batch` shards them
    abstract_tokens: Callable[[int, int], jax.ShapeDtypeStruct] = lambda B, T: jax.ShapeDtypeStruct((B, T), np.int32)
    local_rows: Callable[[int], np.ndarray] = np.arange  # B -> the indices of the rows that this process reads
    shard_batch: Callable[[Batch], Batch] = lambda batch: batch  # this process's rows -> what the compiled steps take

    # A state, or only parameters, from the form that the compiled steps take to the form of all checkpoints, which is one
    # copy, and back.
    to_checkpoint: Callable[[Any], Any] = lambda state: state
    from_checkpoint: Callable[[Any], Any] = lambda state: state


def make_single(devices: Sequence[jax.Device] | None = None) -> Strategy:
    """Return the strategy that runs the step by `jax.jit` on the first of `devices`, by default the ones of this process."""
    device = (devices or jax.local_devices())[0]
    return Strategy(
        name="one device",
        devices=(device,),
        state_shardings=lambda *_: SingleDeviceSharding(device),
        jit_train_step=lambda step, _, __: jax.jit(step, donate_argnums=0),
        jit_eval_step=jax.jit,
    )


class BatchSplit(NamedTuple):
    """The split of each device's part of a global batch into micro-batches."""

    micro_batch_size: int  # sequences that a device processes at once
    grad_accum_steps: int  # micro-batches that each device processes in turn


def split_batch(batch_size: int, data_parallel_size: int, config: ParallelConfig) -> BatchSplit:
    """Split a batch into the largest micro-batches that fit. Raises `UserError` if it does not divide over the devices."""
    if batch_size % data_parallel_size:
        said = f"batch_size={batch_size} does not divide over {data_parallel_size} devices"
        raise UserError(f"{said}: take a multiple, or fewer devices (--parallel.strategy single)")
    part = batch_size // data_parallel_size
    limit = min(part, config.micro_batch_size or part)
    micro = max(n for n in range(1, limit + 1) if part % n == 0)
    return BatchSplit(micro_batch_size=micro, grad_accum_steps=part // micro)


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Return shapes with the given shardings: one for all arrays, or a tree of them."""
    shardings = jax.tree.broadcast(shardings, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
