"""Run `jax.jit` over a mesh of devices, data x fsdp x tensor. The compiler inserts the collectives.

Sequences are not sharded: no sharding rule produces ring attention (arXiv:2310.01889).
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.errors import UserError
from jaxgpt.experiment import ParallelConfig
from jaxgpt.layers.block import ShardingHooks
from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, AttentionFn
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.strategy import StepFn, Strategy
from jaxgpt.train import Params, TrainState

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_SPEC = P(("data", "fsdp"))  # rows of a batch: all devices of a tensor group read the same rows
BOTH_SPEC = P(("tensor", "fsdp"))  # a vector over all heads or hidden units
QK_NORM = r"(attn|cross)/[qk]_norm/scale"

# The mesh axes of each parameter, by the end of its path. Each matches exactly one entry (tested).
# fsdp shards each matrix along D, and the matrix is gathered when its layer runs (ZeRO, arXiv:1910.02054).
# tensor shards the computation: each device has some of the heads, hidden units and vocabulary, and only sums over
# them are all-reduced (Megatron, arXiv:1909.08053).
PARAMETER_SPECS = {
    r"wte/embedding": P("tensor", "fsdp"),
    r"wpe/embedding": P(None, "fsdp"),
    r"lm_head/kernel": P("fsdp", "tensor"),
    r"((attn|cross)/[qkv]|mlp/c_(fc|gate))/kernel": P("fsdp", "tensor"),
    r"((attn|cross)/[qkv]|mlp/c_(fc|gate))/bias": BOTH_SPEC,
    r"(attn|cross|mlp)/c_proj/kernel": P("tensor", "fsdp"),
    r"c_proj/bias|(encoder_)?ln_\w+/(scale|bias)": P("fsdp"),
    QK_NORM: P(None),  # [H], but for a norm over all heads: BOTH_SPEC
}

# XLA for GPUs combines the gathers of a layer up to 30 MB, and its first product waits for all of it. Up to 4 MiB, later
# gathers overlap the first products: of GPT-2 124M with fsdp=8 on H200, 4.8 of 4.8 ms can be hidden instead of 3.4.
GPU_OPTIONS = {"xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20}


def make_mesh(devices: Sequence[jax.Device], config: ParallelConfig, model: GPTConfig) -> Strategy:
    """Return the strategy that runs one program over a mesh, by `jax.jit`, with sharded arrays.

    Only the axis `data` extends over several slices. Raises `UserError` if the sizes in `config` or of `model` do not fit.
    """
    sizes = divide_devices(len(devices), config)
    # Splitting an axis lets tensor=4 on an 8x8x8 torus take half of a ring.
    arrange = functools.partial(mesh_utils.create_device_mesh, allow_split_physical_axes=True)
    in_slice = (sizes["data"] // config.slices, sizes["fsdp"], sizes["tensor"])
    grid = np.concatenate([arrange(in_slice, members) for members in split_slices(devices, config.slices)])
    check_divisible(model, sizes)
    # Auto: the compiler propagates shardings. JAX's default is Explicit, which linen does not support.
    mesh = Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    batches, replicated = NamedSharding(mesh, BATCH_SPEC), NamedSharding(mesh, P())

    def jit_train_step(step: StepFn, shardings: TrainState, accumulates: bool) -> StepFn:
        # Each part of the axis `data` adds up the gradients of its own micro-batches first: otherwise the compiler
        # all-reduces the gradients of every layer and micro-batch.
        if accumulates and sizes["data"] > 1:
            own = functools.partial(step, mean=lambda sums: jax.lax.pmean(sums, "data"))
            step = _map(own, mesh, {"data"}, in_specs=(P(), P("data"), P()), out_specs=P())
        options = GPU_OPTIONS if devices[0].platform == "gpu" else None
        return jax.jit(step, donate_argnums=0, out_shardings=(shardings, replicated), compiler_options=options)

    def local_rows(B: int) -> np.ndarray:
        parts = batches.addressable_devices_indices_map((B, 1)).values()
        return np.unique(np.concatenate([np.arange(B)[part[0]] for part in parts if part is not None]))

    over = f" over {config.slices} slices" if config.slices > 1 else ""
    return Strategy(
        name=f"mesh of {_format_sizes(sizes)}{over}",
        devices=tuple(mesh.devices.flat),
        data_parallel_size=sizes["data"] * sizes["fsdp"],
        sharding_hooks=_sharding_hooks(mesh),
        shard_attention=functools.partial(_shard_attention, mesh),
        state_shardings=functools.partial(_state_shardings, mesh),
        jit_train_step=jit_train_step,
        jit_eval_step=functools.partial(jax.jit, out_shardings=replicated),
        abstract_tokens=lambda B, T: jax.ShapeDtypeStruct((B, T), np.int32, sharding=batches),
        local_rows=local_rows,
        shard_batch=lambda batch: jax.tree.map(lambda x: jax.make_array_from_process_local_data(batches, x), batch),
    )


def divide_devices(count: int, config: ParallelConfig) -> dict[str, int]:
    """Return the size of each axis of a mesh of `count` devices. Raises `UserError` if they do not fit."""
    sizes = {"data": config.data, "fsdp": config.fsdp, "tensor": config.tensor}
    known = math.prod(sizes.values())  # negative: one of them is -1
    rest, left_over = divmod(count, abs(known))
    if left_over or (known > 0 and rest > 1):
        said = f"parallel {_format_sizes(sizes)} does not make the {count} devices there are"
        raise UserError(f"{said}: one may be -1, for the rest. Or take --parallel.strategy auto")
    sizes = {axis: rest if n == -1 else n for axis, n in sizes.items()}
    if sizes["data"] % config.slices:
        raise UserError(f"parallel.slices={config.slices} does not divide parallel.data={sizes['data']}")
    return sizes


def _format_sizes(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={n}" for axis, n in sizes.items())


def check_divisible(model: GPTConfig, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` unless the axes of every matrix divide over their devices."""
    checks = {
        ("n_embd", "fsdp"): model.n_embd,
        ("n_head", "tensor"): model.n_head,
        ("n_kv_head", "tensor"): model.shape.n_kv_head,
        ("mlp_dim", "tensor"): model.shape.mlp_dim,
        ("vocab_size", "tensor"): model.vocab_size or 0,
    }
    for (field, axis), size in checks.items():
        n = sizes[axis]
        if size % n:
            raise UserError(f"model.{field}={size} does not divide over parallel.{axis}={n}: take a multiple of {n}")


