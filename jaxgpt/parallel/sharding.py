"""Shardings on a mesh: one table maps parameters to logical axes, another maps logical axes to mesh axes."""

import re
from typing import Any

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import nearest_multiples
from jaxgpt.errors import UserError
from jaxgpt.train import Params, TrainState

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_SPEC = PartitionSpec(("data", "fsdp"))  # rows of a batch; all devices of a tensor group read the same rows

# Logical axes of each parameter, by the end of its path. Each parameter matches exactly one entry, which a test checks.
PARAMETER_AXES: dict[str, tuple[str | None, ...]] = {
    r"wte/embedding": ("vocab", "embed"),
    r"wpe/embedding": (None, "embed"),
    r"lm_head/kernel": ("embed", "vocab"),
    r"(attn|cross)/[qkv]/kernel": ("embed", "heads"),
    r"(attn|cross)/[qkv]/bias": ("heads_bias",),
    r"(attn|cross)/c_proj/kernel": ("heads", "embed"),
    r"mlp/(c_fc|c_gate)/kernel": ("embed", "mlp"),
    r"mlp/(c_fc|c_gate)/bias": ("mlp_bias",),
    r"mlp/c_proj/kernel": ("mlp", "embed"),
    r"c_proj/bias": ("embed",),
    r"(encoder_)?ln_\w+/(scale|bias)": ("embed",),
    r"(attn|cross)/[qk]_norm/scale": (None,),  # [H]; for a norm over all heads: heads_bias
}

# Mesh axes of each logical axis.
# fsdp shards each matrix along D; the matrix is gathered when its layer runs (ZeRO, arXiv:1910.02054).
# tensor shards the computation: each device has some of the heads, hidden units and vocabulary, and only sums over
# them are all-reduced (Megatron, arXiv:1909.08053).
RULES = [
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("vocab", "tensor"),
    ("heads_bias", ("tensor", "fsdp")),
    ("mlp_bias", ("tensor", "fsdp")),
    ("layers", None),  # all devices run the same block at a time
]


def parameter_axes(params: Params, config: GPTConfig) -> dict[str, Any]:
    """Return a tree with the logical axes of each parameter as a PartitionSpec. The rank of adapters is not sharded."""
    rules = dict(PARAMETER_AXES)
    if config.qk_norm_over == "heads":
        rules[r"(attn|cross)/[qk]_norm/scale"] = ("heads_bias",)

    def find_axes(path: tuple, x: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        matrix = re.sub("(lora_[ab]|kernel_scale)$", "kernel", name)
        [axes] = [axes for rule, axes in rules.items() if re.fullmatch(f"(.*/)?{rule}", matrix)]
        if name != matrix:
            ends = {"lora_a": (axes[0], None), "lora_b": (None, axes[1]), "kernel_scale": (axes[1],)}
            axes = ends[name.rpartition("/")[2]]
        return PartitionSpec(*["layers"] * (x.ndim - len(axes)), *axes)  # scan_layers stacks the blocks

    return jax.tree.map_with_path(find_axes, params)


def state_shardings(
    state: TrainState, config: GPTConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Return a NamedSharding for each array of a state; the optimiser's arrays are sharded like their parameters.

    `state` holds shapes; `config` is the model's.
    """

    def shard(params: Params) -> Any:
        return nn.logical_to_mesh_sharding(parameter_axes(params, config), mesh, RULES)

    params = shard(state.params)
    frozen_params = None if state.frozen_params is None else shard(state.frozen_params)
    replicated = NamedSharding(mesh, PartitionSpec())
    inner_state = optax.tree.map_params(
        optimizer.init,
        lambda x, sharding: x if isinstance(x, optax.MaskedNode) else sharding,
        state.opt_state.inner_state,
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),  # a parameter that Muon leaves to AdamW, or AdamW to Muon
    )
    opt_state = jax.tree.map(lambda _: replicated, state.opt_state).replace(inner_state=inner_state)
    return TrainState(step=replicated, params=params, opt_state=opt_state, frozen_params=frozen_params)  # type: ignore[arg-type]


def check_divisible(config: GPTConfig, mesh: Mesh) -> None:
    """Raise `UserError` unless every logical axis divides over its devices: otherwise JAX replicates the array."""
    config = config.explicit()
    assert config.n_kv_head and config.head_dim and config.mlp_dim
    axes = {
        "model.n_embd": (config.n_embd, "fsdp"),
        "model.n_head": (config.n_head, "tensor"),
        "model.n_kv_head": (config.n_kv_head, "tensor"),
        "model.mlp_dim": (config.mlp_dim, "tensor"),
        "model.vocab_size": (config.vocab_size or 0, "tensor"),
    }
    for field, (size, axis) in axes.items():
        n = mesh.shape[axis]
        if size % n:
            near = nearest_multiples(size, n)
            counts = [d for d in range(1, n + 1) if size % d == 0]
            raise UserError(
                f"{field}={size} does not divide over parallel.{axis}={n}: take {field}={near}, or {axis} from {counts}"
            )
    both = mesh.shape["fsdp"] * mesh.shape["tensor"]
    vectors = {}
    if config.qkv_bias or (config.qk_norm and config.qk_norm_over == "heads"):
        vectors["n_head x head size"] = config.n_head * config.head_dim
        vectors["n_kv_head x head size"] = config.n_kv_head * config.head_dim
    if config.bias:
        vectors["mlp_dim"] = config.mlp_dim
    for field, size in vectors.items():
        if size % both:
            raise UserError(
                f"a bias or scale of {field} = {size} elements does not divide over parallel.fsdp x tensor = {both}: "
                "take other sizes, or --model.no-bias"
            )


def mesh_shape(devices: int, data: int, fsdp: int, tensor: int, slices: int = 1) -> dict[str, int]:
    """Return the size of each axis, with -1 replaced by the number of devices that the other axes leave.

    Raises `UserError` unless the product of the sizes is the number of devices and the slices divide `data`.
    """
    sizes = dict(zip(MESH_AXES, (data, fsdp, tensor), strict=True))
    given = " x ".join(f"{name}={n}" for name, n in sizes.items())
    known = data * fsdp * tensor  # negative: one of them is -1
    rest, left_over = divmod(devices, abs(known))
    if left_over or (known > 0 and rest > 1):
        divisors = [d for d in range(1, devices + 1) if devices % d == 0]
        raise UserError(
            f"parallel {given} does not make the {devices} devices there are: each size must divide {devices} "
            f"({divisors}), and at most one may be -1 (the devices that the others leave)"
        )
    sizes = {name: rest if n == -1 else n for name, n in sizes.items()}
    if sizes["data"] % slices:
        raise UserError(
            f"parallel.slices={slices} does not divide parallel.data={sizes['data']}: take data from multiples of "
            f"{slices}, and fsdp and tensor that fit in one slice"
        )
    return sizes
