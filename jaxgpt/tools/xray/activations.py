"""What happens inside a model while it reads: the arrays of every layer, by linen's own means of looking in."""

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
from jaxgpt.sample.quantize import unrolled

ALTERNATIVES = 5  # likeliest tokens that are kept of each place
LENS = 3  # and of each place in each layer
BATCH = 8  # windows of a corpus that are read together


class Guess(NamedTuple):
    """The likeliest next tokens at each place, and what came."""

    tokens_TK: Any  # int32, likeliest first
    probabilities_TK: Any
    logprob_T: Any  # nats, of the token that came next; of the last place, where none did, nan


class Branch(NamedTuple):
    """What attention or an MLP adds to the residual stream."""

    name: str  # "h_0/attn", "h_0/cross", "h_0/mlp"
    added_T: Any  # Euclidean norm, of each token
    stream_T: Any  # of the stream with it; where norms come after the sum (post), after that


class Norm(NamedTuple):
    """One normalisation: each token's vector before and after it."""

    name: str  # "h_0/ln_1"
    before_TD: Any
    after_TD: Any
    scale_D: Any  # gamma, as it multiplies
    bias_D: Any  # beta; None: there is none
    eps: float
    centred: bool  # whether the mean is taken off: LayerNorm; else RMSNorm


class Anatomy(NamedTuple):
    """What a model does with one text of T tokens. Arrays are NumPy's, in float32."""

    guess: Guess
    logits_V: Any  # at the last place
    lens: list[Guess]  # L + 1: were the stream read off after the embedding, after the first block, ...
    weights_LNTS: list[Any]  # of attention: how much of token S each token T takes
    cross_LNTS: list[Any]  # of a model with an encoder: how much of token S of the source each token T takes
    encoder_LNSS: list[Any]  # and how much of each other the source's tokens take
    hidden_LTF: list[Any]  # of the MLPs, after the activation
    start_T: Any  # norm of the stream that enters the first block
    branches: list[Branch]  # in their order
    norms: list[Norm]  # in their order


def anatomy(
    model: GPT, params: dict, tokens: list[int], vocab_size: int | None = None, source: list[int] | None = None
) -> Anatomy:
    """Everything about one text, which is at most block_size long. vocab_size: ids from there on are padding.

    source: of a model with an encoder, the text that it reads.
    """
    model, params = _plain(model, params)
    source_S = None if source is None else jnp.asarray(source, jnp.int32)
    seen = _look(model, params, jnp.asarray(tokens, jnp.int32), vocab_size, source_S)
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
    return Anatomy(
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
            _norm(model, f"{block}{name}", values, _at(params, f"{block}{name}"))
            for block, values_of in [*((f"h_{i}/", b) for i, b in enumerate(blocks)), ("", inner)]
            for name, values in values_of.items()
            if name.startswith("ln_")
        ],
    )


def excited(model: GPT, params: dict, windows_NT: np.ndarray, most: int = 4) -> tuple[list[Any], list[Any]]:
    """Where in a corpus each unit of the MLPs is most active: (values, places), for each layer [F, most].

    windows_NT: token ids, each window read by itself. A place is an index into its flattened form; of each window a
    unit has its best place alone, so that they differ. -1: there are fewer windows.
    """
    model, params = _plain(model, params)
    T = windows_NT.shape[1]
    shape = (model.config.mlp_hidden, most)
    best: Any = [(jnp.full(shape, -jnp.inf), jnp.full(shape, -1)) for _ in range(model.config.n_layer)]
    for first in range(0, len(windows_NT), BATCH):
        windows_BT = windows_NT[first : first + BATCH]
        rows = np.full((BATCH, T), 0, np.int32)  # one shape for all, so that one program does
        rows[: len(windows_BT)] = windows_BT
        best = _better(model, params, best, jnp.asarray(rows), first, len(windows_BT))
    best = jax.device_get(best)
    return [values for values, _ in best], [places for _, places in best]


