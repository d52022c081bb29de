"""Capture what every layer computes while a model reads one text, with linen's `capture_intermediates` and `sow`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.layers.attention import WEIGHTS
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import unstack_layers

PREDICTIONS = 5  # most likely tokens that are kept for each position
LENS_PREDICTIONS = 3  # and for each position and layer
EXAMPLES = 4  # positions of a corpus that are kept for each unit of an MLP
WINDOWS_AT_ONCE = 8  # of a corpus


class Guess(NamedTuple):
    """The most likely next tokens at each position, and the log-probability of the true one."""

    tokens_TK: Any  # int32, the most likely first
    probabilities_TK: Any
    logprob_T: Any  # nats, of the next token of the text; nan at the last position


class Branch(NamedTuple):
    """The norms of what attention or an MLP adds to the residual stream."""

    name: str  # "h_0/attn", "h_0/cross", "h_0/mlp"
    added_T: Any  # Euclidean norm at each position
    stream_T: Any  # norm of the stream after the addition, and after the norm where that follows (post)


class Norm(NamedTuple):
    """One normalisation: the vector at each position before and after it."""

    name: str  # "h_0/ln_1"
    before_TD: Any
    after_TD: Any
    scale_D: Any  # gamma, as it multiplies
    bias_D: Any  # beta, or None


class Activations(NamedTuple):
    """What a model computes for one text of T tokens. Arrays are NumPy's, in float32."""

    guess: Guess
    logits_V: Any  # at the last position
    lens: list[Guess]  # L + 1: the logit lens after the embedding, after the first block, ...
    weights_LNTS: list[Any]  # attention weights of query T on key S
    cross_LNTS: list[Any]  # with an encoder: attention weights of query T on token S of the source
    encoder_LNSS: list[Any]  # with an encoder: attention weights among the tokens of the source
    hidden_LTF: list[Any]  # hidden units of the MLPs, after the activation
    start_T: Any  # norm of the stream that enters the first block
    branches: list[Branch]  # in the order of computation
    norms: list[Norm]  # in the order of computation


def capture_activations(
    model: GPT, params: dict, tokens: list[int], vocab_size: int | None = None, source: list[int] | None = None
) -> Activations:
    """Return all activations of one text.

    tokens: at most block_size ids. vocab_size: ids from there on are padding. source: the encoder's input, if any.
    """
    model, params = _unroll(model, params)
    source_S = None if source is None else jnp.asarray(source, jnp.int32)
    seen = _forward(model, params, jnp.asarray(tokens, jnp.int32), vocab_size, source_S)
    guess, logits_V, lens, inner, weights = jax.device_get(seen)
    c = model.config
    blocks = [inner[f"h_{i}"] for i in range(c.n_layer)]
    start_TD = inner["drop"]["__call__"][-1][0].astype(np.float32)
    branches, stream_TD = [], start_TD
    for i, block in enumerate(blocks):
        for branch, norm in (("attn", "ln_1"), ("cross", "ln_cross"), ("mlp", "ln_2")):
            if branch in block:
                added = {"output": norm, "sandwich": f"{norm}_out"}.get(c.norm_position, branch)
                added_TD = _output(block[added])
                stream_TD = _output(block[norm]) if c.norm_position == "post" else stream_TD + added_TD
                branches.append(Branch(f"h_{i}/{branch}", _length(added_TD), _length(stream_TD)))
    return Activations(
        guess=guess,
        logits_V=logits_V,
        lens=[Guess(*(x[layer] for x in lens)) for layer in range(c.n_layer + 1)],
        weights_LNTS=[_weights(weights[f"h_{i}"]["attn"]) for i in range(c.n_layer)],
        cross_LNTS=[_weights(weights[f"h_{i}"]["cross"]) for i in range(c.n_layer) if c.n_encoder_layer],
        encoder_LNSS=[_weights(weights[f"encoder_{i}"]["attn"]) for i in range(c.n_encoder_layer)],
        hidden_LTF=[block["mlp"]["hidden_BTF"][0][0].astype(np.float32) for block in blocks],
        start_T=_length(start_TD),
        branches=branches,
        norms=[
            _norm(model, f"{path}{name}", values, block_params[name])
            for path, block, block_params in [
                *((f"h_{i}/", block, params[f"h_{i}"]) for i, block in enumerate(blocks)),
                ("", inner, params),
            ]
            for name, values in block.items()
            if name.startswith("ln_")
        ],
    )


class TopExamples(NamedTuple):
    """The positions of a corpus at which each hidden unit of the MLPs is most active, at most one of each window."""

    windows_NT: np.ndarray  # token ids, each window read by itself
    values: list[Any]  # activations, for each layer [F, EXAMPLES]
    positions: list[Any]  # their indices into windows_NT.ravel(); -1 where there are fewer windows


def top_activating_examples(model: GPT, params: dict, windows_NT: np.ndarray) -> TopExamples:
    """Return the positions at which each hidden unit of the MLPs is most active."""
    model, params = _unroll(model, params)
    T = windows_NT.shape[1]
    shape = (model.config.explicit().mlp_dim, EXAMPLES)
    best: Any = [(jnp.full(shape, -jnp.inf), jnp.full(shape, -1)) for _ in range(model.config.n_layer)]
    for first in range(0, len(windows_NT), WINDOWS_AT_ONCE):
        count = min(WINDOWS_AT_ONCE, len(windows_NT) - first)
        windows_BT = np.zeros((WINDOWS_AT_ONCE, T), np.int32)  # one shape, so that one program is compiled
        windows_BT[:count] = windows_NT[first : first + count]
        best = _update_best(model, params, best, jnp.asarray(windows_BT), first, count)
    best = jax.device_get(best)
    return TopExamples(windows_NT, [values for values, _ in best], [positions for _, positions in best])


