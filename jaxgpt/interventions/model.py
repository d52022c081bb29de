"""A GPT whose activations are edited: the edits are arrays among its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import EMBEDDING, Edit, EditArrays, edit_arrays
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block
from jaxgpt.layers.linear import Dense
from jaxgpt.layers.mlp import MLP
from jaxgpt.layers.position import positions_from_segments
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.train import Params

if TYPE_CHECKING:
    from jaxgpt.layers.cache import KVCache

EDITS = "edits"  # in the parameters: `EditArrays`
ACTIVATIONS = "activations"  # the collection of activations that are read

# (module, method) -> the place of its result, or of the argument with this number.
RESULTS: dict[tuple[type[nn.Module], str], str] = {
    (GPT, "embed"): EMBEDDING,
    (Attention, "__call__"): "attention",
    (Attention, "decode"): "attention",
    (MLP, "__call__"): "mlp",
    (Block, "__call__"): "stream",
    (Block, "decode"): "stream",
}
ARGUMENTS: dict[tuple[type[nn.Module], str], tuple[str, int]] = {
    (Attention, "merge_heads"): ("heads", 0),
    (Block, "feed_forward"): ("middle", 1),
}


def edit(model: GPT, params: Params, edits: Sequence[Edit]) -> tuple[EditedGPT, Params]:
    """Return the model under edits, with its parameters: it is trained, sampled and scored as any other.

    They replace earlier edits of the model.

    Example:
        >>> model, params = edit(run.model, run.params, [zero("heads", 1, index=3), scale("mlp", 0, by=0.5)])
        >>> logits_BTV = model.apply({"params": params}, tokens_BT)

    Raises:
        UserError: for a place, layer, index, position or shape that the model does not have, or a model with an encoder.
    """
    model, params = unroll(model, params)
    return model, params | {EDITS: jax.tree.map(jnp.asarray, edit_arrays(model.config, edits))}


def unroll(model: GPT, params: Params) -> tuple[EditedGPT, Params]:
    """Return the model as an `EditedGPT` without edits, and without scan and remat, in which nothing can be edited."""
    if model.config.n_encoder_layer:
        raise UserError(f"n_encoder_layer={model.config.n_encoder_layer}: only decoder-only models can be edited")
    model, params = unstack_layers(model, params)
    config = dataclasses.replace(model.config, remat="none")
    return EditedGPT(config, model.dtype, model.attention_fn), {k: v for k, v in params.items() if k != EDITS}


class EditedGPT(GPT):
    """A GPT that applies the edits among its parameters, and keeps the activations named in `read`."""

    read: tuple[str, ...] = ()  # names of places, kept in the collection "activations"

    def hidden_states(self, tokens_BT: jax.Array, *, segments_BT: jax.Array | None = None, train: bool = False) -> Any:
        """Return the edited model's hidden states. Arguments: see `GPT.hidden_states`."""
        T = tokens_BT.shape[-1]
        positions_BT = jnp.arange(T)[None] if segments_BT is None else positions_from_segments(segments_BT)
        with nn.intercept_methods(self.editor(positions_BT)):
            return super().hidden_states(tokens_BT, segments_BT=segments_BT, train=train)

    def decode(self, tokens_BT: jax.Array, cache: KVCache, positions_BT: jax.Array) -> tuple[jax.Array, KVCache]:
        """Return the edited model's hidden states of new tokens. Arguments: see `GPT.decode`."""
        if patterns := [name for name in self.edit_arrays() if name.endswith("/pattern")]:
            raise UserError(f"{patterns[0]}: a pattern cannot be edited while text is generated; edit heads or values")
        with nn.intercept_methods(self.editor(positions_BT)):
            return super().decode(tokens_BT, cache, positions_BT)

    def edit_arrays(self) -> EditArrays:
        """Return the edits among the parameters."""
        return self.get_variable("params", EDITS) or {}

    @nn.nowrap
    def editor(self, positions_BT: jax.Array) -> Callable:
        """Return the interceptor of linen's methods that applies the edits to tokens at these positions."""
        arrays = self.edit_arrays()
        wanted = {*arrays, *self.read}

        def touch(name: str, x: Any) -> jax.Array:
            if (edits := arrays.get(name)) is not None:
                keep, added = (edits[part][jnp.minimum(positions_BT, len(edits[part]) - 1)] for part in ("keep", "add"))
                x = (keep * x.astype(jnp.float32) + added).astype(x.dtype)
            if name in self.read:
                self.sow(ACTIVATIONS, name, x, reduce_fn=lambda _, new: new, init_fn=lambda: None)
            return x

        def intercept(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
            module, method = context.module, context.method_name
            layer = f"{module.path[0]}/" if module.path else ""
            if isinstance(module, Attention) and method == "attend" and f"{layer}pattern" in wanted:
                args = (_kernel_with_pattern(args[1], lambda x: touch(f"{layer}pattern", x)), *args[1:])
            for (kind, of), (place, number) in ARGUMENTS.items():
                if isinstance(module, kind) and method == of:
                    args = (*args[:number], touch(layer + place, args[number]), *args[number + 1 :])
            if isinstance(module, Dense) and module.path[1:] == ("mlp", "c_proj") and method == "__call__":
                args = (touch(f"{layer}units", args[0]),)
            out = call(*args, **kwargs)
            if isinstance(module, Attention) and method == "project":
                return tuple(
                    touch(layer + place, x) for place, x in zip(("queries", "keys", "values"), out, strict=True)
                )
            for (kind, of), place in RESULTS.items():
                if isinstance(module, kind) and method == of:
                    x = out[0] if isinstance(out, tuple) else out
                    x = touch(layer + place, x)
                    out = (x, *out[1:]) if isinstance(out, tuple) else x
            return out

        return intercept


def _kernel_with_pattern(plain: Callable, touch: Callable[[jax.Array], jax.Array]) -> Callable:
    """Return a kernel that computes the attention weights by `plain`, passes them through `touch` and applies them."""

    def kernel(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **scores: Any) -> jax.Array:
        B, S, K, _ = k_BSKH.shape
        eye_BSKS = jnp.broadcast_to(jnp.eye(S)[None, :, None], (B, S, K, S))
        weights_BTNS = touch(plain(q_BTNH, k_BSKH, eye_BSKS, **scores))
        v_BSNH = jnp.repeat(v_BSKH, q_BTNH.shape[2] // K, axis=2)
        return jnp.einsum("btns,bsnh->btnh", weights_BTNS.astype(v_BSNH.dtype), v_BSNH)

    return kernel
