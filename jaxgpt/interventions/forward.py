"""Run a model under edits: logits and activations of one set of edits, or a summary of each of many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import PLACES, Edit, EditArrays, edit_arrays, place_name, stack_edits
from jaxgpt.interventions.model import ACTIVATIONS, EDITS, EditedGPT, unroll
from jaxgpt.model import GPT
from jaxgpt.train import Params

AT_ONCE = 16  # sets of edits in one batch


class Forward(NamedTuple):
    """The result of one forward pass."""

    logits_BTV: jax.Array  # float32
    activations: dict[str, jax.Array]  # by name, such as "h_0/heads": [B, T, ...]


def run(model: GPT, params: Params, tokens_BT: Any, edits: Sequence[Edit] = (), *, read: Sequence[str] = ()) -> Forward:
    """Return logits and activations of a model under edits.

    Args:
        model: decoder-only.
        params: its parameters.
        tokens_BT: token ids, at most block_size per row.
        edits: applied in their order.
        read: names of the activations to return, after the edits: "embedding", "h_0/heads" ... (see `PLACES`).

    Raises:
        UserError: for a place, layer, index, position or shape that the model does not have.
    """
    model, params = unroll(model, params)
    for name in read:
        layer, _, place = name.rpartition("/")
        if name != place_name(model.config, place, _layer(layer, name)):
            raise UserError(f"read={name!r}: needs the form h_0/heads")
    tokens_BT, arrays = check_tokens(model, tokens_BT), edit_arrays(model.config, edits)
    return _run(model.clone(read=tuple(read)), params, tokens_BT, arrays)


def run_each(
    model: GPT,
    params: Params,
    tokens_BT: Any,
    edits: Sequence[Sequence[Edit]],
    summarize: Callable[[jax.Array], Any],
    *,
    at_once: int = AT_ONCE,
) -> Any:
    """Return `summarize(logits_BTV)` for each set of edits, stacked: one program, `at_once` sets in a batch.

    Activations that come before all edits are computed once. Give the same function `summarize` again to use the
    compiled program again; a `jax.tree_util.Partial` may have other arrays.
    """
    if not edits:
        raise UserError("edits=[]: needs at least one set of edits")
    model, params = unroll(model, params)
    tokens_BT = check_tokens(model, tokens_BT)
    stacked = stack_edits([edit_arrays(model.config, each) for each in edits])
    if not stacked:
        raise UserError("edits: all sets are empty")
    summary = summarize if isinstance(summarize, Partial) else Partial(summarize)
    return _run_each(model, params, tokens_BT, stacked, summary, min(at_once, len(edits)))


def token_losses(logits_BTV: jax.Array, tokens_BT: Any) -> jax.Array:
    """Return the loss of each next token, [B, T - 1] in nats."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(logprobs_BTV, jnp.asarray(tokens_BT)[:, 1:, None], axis=-1)[..., 0]


def _layer(text: str, name: str) -> int | None:
    if not text:
        return None
    if not text.startswith("h_") or not text[2:].isdecimal():
        raise UserError(f"read={name!r}: needs the form h_0/heads, with one of {', '.join(PLACES)}")
    return int(text[2:])


def check_tokens(model: GPT, tokens_BT: Any) -> jax.Array:
    """Return token ids as int32. Raises `UserError` for what the model cannot read."""
    tokens_BT = np.asarray(tokens_BT)
    if tokens_BT.ndim != 2 or not tokens_BT.size or tokens_BT.dtype.kind not in "iu":
        raise UserError(f"tokens of shape {list(tokens_BT.shape)}, {tokens_BT.dtype}: needs integers, [B, T]")
    if model.config.vocab_size is not None and not 0 <= tokens_BT.min() <= tokens_BT.max() < model.config.vocab_size:
        raise UserError(f"tokens from {tokens_BT.min()} to {tokens_BT.max()}: needs 0 to {model.config.vocab_size - 1}")
    model.check_length(tokens := jnp.asarray(tokens_BT, jnp.int32))
    return tokens


@functools.partial(jax.jit, static_argnums=0)
def _run(model: EditedGPT, params: Params, tokens_BT: jax.Array, arrays: EditArrays) -> Forward:
    result: Any = model.apply({"params": params | {EDITS: arrays}}, tokens_BT, mutable=[ACTIVATIONS])
    return Forward(result[0], dict(result[1].get(ACTIVATIONS, {})))


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_each(
    model: EditedGPT, params: Params, tokens_BT: jax.Array, stacked: EditArrays, summarize: Partial, at_once: int
) -> Any:
    def one(arrays: EditArrays) -> Any:
        return summarize(model.apply({"params": params | {EDITS: arrays}}, tokens_BT))

    return jax.lax.map(one, stacked, batch_size=at_once)
