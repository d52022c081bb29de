"""How likely a model finds given tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.errors import UserError
from jaxgpt.model import GPT

BATCH = 8  # windows that are read together
ROWS = 512  # positions whose logits are in memory together: 100 MB for a vocabulary of 50,000


def score(model: GPT, params: dict, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Log-probability in nats of each token given those before it: float32, one array for each list of ids.

    The first token has nothing before it and gets nan. Texts longer than block_size are read in windows that
    overlap by half, so that every token after the first window sees at least block_size // 2 before it.
    Raises `UserError` for ids that the model does not have.
    """
    window = model.config.block_size
    stride = max(window // 2, 1)
    out = [np.full(len(text), np.nan, np.float32) for text in texts]
    work: list[tuple[int, int, int]] = []  # text, first input of a window, first input whose target is scored
    for number, text in enumerate(texts):
        check_ids(model, text, f"text {number}")
        done = 0
        while done < len(text) - 1:
            first = max(0, done - (window - stride)) if done else 0
            work.append((number, first, done))
            done = min(first + window, len(text) - 1)

    for at in range(0, len(work), BATCH):
        batch = work[at : at + BATCH]
        longest = max(min(window, len(texts[number]) - 1 - first) for number, first, _ in batch)
        T = min(window, max(64, 1 << (longest - 1).bit_length()))  # few widths, few compilations
        inputs_BT, targets_BT = np.zeros((BATCH, T), np.int32), np.zeros((BATCH, T), np.int32)
        for row, (number, first, _) in enumerate(batch):
            ids = np.asarray(texts[number][first : first + T + 1], np.int32)
            inputs_BT[row, : len(ids) - 1], targets_BT[row, : len(ids) - 1] = ids[:-1], ids[1:]
        logprobs_BT = np.asarray(_logprobs(model, params, inputs_BT, targets_BT))
        for row, (number, first, done) in enumerate(batch):
            last = min(first + T, len(texts[number]) - 1)
            out[number][done + 1 : last + 1] = logprobs_BT[row, done - first : last - first]
    return out


def check_ids(model: GPT, ids: Sequence[int], what: str) -> None:
    """Raises `UserError` unless the model has all ids: beyond the last, embeddings are silently nan."""
    known = model.config.vocab_size
    assert known is not None, "a model with parameters has one"
    if len(ids) and not (min(ids) >= 0 and max(ids) < known):
        raise UserError(f"{what} has ids from {min(ids)} to {max(ids)}, the model knows 0 to {known - 1}")


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(model: GPT, params: dict, inputs_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Of each target, [B, T]."""
    x_BTD: Any = model.apply({"params": params}, inputs_BT, method="features")
    B, T, D = x_BTD.shape
    rows = min(ROWS, B * T)
    x_ND, targets_N = x_BTD.reshape(B * T, D), targets_BT.reshape(B * T)
    padding = -(B * T) % rows
    x_ND, targets_N = jnp.pad(x_ND, ((0, padding), (0, 0))), jnp.pad(targets_N, (0, padding))

    def of_rows(piece):
        x_ND, targets_N = piece
        logits_NV: Any = model.apply({"params": params}, x_ND[None], method="unembed")[0]
        chosen_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
        return chosen_N - jax.nn.logsumexp(logits_NV, axis=1)

    pieces = x_ND.reshape(-1, rows, D), targets_N.reshape(-1, rows)
    return jax.lax.map(of_rows, pieces).reshape(-1)[: B * T].reshape(B, T)