def _slice_index(device: jax.Device) -> int | None:
    """Return the index of a TPU's slice, which the compiler's description of a single slice does not have."""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else None


def count_slices(devices: Sequence[jax.Device]) -> int:
    """Return the number of TPU slices that devices belong to, 1 for other devices, which do not state a slice."""
    return len(set(map(_slice_index, devices)))


def split_slices(devices: Sequence[jax.Device], slices: int) -> list[list[jax.Device]]:
    """Return the devices of each slice. Inside a slice the network is fast, and between slices slow (TPU: DCN).

    TPUs state their slice. Raises `UserError` if there is another number of them. Elsewhere, a slice is a block of
    consecutive devices, which `jax.devices()` sorts by process: 4 hosts of 8 GPUs are 4 slices of a host each, or 2 of
    two. `jax.experimental.mesh_utils` would take each process as a slice, but SLURM starts one process per GPU.
    """
    if _slice_index(devices[0]) is None:
        size = len(devices) // slices
        return [list(devices[start : start + size]) for start in range(0, len(devices), size)]
    indices = sorted({_slice_index(d) or 0 for d in devices})
    if len(indices) != slices:
        raise UserError(f"parallel.slices={slices}, but these TPUs are of {len(indices)}")
    return [[d for d in devices if _slice_index(d) == index] for index in indices]


