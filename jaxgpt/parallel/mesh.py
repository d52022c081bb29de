"""jit over a mesh of devices: data x fsdp x tensor. The compiler inserts the exchanges that the placing asks for.

The context stays whole: to cut T as well, each device would need the keys and values of the others' tokens, in turn
(ring attention, arXiv:2310.01889), which no rule of placing gives.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.cluster.replicas import checksum
from jaxgpt.config import NO_LORA, LoraConfig, ParallelConfig
from jaxgpt.layers.block import Spread
from jaxgpt.model import GPT
from jaxgpt.parallel.sharding import BATCH, MESH_AXES, check_divisible, make_mesh, mesh_shape, state_shardings
from jaxgpt.parallel.strategy import Strategy, abstract_batch, initial, placed
from jaxgpt.train import TrainState


def mesh(
    model: GPT,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,
    *,
    config: ParallelConfig,
    lora: LoraConfig = NO_LORA,
) -> Strategy:
    """devices: None: all, those of other processes too. Raises `UserError` where sizes do not divide."""
    devices = jax.devices() if devices is None else devices
    sizes = mesh_shape(len(devices), config.data, config.fsdp, config.tensor)
    grid = make_mesh(list(devices), sizes)
    check_divisible(model.config, grid)
    rows = NamedSharding(grid, BATCH)
    whole = NamedSharding(grid, P())
    init, shapes = initial(model, optimizer, lora)
    places = state_shardings(shapes, model.config, optimizer, grid)

    def my_rows(B: int) -> np.ndarray:
        parts = rows.addressable_devices_indices_map((B, 1)).values()
        return np.unique(np.concatenate([np.arange(B)[part[0]] for part in parts if part is not None]))

    def sums(state: TrainState) -> jax.Array:
        part = jax.lax.all_gather(checksum(state), MESH_AXES[1:])
        return jax.lax.all_gather(part.reshape(-1), "data")

    def checksums(state: TrainState) -> jax.Array:
        specs = jax.tree.map(lambda place: place.spec, places)
        return jax.shard_map(sums, mesh=grid, in_specs=(specs,), out_specs=P(), check_vma=False)(state)

    return Strategy(
        name="mesh of " + " x ".join(f"{name}={n}" for name, n in sizes.items()),
        devices=tuple(grid.devices.flat),
        shards=sizes["data"] * sizes["fsdp"],
        init=jax.jit(init, out_shardings=places),
        state=placed(shapes, places),
        step=lambda step: jax.jit(step, donate_argnums=0, out_shardings=(places, whole)),
        evaluate=lambda step: jax.jit(step, out_shardings=whole),
        batch=lambda B, T: abstract_batch((B, T), rows),
        rows=my_rows,
        place=lambda batch: jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch),
        checksums=jax.jit(checksums) if sizes["data"] > 1 else None,
        spread=_spread(grid),
    )


def _spread(grid: jax.sharding.Mesh) -> Spread:
    """Rows stay where the batch put them, whole in width: left to itself the compiler may cut them along D.

    Attention runs on each device for its own rows and heads: no exchange is needed, and kernels cannot be cut by jit.
    """
    rows_heads = P(BATCH[0], None, "tensor", None)

    def rows(x_BTD: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x_BTD, NamedSharding(grid, BATCH))

    def attend(plain: Callable) -> Callable:
        def mine(q_BTNH, k_BSKH, v_BSKH, key, segments_BT):
            if key is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(MESH_AXES))
            return plain(q_BTNH, k_BSKH, v_BSKH, key=key, segments_BT=segments_BT)

        def everywhere(q_BTNH, k_BSKH, v_BSKH, *, key, segments_BT):
            local = jax.shard_map(
                mine,
                mesh=grid,
                in_specs=(rows_heads, rows_heads, rows_heads, P(), BATCH),
                out_specs=rows_heads,
                check_vma=False,  # Pallas kernels do not say how their results vary
            )
            return local(q_BTNH, k_BSKH, v_BSKH, key, segments_BT)

        return everywhere

    def lookup(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Each device gathers its tensor group's rows of the table and looks its own tokens up in them.

        Left to itself the compiler makes the vectors of the whole batch on every device.
        """

        def mine(table_VD, tokens_BT):
            table_VD = jax.lax.all_gather(table_VD, "fsdp", axis=1, tiled=True)
            index_BT = tokens_BT - jax.lax.axis_index("tensor") * len(table_VD)
            here_BT = (index_BT >= 0) & (index_BT < len(table_VD))
            x_BTD = jnp.take(table_VD, jnp.where(here_BT, index_BT, 0), axis=0)
            return jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0.0), "tensor")

        local = jax.shard_map(
            mine,
            mesh=grid,
            in_specs=(P("tensor", "fsdp"), BATCH),
            out_specs=BATCH,
            check_vma=False,  # all_gather's result counts as varying
        )
        return local(table_VD, tokens_BT)

    def sums(function: Callable) -> Callable:
        """Each device gathers the head once and adds up its own rows, before anything is exchanged.

        Left to itself the compiler exchanges the head's gradient for every chunk of the loss.
        """

        def mine(head, *arrays):
            gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
            whole = {name: jax.tree.map(functools.partial(gather, axis=_width(name)), x) for name, x in head.items()}
            return jax.lax.psum(function(whole, *arrays), BATCH[0])

        def everywhere(head, *arrays):
            by_width = {name: P("fsdp") if _width(name) == 0 else P(None, "fsdp") for name in head}
            local = jax.shard_map(
                mine,
                mesh=grid,
                in_specs=(by_width, *([BATCH] * len(arrays))),
                out_specs=P(),
                axis_names={"data", "fsdp"},  # the vocabulary over `tensor` is the compiler's
                check_vma=False,
            )
            return local(head, *arrays)

        return everywhere

    return Spread(rows=rows, attend=attend, lookup=lookup, sums=sums)


def _width(name: str) -> int:
    """Which axis of the matrix over the vocabulary is the model's width."""
    return 0 if name == "lm_head" else 1
