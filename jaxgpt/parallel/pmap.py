"""Data parallelism by `jax.pmap`: each device holds all parameters and processes its part of every batch.

JAX keeps pmap in maintenance mode; it is used in this file only. The state has no device axis: its arrays are
replicated over the devices, so the rest of the code treats it like the state of a single device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxgpt.batch import Batch
from jaxgpt.parallel.multihost import one_copy, whole_everywhere
from jaxgpt.parallel.replicas import checksum
from jaxgpt.parallel.strategy import EvalFn, InitFn, StepFn, Strategy, Tree
from jaxgpt.train import TrainState

AXIS = "devices"


class PmapStrategy(Strategy):
    """Run one program on each device, with a copy of the state and its own rows, by `jax.pmap`."""

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Use all of `devices`, by default the devices of all processes."""
        self._given = devices
        self.devices = tuple(jax.devices() if devices is None else devices)
        self._local = jax.local_devices() if devices is None else list(devices)
        self._processes = len(self.devices) // len(self._local)
        self._copies = NamedSharding(Mesh(np.asarray(self._local), AXIS), PartitionSpec())
        # One process saves its first device's copy. Several processes, which cannot address one another's copies, save
        # an array that is replicated over all devices; Orbax writes its first copy.
        self._checkpoint = SingleDeviceSharding(self._local[0]) if self._processes == 1 else whole_everywhere()
        self.data_parallel_size = self.num_replicas = len(self.devices)
        self.name = f"pmap over {len(self.devices)} devices"

    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        """Compile `init`, replicating the state over this process's devices."""
        return jax.jit(init, out_shardings=self._copies)

    def jit_train_step(self, step: StepFn, state: TrainState, *, accumulates: bool = False) -> StepFn:
        """Compile `step` with means over the devices, and donate the state."""

        def on_each(state, batch, key):
            # Each device has its own key: otherwise all would drop the same units in their rows.
            key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
            return step(state, batch, key, mean=lambda sums: jax.lax.pmean(sums, AXIS))

        # None: the state and the key have no device axis.
        return self._pmap(on_each, in_axes=(None, 0, None), donate_argnums=0)

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step` with sums over the devices."""
        return self._pmap(lambda params, batch: jax.lax.psum(step(params, batch), AXIS), in_axes=(None, 0))

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        """Compile the checksum of each device's copy, uint32 [devices, 1]; return None for one device."""
        if len(self.devices) == 1:
            return None
        # pmap needs an argument with a device axis: here, the devices' indices.
        on_all = self._pmap(lambda state, _: jax.lax.all_gather(checksum(state)[None], AXIS), in_axes=(None, 0))
        return lambda state: on_all(state, np.arange(len(self._local)))

    def _pmap(self, function: Callable, **options: Any) -> Any:
        return jax.pmap(function, AXIS, out_axes=None, devices=self._given, **options)

    def abstract_tokens(self, B: int, T: int) -> jax.ShapeDtypeStruct:
        """Return the shape of this process's tokens, int32 [P, B / devices, T]."""
        return jax.ShapeDtypeStruct((len(self._local), B // len(self.devices), T), np.int32)

    def local_rows(self, B: int) -> np.ndarray:
        """Return the indices of this process's rows, which are consecutive."""
        part = B // self._processes
        return np.arange(B)[jax.process_index() * part :][:part]

    def shard_batch(self, batch: Batch) -> Batch:
        """Return this process's rows with a device axis, [P, rows / P, T]."""
        return jax.tree.map(lambda x: x.reshape(len(self._local), -1, *x.shape[1:]), batch)

    def to_checkpoint(self, state: Tree) -> Tree:
        """Return the first copy of each array; with several processes, an array replicated over all devices."""
        if self._processes == 1:
            return one_copy(state)
        return jax.tree.map(lambda x: _same_copies(x, self._checkpoint), state)

    def from_checkpoint(self, state: Tree) -> Tree:
        """Return the arrays replicated over this process's devices."""
        if self._processes == 1:
            return jax.device_put(state, self._copies)
        return jax.tree.map(lambda x: _same_copies(x, self._copies), state)


def _same_copies(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return a replicated array with another sharding, made of this process's copies; nothing is moved."""
    mine = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, mine)
