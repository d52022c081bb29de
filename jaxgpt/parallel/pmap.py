"""Data parallelism by `jax.pmap`: each device holds the whole model and reads its part of every batch.

pmap is in maintenance mode in JAX and works; all of it is in this file. The state has no axis of devices: it is one
array with a copy on each, so nothing else can tell it from that of a single device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxgpt.batch import Batch
from jaxgpt.cluster.multihost import one_copy, whole_everywhere
from jaxgpt.cluster.replicas import checksum
from jaxgpt.config import NO_LORA, LoraConfig
from jaxgpt.model import GPT
from jaxgpt.parallel.strategy import Strategy, abstract_batch, initial, placed

AXIS = "devices"


def pmap(
    model: GPT,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,
    *,
    lora: LoraConfig = NO_LORA,
) -> Strategy:
    """devices: None: all, those of other processes too."""
    init, shapes = initial(model, optimizer, lora)
    everywhere = jax.devices() if devices is None else list(devices)
    here = jax.local_devices() if devices is None else everywhere
    copies = NamedSharding(Mesh(np.asarray(here), AXIS), PartitionSpec())
    processes = len(everywhere) // len(here)

    def step(train_step: Callable) -> Callable:
        def on_each(state, batch, key):
            # A key of its own for each device: else all would drop the same units of their rows.
            key = jax.random.fold_in(key, jax.lax.axis_index(AXIS))
            return train_step(state, batch, key, mean=lambda sums: jax.lax.pmean(sums, AXIS))

        # The state is passed as a whole and comes back as a whole: `None` where pmap would want an axis of devices.
        return jax.pmap(on_each, AXIS, in_axes=(None, 0, None), out_axes=None, donate_argnums=0, devices=devices)

    def evaluate(eval_step: Callable) -> Callable:
        def on_each(params, batch):
            return jax.lax.psum(eval_step(params, batch), AXIS)

        return jax.pmap(on_each, AXIS, in_axes=(None, 0), out_axes=None, devices=devices)

    # pmap wants an argument with an axis of devices: a number for each.
    on_all = jax.pmap(
        lambda state, _: jax.lax.all_gather(checksum(state)[None], AXIS),
        AXIS,
        in_axes=(None, 0),
        out_axes=None,
        devices=devices,
    )

    def checksums(state: Any) -> jax.Array:
        return on_all(state, np.arange(len(here)))

    def rows(B: int) -> np.ndarray:
        part = B // processes
        return np.arange(B)[jax.process_index() * part :][:part]

    def place(batch: Batch) -> Batch:
        return jax.tree.map(lambda x: x.reshape(len(here), -1, *x.shape[1:]), batch)  # [P, B / P, T]

    # A replicated array is never saved: the first copy stands for all. With several processes, each of which holds
    # copies that the others cannot see, they save an array over all devices, and Orbax writes its first copy.
    saved_as = SingleDeviceSharding(here[0]) if processes == 1 else whole_everywhere()

    def to_checkpoint(state: Any) -> Any:
        return one_copy(state) if processes == 1 else jax.tree.map(lambda x: _same_copies(x, saved_as), state)

    def from_checkpoint(state: Any) -> Any:
        if processes == 1:
            return jax.device_put(state, copies)
        return jax.tree.map(lambda x: _same_copies(x, copies), state)

    return Strategy(
        name=f"pmap over {len(everywhere)} devices",
        devices=tuple(everywhere),
        shards=len(everywhere),
        programs=len(everywhere),
        init=jax.jit(init, out_shardings=copies),
        state=placed(shapes, saved_as),
        step=step,
        evaluate=evaluate,
        batch=lambda B, T: abstract_batch((len(here), B // len(everywhere), T)),
        rows=rows,
        place=place,
        to_checkpoint=to_checkpoint,
        from_checkpoint=from_checkpoint,
        checksums=checksums if len(everywhere) > 1 else None,
    )


def _same_copies(x: jax.Array, sharding: Sharding) -> jax.Array:
    """The copies that this process holds, seen as part of another replicated array; nothing is moved."""
    mine = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, mine)
