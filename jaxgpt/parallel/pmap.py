"""Train data-parallel by `jax.pmap`: each device holds all parameters and processes its part of every batch.

JAX keeps pmap in maintenance mode, and only this file uses it. The state has no device axis, but replicated arrays.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxgpt.parallel.multihost import one_copy, whole_everywhere
from jaxgpt.parallel.strategy import EvalFn, StepFn, Strategy

AXIS = "devices"


def make_pmap(devices: Sequence[jax.Device] | None = None) -> Strategy:
    """Return the strategy that runs a copy of the program on each of `devices`, by default on all processes' devices."""
    of_all, local = tuple(devices or jax.devices()), list(devices or jax.local_devices())
    processes = len(of_all) // len(local)
    copies = NamedSharding(Mesh(np.asarray(local), AXIS), PartitionSpec())
    # One process saves its first device's copy. Several processes, which cannot address one another's copies, save an
    # array that is replicated over all devices, and Orbax writes its first copy.
    saved = SingleDeviceSharding(local[0]) if processes == 1 else whole_everywhere()
    # `in_axes` is None for the state, the parameters and the key: they have no device axis.
    pmap: Any = functools.partial(jax.pmap, axis_name=AXIS, out_axes=None, devices=devices)

    def jit_train_step(step: StepFn, _: Any, __: bool) -> StepFn:
        def on_each(state, batch, key):
            # Each device has its own key: otherwise all would drop the same units in their rows.
            key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
            return step(state, batch, key, mean=lambda sums: jax.lax.pmean(sums, AXIS))

        return pmap(on_each, in_axes=(None, 0, None), donate_argnums=0)

    def jit_eval_step(step: EvalFn) -> EvalFn:
        return pmap(lambda params, batch: jax.lax.psum(step(params, batch), AXIS), in_axes=(None, 0))

    def reshard(tree: Any, sharding: Sharding) -> Any:
        """Return replicated arrays with another sharding, made of this process's copies. Nothing is moved."""
        make = jax.make_array_from_single_device_arrays
        return jax.tree.map(lambda x: make(x.shape, sharding, [part.data for part in x.addressable_shards]), tree)

    return Strategy(
        name=f"pmap over {len(of_all)} devices",
        devices=of_all,
        data_parallel_size=len(of_all),
        num_replicas=len(of_all),
        state_shardings=lambda *_: copies,
        checkpoint_sharding=saved,
        jit_train_step=jit_train_step,
        jit_eval_step=jit_eval_step,
        abstract_tokens=lambda B, T: jax.ShapeDtypeStruct((len(local), B // len(of_all), T), np.int32),
        local_rows=lambda B: np.arange(B // processes) + jax.process_index() * (B // processes),
        shard_batch=lambda batch: jax.tree.map(lambda x: x.reshape(len(local), -1, *x.shape[1:]), batch),
        to_checkpoint=lambda state: one_copy(state) if processes == 1 else reshard(state, saved),
        from_checkpoint=lambda state: jax.device_put(state, copies) if processes == 1 else reshard(state, copies),
    )