def _map(function: Callable, mesh: Mesh | AbstractMesh, axes: set[str], *, in_specs: Any, out_specs: P) -> Callable:
    """Return a function of each device's own arrays along `axes`. The compiler shards over the other axes."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,  # neither Pallas kernels nor all_gather say over which axes their results vary
    )


def _free_axes(mesh: Mesh) -> tuple[Mesh | AbstractMesh, tuple[str, ...]]:
    """Return the mesh and its axes over which rows are still to be sharded: inside a map, those that are left."""
    current = jax.sharding.get_abstract_mesh()
    rows = tuple(axis for axis in BATCH_SPEC[0] if axis not in current.manual_axes)
    return current if current.manual_axes else mesh, rows


def _shard_attention(mesh: Mesh, attention_fn: AttentionFn) -> AttentionFn:
    """Return the kernel under `shard_map`, since jit cannot shard it: each device takes its own rows and heads."""

    def sharded_attention(q_BTNH, k_BSKH, v_BSKH, scores=DEFAULT_SCORES, *, segments_BT=None, key=None):
        def attend(q_BTNH, k_BSKH, v_BSKH, key, segments_BT):
            if key is not None:
                key = jax.random.fold_in(key, jax.lax.axis_index(MESH_AXES))
            return attention_fn(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT, key=key)

        free, rows = _free_axes(mesh)
        heads = P(rows, None, "tensor", None)
        in_specs = (heads, heads, heads, P(), P(rows))
        mapped = _map(attend, free, {*rows, "tensor"}, in_specs=in_specs, out_specs=heads)
        return mapped(q_BTNH, k_BSKH, v_BSKH, key, segments_BT)

    return sharded_attention


def find_spec(names: tuple[str, ...], ndim: int, config: GPTConfig) -> P | None:
    """Return the mesh axes of a parameter, None if `PARAMETER_SPECS` does not have its name and rank.

    Adapters, but for their rank, and the scales of rounded matrices follow their kernel.
    """
    kernel = re.sub("(lora_[ab]|kernel_scale)$", "kernel", "/".join(names))
    specs = PARAMETER_SPECS | ({QK_NORM: BOTH_SPEC} if config.qk_norm_over == "heads" else {})
    found = [spec for end, spec in specs.items() if re.fullmatch(f"(.*/)?({end})", kernel)]
    if not found:
        return None
    [spec] = found
    if names[-1] == "lora_a":
        spec = P(spec[0], None)
    elif names[-1] == "lora_b":
        spec = P(None, spec[1])
    elif names[-1] == "kernel_scale" and ndim - (names[0] == "h") == 1:  # int4 has scales with the kernel's axes
        spec = P(spec[1])
    stacked = ndim - len(spec)  # scan_layers stacks blocks, and all devices run the same one at a time
    return P(*[None] * stacked, *spec) if stacked >= 0 else None


def _shard_params(mesh: Mesh, params: Params | None, config: GPTConfig) -> Any:
    """Return the sharding of each parameter, by `find_spec` or else by the configuration."""

    def shard(path: tuple, x: Any) -> NamedSharding:
        names = tuple(entry.key for entry in path)
        spec = find_spec(names, x.ndim, config)
        if spec is None or not _divides(mesh, spec, x.shape):
            spec = P(*config.shard_parameter(names, x.shape, fsdp=mesh.shape["fsdp"]))
            if not _divides(mesh, spec, x.shape):
                raise UserError(f"shard_parameter: {tuple(spec)} does not divide {'/'.join(names)}, {x.shape}")
        return NamedSharding(mesh, spec)

    return jax.tree.map_with_path(shard, params)


def _divides(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> bool:
    """Return whether a shape has the axes of a spec, and each is divisible over its devices."""
    try:
        NamedSharding(mesh, spec).shard_shape(shape)
    except ValueError:
        return False
    return True


def _state_shardings(
    mesh: Mesh, state: TrainState, config: GPTConfig, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the shardings of a state. What the optimiser keeps is sharded like its parameter if it has that shape."""
    params, frozen_params = (_shard_params(mesh, x, config) for x in (state.params, state.frozen_params))
    replicated = NamedSharding(mesh, P())

    def follow(kept: Any, params: Any, shardings: Any) -> Any:  # any number of arrays is kept for each parameter
        if isinstance(kept, dict) and isinstance(params, dict):
            return {name: follow(kept[name], params[name], shardings[name]) for name in kept}
        return jax.tree.map(lambda x: shardings if x.shape == params.shape else replicated, kept)

    opt_state = optax.tree.map_params(
        optimizer.init,
        follow,
        state.opt_state,
        state.params,
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda _: True,  # `follow` takes the trees as a whole
    )
    counters: Any = dict.fromkeys(("step", "skipped", "skipped_in_a_row"), replicated)
    return TrainState(params=params, opt_state=opt_state, frozen_params=frozen_params, **counters)


def _sharding_hooks(mesh: Mesh) -> ShardingHooks:
    """Return hooks that keep activations sharded by rows, like the batch: the compiler might shard them by D."""

    def constrain(x_BTD: jax.Array) -> jax.Array:
        free, rows = _free_axes(mesh)
        return jax.lax.with_sharding_constraint(x_BTD, NamedSharding(free, P(rows)))

    def embed(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """Look up each device's tokens in its part of the vocabulary. The compiler would embed the full batch on each."""

        def embed_locally(table_VD, tokens_BT):
            table_VD = jax.lax.all_gather(table_VD, "fsdp", axis=1, tiled=True)
            index_BT = tokens_BT - jax.lax.axis_index("tensor") * len(table_VD)
            here_BT = (index_BT >= 0) & (index_BT < len(table_VD))
            x_BTD = jnp.take(table_VD, jnp.where(here_BT, index_BT, 0), axis=0)
            return jax.lax.psum(jnp.where(here_BT[..., None], x_BTD, 0.0), "tensor")

        free, rows = _free_axes(mesh)
        in_specs = (P("tensor", "fsdp"), P(rows))
        mapped = _map(embed_locally, free, {*rows, "tensor"}, in_specs=in_specs, out_specs=P(rows))
        return mapped(table_VD, tokens_BT)

    def reduce_loss(function: Callable) -> Callable:
        """Return `function` for sharded rows: each device gathers the parameters once and sums over its own rows first.

        Otherwise the compiler, which shards the vocabulary over `tensor`, all-reduces their gradient for every chunk.
        """

        def reduce(params, *arrays):
            free, rows = _free_axes(mesh)
            specs = {name: P("fsdp") if name == "lm_head" else P(None, "fsdp") for name in params}  # fsdp: axis D

            def reduce_locally(params, *arrays):
                for name, spec in specs.items():
                    axis = len(spec) - 1
                    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=axis, tiled=True)
                    params = params | {name: jax.tree.map(gather, params[name])}
                return jax.lax.psum(function(params, *arrays), rows)

            in_specs = (specs, *[P(rows)] * len(arrays))
            return _map(reduce_locally, free, {*rows}, in_specs=in_specs, out_specs=P())(params, *arrays)

        return reduce

    return ShardingHooks(constrain=constrain, embed=embed, reduce_loss=reduce_loss)
