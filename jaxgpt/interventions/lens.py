"""Read predictions off each layer: the logit lens and the Jacobian lens."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import EMBEDDING
from jaxgpt.interventions.forward import check_tokens, run
from jaxgpt.interventions.model import ACTIVATIONS, EDITS, EditedGPT, unroll
from jaxgpt.model import GPT
from jaxgpt.train import Params

AT_ONCE = 8  # rows of the Jacobians computed in one batch


def logit_lens(model: GPT, params: Params, tokens_BT: Any, transport_LDD: jax.Array | None = None) -> jax.Array:
    """Return the logits predicted from the embedding and after each block, [L + 1, B, T, V].

    The logit lens applies the last norm and the output matrix to the stream of each layer (nostalgebraist 2020,
    "interpreting GPT: the logit lens"). With `transport_LDD` of `fit_jacobian_lens` each stream is first carried to
    the last layer: the Jacobian lens. The last entry is the model's own logits in both.
    """
    model, params = unroll(model, params)
    names = stream_names(model)
    found = run(model, params, tokens_BT, read=names)
    return _unembed_each(model, params, jnp.stack([found.activations[name] for name in names]), transport_LDD)


def fit_jacobian_lens(model: GPT, params: Params, tokens_BT: Any, *, skip_first: int = 0) -> jax.Array:
    """Return the mean Jacobian of the last stream with respect to the embedding and each block's stream, [L, D, D].

    Each is the effect of a token's stream on the last stream of the same and all later tokens, summed over those and
    averaged over tokens and rows: Gurnee et al. 2026, transformer-circuits.pub/2026/workspace. The last block, whose
    Jacobian is the identity, has no entry.

    Args:
        model: decoder-only.
        params: its parameters.
        tokens_BT: a sample of text; the cost is D backward passes.
        skip_first: positions at the start of each row to leave out, which often attend to nothing but themselves. The
            last position is left out as well, as in the paper.
    """
    model, params = unroll(model, params)
    tokens = check_tokens(model, tokens_BT)
    if not 0 <= skip_first < tokens.shape[1] - 1:
        raise UserError(f"skip_first={skip_first} of {tokens.shape[1]} tokens: needs 0 to {tokens.shape[1] - 2}")
    return _fit(model.clone(read=tuple(stream_names(model)[-1:])), params, tokens, skip_first)


def stream_names(model: GPT) -> list[str]:
    """Return the names of the residual streams, from the embedding to the last block's."""
    return [EMBEDDING, *(f"h_{layer}/stream" for layer in range(model.config.n_layer))]


@functools.partial(jax.jit, static_argnums=0)
def _unembed_each(model: EditedGPT, params: Params, streams_LBTD: jax.Array, transport_LDD: jax.Array | None) -> Any:
    if transport_LDD is not None:
        transported_LBTD = jnp.einsum("lbtd,led->lbte", streams_LBTD[:-1], transport_LDD)
        streams_LBTD = jnp.concatenate([transported_LBTD, streams_LBTD[-1:]])

    def unembed(module: EditedGPT, x_BTD: jax.Array) -> jax.Array:
        return module.unembed(module.norm_output(x_BTD))

    return jax.lax.map(lambda x_BTD: model.apply({"params": params}, x_BTD, method=unembed), streams_LBTD)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _fit(model: EditedGPT, params: Params, tokens_BT: jax.Array, skip_first: int) -> jax.Array:
    (B, T), D = tokens_BT.shape, model.config.n_embd
    *names, last = stream_names(model)
    valid_T = (jnp.arange(T) >= skip_first) & (jnp.arange(T) < T - 1)

    def last_stream(offsets_LTD: jax.Array) -> jax.Array:
        keep = jnp.ones((1, D))
        edits = {name: {"keep": keep, "add": offsets_TD} for name, offsets_TD in zip(names, offsets_LTD, strict=True)}
        result: Any = model.apply({"params": params | {EDITS: edits}}, tokens_BT, mutable=[ACTIVATIONS])
        return result[1][ACTIVATIONS][last]

    x_BTD, backward = jax.vjp(last_stream, jnp.zeros((len(names), T, D)))

    def row(d: jax.Array) -> jax.Array:
        one_D = jnp.arange(D) == d
        cotangent_BTD = jnp.broadcast_to((valid_T[:, None] & one_D[None])[None], x_BTD.shape).astype(x_BTD.dtype)
        (grad_LTD,) = backward(cotangent_BTD)
        return jnp.einsum("ltd,t->ld", grad_LTD, valid_T.astype(jnp.float32))

    rows_DLD = jax.lax.map(row, jnp.arange(D), batch_size=min(AT_ONCE, D))
    return rows_DLD.swapaxes(0, 1) / (B * valid_T.sum())
