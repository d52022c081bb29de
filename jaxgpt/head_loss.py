"""Compute the next-token cross-entropy of hidden states without the logits of all tokens in memory at once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxgpt.loss import next_token_loss


def chunked_next_token_loss(
    model: nn.Module,
    head: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array | None = None,
    *,
    chunk: int,
    smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return `next_token_loss` of hidden states, with the logits of `chunk` tokens per row in memory at once.

    `head` has the parameters that `model.unembed` reads, and no others. T is a multiple of `chunk`. GPT-2's logits at
    32 x 1024 tokens are 6.6 GB in float32, several times the rest of the model's memory. The forward pass also computes
    the gradients of each chunk, which the backward pass only scales: nothing is computed twice.
    """
    if mask_BT is None:
        mask_BT = jnp.ones(targets_BT.shape, bool)
    B, T = targets_BT.shape
    # Chunks of the context, not of the rows, which may be on different devices.
    chunks = jax.tree.map(
        lambda x: x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1), (x_BTD, targets_BT, mask_BT)
    )
    unembed = functools.partial(_unembed, model)
    return _summed_nats(unembed, smoothing, head, *chunks), jnp.sum(mask_BT, dtype=jnp.float32)


def _unembed(model: nn.Module, head: Any, x_BTD: jax.Array) -> jax.Array:
    return model.apply({"params": head}, x_BTD, method="unembed")  # type: ignore[return-value]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_nats(unembed, smoothing, head, x_CBtD, targets_CBt, mask_CBt):
    def add(nats, chunk):
        x_BtD, targets_Bt, mask_Bt = chunk
        return nats + next_token_loss(unembed(head, x_BtD), targets_Bt, mask_Bt, smoothing=smoothing)[0], None

    return jax.lax.scan(add, jnp.zeros(()), (x_CBtD, targets_CBt, mask_CBt))[0]


def _summed_nats_forward(unembed, smoothing, head, x_CBtD, targets_CBt, mask_CBt):
    def add(total, chunk):
        x_BtD, targets_Bt, mask_Bt = chunk
        logits_BtV, pull_back = jax.vjp(unembed, head, x_BtD)
        value, _ = next_token_loss(logits_BtV, targets_Bt, mask_Bt, smoothing=smoothing)
        head_grad, x_grad_BtD = pull_back(_logits_gradient(logits_BtV, targets_Bt, mask_Bt, smoothing))
        return jax.tree.map(jnp.add, total, (value, head_grad)), x_grad_BtD

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, head))
    (nats, head_grad), x_grad_CBtD = jax.lax.scan(add, zero, (x_CBtD, targets_CBt, mask_CBt))
    return nats, (head_grad, x_grad_CBtD)


def _logits_gradient(logits_BtV, targets_Bt, mask_Bt, smoothing):
    """Return the gradient of `next_token_loss` by its logits. Autodiff would scatter -1 into an array of zeros first."""
    V = logits_BtV.shape[-1]
    smoothed_BtV = optax.smooth_labels(jax.nn.one_hot(targets_Bt, V), smoothing)
    log_sum_Bt1 = jax.nn.logsumexp(logits_BtV, axis=-1)[..., None]
    return jnp.where(mask_Bt[..., None], jnp.exp(logits_BtV - log_sum_Bt1) - smoothed_BtV, 0.0)


def _summed_nats_backward(unembed, smoothing, grads, scale):
    head_grad, x_grad_CBtD = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return head_grad, x_grad_CBtD, None, None


_summed_nats.defvjp(_summed_nats_forward, _summed_nats_backward)