@functools.partial(jax.jit, static_argnums=0)
def _better(model: GPT, params: dict, best: Any, rows_BT: jax.Array, first: Any, count: Any) -> Any:
    """`best` with what these windows have."""
    _, kept = model.apply({"params": params}, rows_BT, mutable=["intermediates"])
    inner: Any = kept["intermediates"]
    B, T = rows_BT.shape
    found = []
    for layer, (values_FK, places_FK) in enumerate(best):
        hidden_BTF = inner[f"h_{layer}"]["mlp"]["hidden_BTF"][0].astype(jnp.float32)
        there_B1 = (jnp.arange(B) < count)[:, None]
        top_BF = jnp.where(there_B1, hidden_BTF.max(axis=1), -jnp.inf)
        where_BF = jnp.argmax(hidden_BTF, axis=1) + ((first + jnp.arange(B)) * T)[:, None]
        values_FM = jnp.concatenate([values_FK, top_BF.T], axis=1)
        places_FM = jnp.concatenate([places_FK, where_BF.T.astype(places_FK.dtype)], axis=1)
        values_FK, order_FK = jax.lax.top_k(values_FM, values_FK.shape[1])
        places_FK = jnp.take_along_axis(places_FM, order_FK, axis=1)
        found.append((values_FK, jnp.where(jnp.isfinite(values_FK), places_FK, -1)))
    return found


def _plain(model: GPT, params: dict) -> tuple[GPT, dict]:
    """Layers one by one and nothing recomputed: what is sown under a scan or a remat would be lost."""
    model, params = unrolled(model, params)
    return model.clone(config=dataclasses.replace(model.config, remat="none")), params


@functools.partial(jax.jit, static_argnums=(0, 3))
def _look(model: GPT, params: dict, tokens_T: jax.Array, vocab_size: int | None, source_S: jax.Array | None) -> Any:
    """(guess, logits_V of the last place, lens, what was captured, attention weights)."""

    def sow_inputs(call, args, kwargs, context):
        if isinstance(context.module, LayerNorm | RMSNorm) and context.method_name == "__call__":
            context.module.sow("intermediates", "input", args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(sow_inputs):
        logits_BTV, kept = model.apply(
            {"params": params},
            tokens_T[None],
            source_BS=None if source_S is None else source_S[None],
            capture_intermediates=True,
            mutable=["intermediates", WEIGHTS],
        )
    inner: Any = kept["intermediates"]

    def guess(logits_BTV: Any, most: int) -> Guess:
        logprobs_TV = jax.nn.log_softmax(logits_BTV[0, :, :vocab_size])
        top_TK, ids_TK = jax.lax.top_k(logprobs_TV, min(most, logprobs_TV.shape[1]))
        came_T = jnp.take_along_axis(logprobs_TV[:-1], tokens_T[1:, None], axis=1)[:, 0]
        return Guess(ids_TK, jnp.exp(top_TK), jnp.append(came_T, jnp.nan))

    def read_off(module: GPT, x_BTD: jax.Array) -> jax.Array:
        return module.unembed(x_BTD if model.config.norm_position == "post" else module.ln_f(x_BTD))

    streams = [inner["drop"]["__call__"][-1], *(inner[f"h_{i}"]["__call__"][0] for i in range(model.config.n_layer))]
    lens = jax.lax.map(  # one after the other: logits of one layer in memory
        lambda x_BTD: guess(model.apply({"params": params}, x_BTD, method=read_off), LENS),
        jnp.stack([_first(stream) for stream in streams]),
    )
    return guess(logits_BTV, ALTERNATIVES), logits_BTV[0, -1, :vocab_size], lens, inner, kept[WEIGHTS]


def _weights(attention: Any) -> Any:
    """weights_NTS"""
    return attention["weights_BTNS"][0][0].swapaxes(0, 1)


def _norm(model: GPT, name: str, values: Any, params: dict) -> Norm:
    offset = 1.0 if model.config.norm_offset else 0.0
    return Norm(
        name=name,
        before_TD=values["input"][0][0].astype(np.float32),
        after_TD=_output(values),
        scale_D=np.asarray(params["scale"], np.float32) + offset,
        bias_D=np.asarray(params["bias"], np.float32) if "bias" in params else None,
        eps=model.config.norm_eps,
        centred=model.config.norm == "layernorm",
    )


def _at(params: dict, path: str) -> dict:
    return functools.reduce(lambda tree, name: tree[name], path.split("/"), params)


def _first(out: Any) -> Any:
    """Of a module that returns (x_BTD, cache)."""
    return out[0] if isinstance(out, tuple) else out


def _output(values: Any) -> Any:
    """x_TD of a captured module."""
    return _first(values["__call__"][0])[0].astype(np.float32)


def _length(x_TD: Any) -> Any:
    return np.linalg.norm(x_TD, axis=-1)
