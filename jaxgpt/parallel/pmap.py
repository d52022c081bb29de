"""Data parallelism by `jax.pmap`: each device holds the whole model and reads its part of every batch.

pmap is in maintenance mode in JAX and works; all of it is in this file. The state has no axis of devices: it is one
array with a copy on each, so nothing else can tell it from that of a single device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxgpt.batch import Batch
from jaxgpt.cluster.multihost import one_copy, whole_everywhere
from jaxgpt.cluster.replicas import checksum
from jaxgpt.parallel.strategy import EvalFn, InitFn, StepFn, Strategy
from jaxgpt.train import TrainState

AXIS = "devices"


class PmapStrategy(Strategy):
    """`jax.pmap`: a program for each device, with a copy of the state and its own rows."""

    def __init__(self, devices: Sequence[jax.Device] | None = None):
        """Take all of `devices`. None: all there are, those of other processes too."""
        self._given = devices
        self.devices = tuple(jax.devices() if devices is None else devices)
        self._local = jax.local_devices() if devices is None else list(devices)
        self._processes = len(self.devices) // len(self._local)
        self._copies = NamedSharding(Mesh(np.asarray(self._local), AXIS), PartitionSpec())
        # A replicated array is never saved: the first copy stands for all. With several processes, each of which holds
        # copies that the others cannot see, they save an array over all devices, and Orbax writes its first copy.
        self._checkpoint = SingleDeviceSharding(self._local[0]) if self._processes == 1 else whole_everywhere()
        self.data_parallel_size = self.num_replicas = len(self.devices)
        self.name = f"pmap over {len(self.devices)} devices"

    def jit_init_state(self, init: InitFn, state: TrainState) -> InitFn:
        return jax.jit(init, out_shardings=self._copies)

    def jit_train_step(self, step: StepFn, state: TrainState) -> StepFn:
        def on_each(state, batch, key):
            # A key of its own for each device: else all would drop the same units of their rows.
            key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
            return step(state, batch, key, mean=lambda sums: jax.lax.pmean(sums, AXIS))

        # The state is passed as a whole and comes back as a whole: `None` where pmap would want an axis of devices.
        return self._pmap(on_each, in_axes=(None, 0, None), donate_argnums=0)

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        return self._pmap(lambda params, batch: jax.lax.psum(step(params, batch), AXIS), in_axes=(None, 0))

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        if len(self.devices) == 1:
            return None
        # pmap wants an argument with an axis of devices: a number for each.
        on_all = self._pmap(lambda state, _: jax.lax.all_gather(checksum(state)[None], AXIS), in_axes=(None, 0))
        return lambda state: on_all(state, np.arange(len(self._local)))

    def _pmap(self, function: Callable, **options: Any) -> Any:
        return jax.pmap(function, AXIS, out_axes=None, devices=self._given, **options)

    def abstract_tokens(self, B: int, T: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(self._local), B // len(self.devices), T), np.int32)

    def local_rows(self, B: int) -> np.ndarray:
        part = B // self._processes
        return np.arange(B)[jax.process_index() * part :][:part]

    def shard_batch(self, batch: Batch) -> Batch:
        return jax.tree.map(lambda x: x.reshape(len(self._local), -1, *x.shape[1:]), batch)  # [P, B / P, T]

    def to_checkpoint(self, state: Any) -> Any:
        if self._processes == 1:
            return one_copy(state)
        return jax.tree.map(lambda x: _same_copies(x, self._checkpoint), state)

    def from_checkpoint(self, state: Any) -> Any:
        if self._processes == 1:
            return jax.device_put(state, self._copies)
        return jax.tree.map(lambda x: _same_copies(x, self._copies), state)


def _same_copies(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return the copies that this process holds as part of another replicated array; nothing is moved."""
    mine = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, mine)
