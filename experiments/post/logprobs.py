"""What the objectives of this folder share: logits, log-probabilities of targets, and sums over segments.

It is no page: the others import it. A row holds one or more texts, each a segment of `segments_BT` from 1 on, and 0 is
padding. `mask_BT` is True where a target is learnt from.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxgpt import UserError, loss
from jaxgpt.batch import Batch
from jaxgpt.loss import SOWN
from jaxgpt.train import Params


def apply_model(model: nn.Module, params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict]:
    """Return (logits_BTV, what modules have sown): in training, with dropout, if there is a key.

    The extras stay with the objective, and are no arguments of the model.
    """
    apply: Any = model.apply
    if key is None:
        return apply({"params": params}, batch.inputs_BT, segments_BT=batch.segments_BT), {}
    more = {"train": True, "rngs": {"dropout": key}, "mutable": SOWN}
    return apply({"params": params}, batch.inputs_BT, segments_BT=batch.segments_BT, **more)


def pick_logprobs(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return log p(target), float32 [B, T]. A target that does not count may be negative."""
    logits_BTV = logits_BTV.astype(jnp.float32)
    return loss.pick_logprobs(logits_BTV, jnp.maximum(targets_BT, 0), loss.log_sum_exp(logits_BTV))


def token_logprobs(
    model: nn.Module, params: Params, batch: Batch, key: jax.Array | None = None, *, temperature: float = 1.0
) -> jax.Array:
    """Return log p(target) at a sampling temperature, float32 [B, T]; with a key under dropout, as in training."""
    logits_BTV, _ = apply_model(model, params, batch, key)
    return pick_logprobs(logits_BTV / temperature, batch.targets_BT)


def sum_segments(x_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """Return the sum over each segment [B, T + 1], at its number: a row has at most T of them, and padding is 0."""
    T = x_BT.shape[1]
    return jax.vmap(lambda x_T, number_T: jax.ops.segment_sum(x_T, number_T, T + 1))(x_BT, segments_BT)


def count_segment(mask_BT: jax.Array, segments_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (number of targets in the segment of each token, at least 1 [B, T]; number of segments with targets)."""
    sizes_BS = sum_segments(mask_BT.astype(jnp.float32), segments_BT)
    sizes_BT = jnp.take_along_axis(sizes_BS, segments_BT, axis=1)
    return jnp.maximum(sizes_BT, 1.0), jnp.sum(sizes_BS > 0, dtype=jnp.float32)


def need_logits(head_loss: Any, label_smoothing: float, what: str) -> None:
    """Raise `UserError` if the loss is to be computed in chunks, or smoothed as that of the next token."""
    if head_loss is not None:
        raise UserError(f"parallel.loss_chunk: {what} needs all logits at once; leave the option out")
    if label_smoothing:
        raise UserError(f"optim.label_smoothing={label_smoothing}: {what} has no such smoothing; leave the option out")


def need_extras(batch: Batch, names: Iterable[str], what: str) -> dict[str, Any]:
    """Return the batch's extras. Raise `UserError` if one is missing, which is the data's mistake."""
    extras = batch.extras or {}
    if missing := [name for name in names if name not in extras]:
        raise UserError(
            f"{what} needs Batch.extras with {', '.join(missing)}: take a data configuration that makes them"
        )
    return extras
