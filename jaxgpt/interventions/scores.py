"""Score attention heads by the positions that they attend to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.interventions.forward import run
from jaxgpt.model import GPT
from jaxgpt.train import Params


def induction_scores(model: GPT, params: Params, tokens_BT: Any, *, period: int) -> jax.Array:
    """Return how much each head attends to the token after the last occurrence of the current one, [L, N].

    Source: Olsson et al. 2022, arXiv:2209.11895, whose induction heads have high scores on repeated random tokens.

    Args:
        model: decoder-only.
        params: its parameters.
        tokens_BT: rows that repeat after `period` tokens, such as those of `repeat_random_tokens`.
        period: length of the repeated segment, in tokens.

    Returns:
        The mean attention weight from position t to t - period + 1, over rows and t from `period` on. At most 1.
    """
    tokens_BT = np.asarray(tokens_BT)
    if not 1 < period < tokens_BT.shape[-1]:
        raise UserError(f"period={period}: needs 2 to {tokens_BT.shape[-1] - 1}, so that the segment begins again")
    if (tokens_BT[:, period:] != tokens_BT[:, :-period]).any():
        raise UserError(f"period={period}: the tokens do not repeat after {period}")
    return _attention_back(model, params, tokens_BT, period - 1, start=period)


def previous_token_scores(model: GPT, params: Params, tokens_BT: Any) -> jax.Array:
    """Return the mean attention weight of each head from a token to the one before it, [L, N].

    In the induction circuit such a head comes one layer earlier (Elhage et al. 2021,
    https://transformer-circuits.pub/2021/framework). Arguments: see `run`.
    """
    if np.asarray(tokens_BT).shape[-1] == 1:
        raise UserError("tokens of 1 per row: needs at least 2")
    return _attention_back(model, params, tokens_BT, 1, start=1)


def repeat_random_tokens(vocab_size: int, *, period: int, length: int, rows: int, seed: int = 0) -> np.ndarray:
    """Return rows of random tokens that repeat after `period`, [rows, length]."""
    segments = np.random.default_rng(seed).integers(0, vocab_size, (rows, period))
    return np.tile(segments, -(-length // period))[:, :length]


def _attention_back(model: GPT, params: Params, tokens_BT: Any, distance: int, *, start: int) -> jax.Array:
    """Return the mean attention weight from t to t - distance, over rows and t from `start` on, [L, N]."""
    names = [f"h_{layer}/pattern" for layer in range(model.config.n_layer)]
    patterns = run(model, params, tokens_BT, read=names).activations
    weights = [jnp.diagonal(patterns[name], -distance, axis1=1, axis2=3) for name in names]  # [B, N, T - distance]
    return jnp.stack([x[..., start - distance :].mean((0, 2)) for x in weights])