@functools.partial(jax.jit, static_argnums=0)
def _update_best(model: GPT, params: dict, best: Any, windows_BT: jax.Array, first: Any, count: Any) -> Any:
    """Merge the first `count` windows, of which the first has index `first`, into the best (values, positions)."""
    _, kept = model.apply({"params": params}, windows_BT, mutable=["intermediates"])
    inner: Any = kept["intermediates"]
    B, T = windows_BT.shape
    is_window_B1 = (jnp.arange(B) < count)[:, None]
    start_B1 = ((first + jnp.arange(B)) * T)[:, None]
    merged = []
    for layer, (values_FK, positions_FK) in enumerate(best):
        hidden_BTF = inner[f"h_{layer}"]["mlp"]["hidden_BTF"][0].astype(jnp.float32)
        top_BF = jnp.where(is_window_B1, hidden_BTF.max(axis=1), -jnp.inf)
        where_BF = jnp.argmax(hidden_BTF, axis=1) + start_B1
        values_FM = jnp.concatenate([values_FK, top_BF.T], axis=1)
        positions_FM = jnp.concatenate([positions_FK, where_BF.T.astype(positions_FK.dtype)], axis=1)
        values_FK, order_FK = jax.lax.top_k(values_FM, values_FK.shape[1])
        positions_FK = jnp.take_along_axis(positions_FM, order_FK, axis=1)
        merged.append((values_FK, jnp.where(jnp.isfinite(values_FK), positions_FK, -1)))
    return merged


def _unroll(model: GPT, params: dict) -> tuple[GPT, dict]:
    """Return the model without scan and remat, under which sown values would be lost."""
    model, params = unstack_layers(model, params)
    return model.clone(config=dataclasses.replace(model.config, remat="none")), params


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward(model: GPT, params: dict, tokens_T: jax.Array, vocab_size: int | None, source_S: jax.Array | None) -> Any:
    """Return (guess, logits_V at the last position, lens, intermediates, attention weights)."""

    def sow_inputs(call, args, kwargs, context):
        if isinstance(context.module, LayerNorm | RMSNorm) and context.method_name == "__call__":
            context.module.sow("intermediates", "input", args[0])
        return call(*args, **kwargs)

    source: Any = {} if source_S is None else {"source_BS": source_S[None]}
    with nn.intercept_methods(sow_inputs):
        logits_BTV, kept = model.apply(
            {"params": params},
            tokens_T[None],
            **source,
            capture_intermediates=True,
            mutable=["intermediates", WEIGHTS],
        )
    inner: Any = kept["intermediates"]

    def guess(logits_BTV: Any, most: int) -> Guess:
        logprobs_TV = jax.nn.log_softmax(logits_BTV[0, :, :vocab_size])
        top_TK, ids_TK = jax.lax.top_k(logprobs_TV, min(most, logprobs_TV.shape[1]))
        came_T = jnp.take_along_axis(logprobs_TV[:-1], tokens_T[1:, None], axis=1)[:, 0]
        return Guess(ids_TK, jnp.exp(top_TK), jnp.append(came_T, jnp.nan))

    def unembed(module: GPT, x_BTD: jax.Array) -> jax.Array:
        return module.unembed(x_BTD if model.config.norm_position == "post" else module.ln_f(x_BTD))

    streams = [inner["drop"]["__call__"][-1], *(inner[f"h_{i}"]["__call__"][0] for i in range(model.config.n_layer))]
    lens = jax.lax.map(  # sequentially: the logits of one layer in memory
        lambda x_BTD: guess(model.apply({"params": params}, x_BTD, method=unembed), LENS_PREDICTIONS),
        jnp.stack([_first(stream) for stream in streams]),
    )
    return guess(logits_BTV, PREDICTIONS), logits_BTV[0, -1, :vocab_size], lens, inner, kept[WEIGHTS]


def _weights(attention: Any) -> Any:
    """Return the sown weights of the only sequence, [N, T, S]."""
    return attention["weights_BTNS"][0][0].swapaxes(0, 1)


def _norm(model: GPT, name: str, values: Any, params: dict) -> Norm:
    offset = 1.0 if model.config.norm_offset else 0.0
    return Norm(
        name=name,
        before_TD=values["input"][0][0].astype(np.float32),
        after_TD=_output(values),
        scale_D=np.asarray(params["scale"], np.float32) + offset,
        bias_D=np.asarray(params["bias"], np.float32) if "bias" in params else None,
    )


def _first(out: Any) -> Any:
    """Return x_BTD of a module's output, x_BTD or (x_BTD, cache)."""
    return out[0] if isinstance(out, tuple) else out


def _output(values: Any) -> Any:
    """Return the output of a captured module, x_TD."""
    return _first(values["__call__"][0])[0].astype(np.float32)


def _length(x_TD: Any) -> Any:
    return np.linalg.norm(x_TD, axis=-1)
