"""Activation patching: replace one activation by that of another text, and see how the prediction changes.

Vig et al. 2020, arXiv:2004.12265; Meng et al. 2022, arXiv:2202.05262; by heads: Wang et al. 2022, arXiv:2211.00593.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import EMBEDDING, PLACES, replace
from jaxgpt.interventions.forward import run, run_each
from jaxgpt.interventions.model import EditedGPT, unroll
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block
from jaxgpt.layers.mlp import MLP
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import with_decode_matrices
from jaxgpt.train import Params

BY_HEAD = ("queries", "keys", "values", "pattern", "heads")
# From these places on, a block treats each position alone.
ALONE = ("heads", "attention", "middle", "mlp", "stream")
AT_ONCE = 4096  # tokens of patched texts in one batch

Metric = Callable[[jax.Array], Any]


class Rows(NamedTuple):
    """R patched texts without the tokens before the patch: U tokens, the k-th at position_U[k] of row_U[k]."""

    patched_R: np.ndarray  # the position that is patched
    head_R: np.ndarray
    row_U: np.ndarray
    position_U: np.ndarray
    last_R: np.ndarray  # which of the U is the last token of each row


def patch(model: GPT, params: Params, into_T: Any, source_T: Any, place: str, metric: Metric) -> jax.Array:
    """Return the metric of a text with one activation replaced by that of another: [L, T, N] by head, else [L, T].

    Layers before the patch, and tokens before it, are computed once for all patches. Not so for queries, keys, values,
    patterns and units, whose patches are whole forward passes.

    Args:
        model: decoder-only.
        params: its parameters.
        into_T: token ids of the text that is patched.
        source_T: token ids of the text that the activations come from, as many.
        place: where, in each layer (`edits.PLACES`): "heads", "queries" or "pattern" by head; "keys" or "values" by
            key/value head; "attention", "middle", "units", "mlp" or "stream" of a token.
        metric: of the next token's logits_V. Give the same function again to use the compiled programs again.

    Example:
        >>> difference_LTN = patch(model, params, corrupted_T, clean_T, "heads", lambda z_V: z_V[right] - z_V[wrong])

    Raises:
        UserError: for an unknown place, or tokens that the model does not have.
    """
    if place not in PLACES or place == EMBEDDING:
        raise UserError(f"place={place!r}: needs one of {', '.join(PLACES[1:])}")
    if np.ndim(into_T) != 1 or np.shape(into_T) != np.shape(source_T):
        raise UserError(f"tokens of shapes {list(np.shape(into_T))} and {list(np.shape(source_T))}: needs [T] twice")
    model, params = unroll(model, params)
    tokens_BT = np.stack([into_T, source_T])
    layers = range(model.config.n_layer)
    if place not in ALONE:
        results = [_patch_by_edits(model, params, tokens_BT, layer, place, metric) for layer in layers]
    else:
        needed = dict.fromkeys(["keys", "values", "middle", "stream", place])
        names = [f"h_{layer}/{name}" for layer in layers for name in needed]
        read = run(model, params, tokens_BT, read=[EMBEDDING, *names]).activations
        results = [_patch_layer(model, params, read, layer, place, metric) for layer in layers]
    result = jnp.stack(results)
    return result.reshape(len(layers), tokens_BT.shape[1], -1, *result.shape[2:]) if place in BY_HEAD else result


def _patch_by_edits(
    model: EditedGPT, params: Params, tokens_BT: np.ndarray, layer: int, place: str, metric: Metric
) -> jax.Array:
    """Return the metric of the patches in one layer by whole forward passes: [T N] or [T]."""
    name = f"h_{layer}/{place}"
    source = np.asarray(run(model, params, tokens_BT[1:], read=[name]).activations[name][0])
    heads = [[head] for head in range(source.shape[1])] if place in BY_HEAD else [None]
    edits = [
        [replace(place, layer, index=head, positions=[p], by=source[p : p + 1, slice(None) if head is None else head])]
        for p in range(len(source))
        for head in heads
    ]
    return run_each(model, params, tokens_BT[:1], edits, _of_last(metric))


def _patch_layer(
    model: EditedGPT, params: Params, read: dict[str, jax.Array], layer: int, place: str, metric: Metric
) -> jax.Array:
    """Return the metric of the patches in one layer: [T N] or [T]."""
    blocks: Any = [model.config.make_block(i, model.compute) for i in range(model.config.n_layer)]
    names = [f"h_{i}" for i in range(len(blocks))]
    entered_BTD = read[f"h_{layer - 1}/stream" if layer else EMBEDDING]
    here = [read[f"h_{layer}/{name}"] for name in ("middle", place)]
    patched_NTD = _finish_block(blocks[layer], place, params[names[layer]], entered_BTD, *here)
    N, T, _ = patched_NTD.shape
    rest = {name: x for name, x in params.items() if name not in names}
    found, batches = [], _batches(T, N)
    for rows in batches:
        x_1UD = _start(rows, patched_NTD, read[f"h_{layer}/stream"])
        for i in range(layer + 1, len(blocks)):
            past = (read[f"h_{i}/keys"], read[f"h_{i}/values"])
            x_1UD = _continue(blocks[i], params[names[i]], x_1UD, *past, rows)
        found.append(_measure(model, rest, x_1UD[:, rows.last_R], metric))
    values, at = jnp.concatenate(found), np.concatenate([rows.patched_R * N + rows.head_R for rows in batches])
    return jnp.zeros((T * N, *values.shape[1:]), values.dtype).at[at].set(values)


def _batches(T: int, N: int) -> list[Rows]:
    """Return all patches of one layer, in batches of equal shapes; some are repeated.

    Long and short rows alternate, so that the batches have about as many tokens.
    """
    positions_T = np.stack([np.arange(T), np.arange(T)[::-1]], axis=1).ravel()[:T]
    patches = (positions_T[:, None] * N + np.arange(N)).ravel()
    number = min(len(patches), -(-len(patches) * T // AT_ONCE))
    split = [np.resize(each, -(-len(patches) // number)) for each in np.array_split(patches, number)]
    U = max((T - each // N).sum() for each in split)
    batches = []
    for each in split:
        lengths_R = T - each // N
        row_U = np.repeat(np.arange(len(each)), lengths_R)
        last_R = np.cumsum(lengths_R) - 1
        position_U = T - 1 - (last_R[row_U] - np.arange(len(row_U)))
        more = (0, U - len(row_U))  # the last token once more
        batches.append(Rows(each // N, each % N, np.pad(row_U, more, "edge"), np.pad(position_U, more, "edge"), last_R))
    return batches


@functools.lru_cache(maxsize=16)
def _of_last(metric: Metric) -> Callable[[jax.Array], Any]:
    """Return the metric of logits_1TV; the same function for the same metric, so that it is compiled once."""
    return lambda logits_1TV: metric(logits_1TV[0, -1])


@functools.partial(jax.jit, static_argnums=(0, 1))
@with_decode_matrices
def _finish_block(
    block: Block, place: str, params: Params, entered_BTD: jax.Array, middle_BTD: jax.Array, here_BT: jax.Array
) -> Any:
    """Return the stream after a block at each patched position, x_NTD, by head; N is 1 for a place without heads."""
    into_1T, x = here_BT[:1], here_BT[1:]
    if place == "stream":
        return x
    if place == "heads":
        x = jnp.where(jnp.eye(x.shape[2], dtype=bool)[:, None, :, None], x, into_1T)
    replaced = {"heads": (Attention, "attend"), "attention": (Attention, "__call__"), "mlp": (MLP, "__call__")}
    middle = x if place == "middle" else middle_BTD[:1]

    def intercept(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
        kind, method = type(context.module), context.method_name
        if place in replaced and isinstance(context.module, replaced[place][0]) and method == replaced[place][1]:
            return x
        if place in ("middle", "mlp") and (kind, method) == (Attention, "__call__"):
            return jnp.zeros_like(args[0])  # `middle` is what it led to
        if place in ("middle", "mlp") and (kind, method) == (Block, "middle"):
            return middle
        return call(*args, **kwargs)

    with nn.intercept_methods(intercept):
        return block.apply({"params": params}, entered_BTD[:1])


@jax.jit
def _start(rows: Rows, patched_NTD: jax.Array, stream_BTD: jax.Array) -> jax.Array:
    """Return the stream of all rows after the layer of the patch, x_1UD."""
    is_patched_U1 = (rows.position_U == rows.patched_R[rows.row_U])[:, None]
    patched_UD = patched_NTD[rows.head_R[rows.row_U], rows.position_U]
    return jnp.where(is_patched_U1, patched_UD, stream_BTD[0, rows.position_U])[None]


@functools.partial(jax.jit, static_argnums=0)
@with_decode_matrices
def _continue(
    block: Block,
    params: Params,
    x_1UD: jax.Array,
    keys_BTKH: jax.Array,
    values_BTKH: jax.Array,
    rows: Rows,
) -> Any:
    """Return the stream after a later block. Keys and values: of the unpatched text."""

    def spread(new_1UNH: jax.Array, old_TNH: jax.Array) -> jax.Array:
        shape = (len(rows.patched_R), *old_TNH.shape)
        return jnp.broadcast_to(old_TNH, shape).at[rows.row_U, rows.position_U].set(new_1UNH[0])

    def intercept(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
        if not isinstance(context.module, Attention) or context.method_name != "attend":
            return call(*args, **kwargs)
        q_1UNH, k_1UKH, v_1UKH = args
        q_RTNH = spread(q_1UNH, jnp.zeros((keys_BTKH.shape[1], *q_1UNH.shape[2:]), q_1UNH.dtype))
        out_RTNH = call(q_RTNH, spread(k_1UKH, keys_BTKH[0]), spread(v_1UKH, values_BTKH[0]))
        return out_RTNH[rows.row_U, rows.position_U][None]

    with nn.intercept_methods(intercept):
        return block.apply({"params": params}, x_1UD, jnp.asarray(rows.position_U)[None])


@functools.partial(jax.jit, static_argnums=(0, 3))
def _measure(model: EditedGPT, params: Params, x_1RD: jax.Array, metric: Metric) -> Any:
    def logits(model: EditedGPT) -> jax.Array:
        return model.unembed(model.norm_output(x_1RD))[0]

    logits_RV: Any = model.apply({"params": params}, method=logits)
    return jax.vmap(metric)(logits_RV)
