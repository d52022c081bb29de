"""`jax.jit` over a mesh of devices, data x fsdp x tensor. The compiler inserts the collectives that shardings need.

Sequences are not sharded: that would need ring attention (arXiv:2310.01889), in which devices pass keys and values
around. No sharding rule produces this.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.batch import Batch
from jaxgpt.config import GPTConfig
from jaxgpt.layers.hooks import ShardingHooks
from jaxgpt.layers.kernels.plain import AttentionFn
from jaxgpt.parallel.replicas import checksum
from jaxgpt.parallel.sharding import BATCH_SPEC, MESH_AXES, mesh_shape, state_shardings
from jaxgpt.parallel.slices import split_slices
from jaxgpt.parallel.strategy import EvalFn, StepFn, Strategy, shardings_of, with_shardings
from jaxgpt.train import TrainState

# XLA for GPUs combines the gathers of a layer's parameters into one of up to 30 MB, and the layer waits for all of it
# before its first product. Combined up to 4 MiB only, the gathers of later matrices run beside the first products: of
# GPT-2 124M with fsdp=8 on H200, 4.8 of 4.8 ms can be hidden instead of 3.4. Gathering a layer ahead, by XLA's pipelined
# collectives, hides no more, takes 107 GiB instead of 66 for a 7B model, and computes 1.67 times as much where layers are
# not scanned.
GPU_OPTIONS = {"xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20}


class MeshStrategy(Strategy):
    """Run one program over a mesh, by `jax.jit`, with arrays sharded by `sharding.RULES`."""

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        data: int = -1,
        fsdp: int = 1,
        tensor: int = 1,
        slices: int = 1,
    ):
        """Arrange devices in a mesh. At most one size is -1: the number of devices that the other axes leave.

        Args:
            devices: devices to use. None: the devices of all processes.
            data: size of the axis over which only the batch is sharded.
            fsdp: size of the axis over which the batch and the parameters are sharded.
            tensor: size of the axis over which heads, hidden units and vocabulary are sharded.
            slices: number of slices, see `split_slices`. Only the axis `data` extends over several of them.

        Raises:
            UserError: the product of the sizes is not the number of devices, or they belong to other slices.
        """
        devices = jax.devices() if devices is None else devices
        sizes = mesh_shape(len(devices), data, fsdp, tensor, slices)
        # Splitting an axis lets tensor=4 on an 8x8x8 torus take half of a ring.
        arrange = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
        in_slice = (sizes["data"] // slices, sizes["fsdp"], sizes["tensor"])
        grid = np.concatenate([arrange(in_slice, members) for members in split_slices(devices, slices)])
        # Auto: the compiler propagates shardings. JAX's default is Explicit, which linen does not support.
        self.mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
        self.devices = tuple(self.mesh.devices.flat)
        self.data_parallel_size = sizes["data"] * sizes["fsdp"]
        self.name = "mesh of " + " x ".join(f"{name}={n}" for name, n in sizes.items())
        self.name += f" over {slices} slices" if slices > 1 else ""
        self.sharding_hooks = _sharding_hooks(self.mesh)
        self._batch = NamedSharding(self.mesh, BATCH_SPEC)
        self._replicated = NamedSharding(self.mesh, P())

    def shard_attention(self, attention_fn: AttentionFn) -> AttentionFn:
        """Return the kernel under `shard_map`, since jit cannot shard it: each device takes its own rows and heads."""

        def sharded_attention(q_BTNH, k_BSKH, v_BSKH, *, segments_BT=None, key=None, **scores):
            mesh, rows = _free_axes(self.mesh)
            rows_heads = P(rows, None, "tensor", None)

            def attend(q_BTNH, k_BSKH, v_BSKH, key, segments_BT):
                if key is not None:
                    key = jax.random.fold_in(key, jax.lax.axis_index(MESH_AXES))
                return attention_fn(q_BTNH, k_BSKH, v_BSKH, segments_BT=segments_BT, key=key, **scores)

            attend_locally = jax.shard_map(
                attend,
                mesh=mesh,
                in_specs=(rows_heads, rows_heads, rows_heads, P(), P(rows)),
                out_specs=rows_heads,
                axis_names={*rows, "tensor"},
                check_vma=False,  # Pallas kernels do not declare over which axes their results vary
            )
            return attend_locally(q_BTNH, k_BSKH, v_BSKH, key, segments_BT)

        return sharded_attention

    def abstract_state(
        self, shapes: TrainState, config: GPTConfig, optimizer: optax.GradientTransformation
    ) -> TrainState:
        """Return the shapes of a state, with the shardings of `state_shardings`."""
        return with_shardings(shapes, state_shardings(shapes, config, optimizer, self.mesh))

    def jit_train_step(self, step: StepFn, state: TrainState, *, accumulates: bool = False) -> StepFn:
        """Compile `step` with sharded states and replicated metrics, and donate the state.

        With `accumulates`, each part of the axis `data` adds up the gradients of its own micro-batches first: otherwise
        the compiler all-reduces those of every layer and micro-batch.
        """
        if accumulates and self.mesh.shape["data"] > 1:
            step = jax.shard_map(
                functools.partial(step, mean=lambda sums: jax.lax.pmean(sums, "data")),
                mesh=self.mesh,
                in_specs=(P(), P("data"), P()),
                out_specs=P(),
                axis_names={"data"},
                check_vma=False,  # the compiler partitions the other axes
            )
        return jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings_of(state), self._replicated),
            compiler_options=GPU_OPTIONS if self.devices[0].platform == "gpu" else None,
        )

    def jit_eval_step(self, step: EvalFn) -> EvalFn:
        """Compile `step` with replicated sums."""
        return jax.jit(step, out_shardings=self._replicated)

    def jit_checksums(self, state: TrainState) -> Callable[[TrainState], jax.Array] | None:
        """Compile the checksums, uint32 [data, fsdp * tensor]; return None if the axis `data` has size 1."""
        if self.mesh.shape["data"] == 1:
            return None
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings_of(state))

        def gather_checksums(state: TrainState) -> jax.Array:
            part = jax.lax.all_gather(checksum(state), MESH_AXES[1:])
            return jax.lax.all_gather(part.reshape(-1), "data")

        return jax.jit(
            jax.shard_map(gather_checksums, mesh=self.mesh, in_specs=(specs,), out_specs=P(), check_vma=False)
        )

    def abstract_tokens(self, B: int, T: int) -> jax.ShapeDtypeStruct:
        """Return the shape and sharding of a training batch's tokens."""
        return jax.ShapeDtypeStruct((B, T), np.int32, sharding=self._batch)

    def local_rows(self, B: int) -> np.ndarray:
        """Return the sorted indices of the rows that this process's devices need."""
        parts = self._batch.addressable_devices_indices_map((B, 1)).values()
        return np.unique(np.concatenate([np.arange(B)[part[0]] for part in parts if part is not None]))

    def shard_batch(self, batch: Batch) -> Batch:
        """Return the global batch, sharded by rows over `data` and `fsdp`."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._batch, x), batch)


def _free_axes(mesh: Mesh) -> tuple[Mesh | AbstractMesh, tuple[str, ...]]:
    """Return the mesh and its axes over which rows are still to be sharded: inside a shard_map, those that are left."""
    current = jax.sharding.get_abstract_mesh()
    rows = tuple(axis for axis in BATCH_SPEC[0] if axis not in current.manual_axes)
    return current if current.manual_axes else mesh, rows


def _sharding_hooks(mesh: Mesh) -> ShardingHooks:
    """Return hooks that keep activations sharded by rows, like the batch: the compiler might shard them by D."""

    def constrain(x_BTD: jax.Array) -> jax.Array:
        free, rows = _free_axes(mesh)
        return jax.lax.with_sharding_constraint(x_BTD, NamedSharding(free, P(rows)))

    def embed(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Look up each device's tokens in its part of the vocabulary, gathered over fsdp, and sum over tensor.

        Without this hook, the compiler computes the embeddings of the full batch on every device.
        """

        def embed_locally(table_VD, tokens_BT):
            table_VD = jax.lax.all_gather(table_VD, "fsdp", axis=1, tiled=True)
            index_BT = tokens_BT - jax.lax.axis_index("tensor") * len(table_VD)
            here_BT = (index_BT >= 0) & (index_BT < len(table_VD))
            x_BTD = jnp.take(table_VD, jnp.where(here_BT, index_BT, 0), axis=0)
            return jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0.0), "tensor")

        free, rows = _free_axes(mesh)
        return jax.shard_map(
            embed_locally,
            mesh=free,
            in_specs=(P("tensor", "fsdp"), P(rows)),
            out_specs=P(rows),
            axis_names={*rows, "tensor"},
            check_vma=False,  # JAX assumes that the result of all_gather varies over fsdp
        )(table_VD, tokens_BT)

    def reduce_loss(function: Callable) -> Callable:
        """Return `function` for sharded rows: each device gathers the parameters once and sums over its own rows first.

        Without this hook, the compiler all-reduces the parameters' gradient for every chunk of the loss.
        """

        def reduce(params, *arrays):
            free, rows = _free_axes(mesh)

            def reduce_locally(params, *arrays):
                gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
                params = {
                    name: jax.tree.map(functools.partial(gather, axis=_width_axis(name)), x)
                    for name, x in params.items()
                }
                return jax.lax.psum(function(params, *arrays), rows)

            specs = {name: P("fsdp") if _width_axis(name) == 0 else P(None, "fsdp") for name in params}
            return jax.shard_map(
                reduce_locally,
                mesh=free,
                in_specs=(specs, *([P(rows)] * len(arrays))),
                out_specs=P(),
                axis_names={*rows},  # the compiler shards the vocabulary over `tensor`
                check_vma=False,
            )(params, *arrays)

        return reduce

    return ShardingHooks(constrain=constrain, embed=embed, reduce_loss=reduce_loss)


def _width_axis(name: str) -> int:
    """Return the axis of D in the embedding table or in `lm_head`."""
    return 0 if name == "lm_head" else 1
