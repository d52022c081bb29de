"""Direct logit attribution: the parts of a model that wrote the difference of two logits.

Elhage et al. 2021, transformer-circuits.pub/2021/framework; Wang et al. 2022, arXiv:2211.00593, section 3.1.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import EMBEDDING
from jaxgpt.interventions.forward import run
from jaxgpt.interventions.model import EditedGPT, unroll
from jaxgpt.layers.block import Block
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import with_decode_matrices
from jaxgpt.train import Params


class Attribution(NamedTuple):
    """Contributions to the difference of two logits at the last position. Their sum is the difference."""

    embedding: jax.Array  # []: of token and position
    heads_LN: jax.Array
    biases_L: jax.Array  # of c_proj of attention
    mlps_L: jax.Array
    norm: jax.Array  # []: the bias of the last norm

    def total(self) -> jax.Array:
        """Return the difference of the logits."""
        return sum((x.sum() for x in self), jnp.zeros(()))


def logit_attribution(model: GPT, params: Params, tokens_T: Any, token: int, other: int) -> Attribution:
    """Return what each part adds to logit(token) - logit(other) at the last position.

    The stream is a sum of what the embedding, the heads and the MLPs write, and the last norm is linear in it once its
    standard deviation is fixed at that of the text. Effects by way of later parts are not in it: see `patch`.

    Args:
        model: decoder-only, with norm_position="pre" and without logit_softcap.
        params: its parameters.
        tokens_T: token ids.
        token: id of the token whose logit counts as positive.
        other: id of the token whose logit counts as negative.

    Raises:
        UserError: for a model whose logits are not such a sum, or tokens that it does not have.
    """
    model, params = unroll(model, params)
    c, layers = model.config, range(model.config.n_layer)
    if c.norm_position != "pre" or c.logit_softcap is not None:
        raise UserError(
            f"norm_position={c.norm_position!r}, logit_softcap={c.logit_softcap}: the logits are not a sum of what each "
            "part writes; needs 'pre' and None"
        )
    if not all(0 <= id < (c.vocab_size or 0) for id in (token, other)):
        raise UserError(f"tokens {token} and {other}: needs 0 to {(c.vocab_size or 0) - 1}")
    names = [EMBEDDING, *(f"h_{layer}/{place}" for layer in layers for place in ("heads", "mlp", "stream"))]
    read = run(model, params, np.asarray(tokens_T)[None], read=names).activations
    return _attribute(model, params, {name: x[:, -1:] for name, x in read.items()}, token, other)


@functools.partial(jax.jit, static_argnums=0)
@with_decode_matrices
def _attribute(
    model: EditedGPT, params: Params, read: dict[str, jax.Array], token: jax.Array, other: jax.Array
) -> Attribution:
    """Return the contributions, from the activations of the last token, [1, 1, ...]."""
    c, norm = model.config, params["ln_f"]

    def write(block: Block, heads_11NH: jax.Array) -> tuple[jax.Array, jax.Array]:
        eye_N1N1 = jnp.eye(c.n_head)[:, None, :, None]
        bias_D = block.attn.merge_heads(jnp.zeros_like(heads_11NH))[0, 0]
        return block.attn.merge_heads(eye_N1N1 * heads_11NH)[:, 0] - bias_D[None], bias_D

    def centre(x_XD: jax.Array) -> jax.Array:
        return x_XD - x_XD.mean(axis=-1, keepdims=True) if c.norm == "layernorm" else x_XD

    layers = [f"h_{layer}" for layer in range(c.n_layer)]
    blocks: Any = [c.make_block(layer, model.compute) for layer in range(c.n_layer)]
    written: Any = [
        block.apply({"params": params[name]}, read[f"{name}/heads"], method=write)
        for name, block in zip(layers, blocks, strict=True)
    ]
    heads_XD, biases_LD = jnp.concatenate([each[0] for each in written]), jnp.stack([each[1] for each in written])
    mlps_LD = jnp.concatenate([read[f"{name}/mlp"][0] for name in layers])
    parts_XD = jnp.concatenate([read[EMBEDDING][0], heads_XD, biases_LD, mlps_LD]).astype(jnp.float32)
    stream_1D = read[f"{layers[-1]}/stream"][0].astype(jnp.float32)
    deviation = jnp.sqrt(jnp.square(centre(stream_1D)).mean() + c.norm_eps)
    scale_D = norm["scale"] + 1.0 if c.norm_offset else norm["scale"]
    normed_XD = centre(parts_XD) / deviation * scale_D[None]
    bias_1D = norm["bias"][None] if "bias" in norm else jnp.zeros_like(stream_1D)
    logits_XV: Any = model.apply(
        {"params": params},
        jnp.concatenate([normed_XD, bias_1D])[None],
        method=lambda model, x_1XD: model.unembed(x_1XD)[0],
    )
    found_X = logits_XV[:, token] - logits_XV[:, other]
    embedding, heads_X, biases_L, mlps_L, bias = jnp.split(
        found_X, np.cumsum([1, c.n_layer * c.n_head, c.n_layer, c.n_layer])
    )
    return Attribution(embedding[0], heads_X.reshape(c.n_layer, -1), biases_L, mlps_L, bias[0])
