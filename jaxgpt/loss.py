"""Next-token cross-entropy, at once or in chunks of the context."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def next_token_loss(
    logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array | None = None, *, smoothing: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy in nats and the number of targets it sums over, both float32 scalars.

    Sums, not a mean, so that micro-batches and devices with different counts add up to the right mean. `mask_BT` is
    False where a target does not count; it may have any value there, since no label means "masked" (-1 would silently
    be the last class). `smoothing` is the share of each target that is spread evenly over all V tokens (Szegedy et al.
    2015, arXiv:1512.00567).
    """
    if mask_BT is None:
        mask_BT = jnp.ones(targets_BT.shape, bool)
    targets_BT = jnp.where(mask_BT, targets_BT, 0)
    logits_BTV = logits_BTV.astype(jnp.float32)
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    if smoothing:
        even_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - logits_BTV.mean(axis=-1)
        nats_BT = (1.0 - smoothing) * nats_BT + smoothing * even_BT
    return jnp.sum(nats_BT, where=mask_BT), jnp.sum(mask_BT, dtype=jnp.float32)


def chunked_next_token_loss(
    unembed: Callable[[Any, jax.Array], jax.Array],
    head: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array | None = None,
    *,
    chunk: int,
    smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return `next_token_loss(unembed(head, x_BTD), ...)` with the logits of `chunk` tokens per row in memory at once.

    `head` has the parameters that `unembed` reads, and no others; T is a multiple of `chunk`. GPT-2's logits at
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
    return _summed_nats(unembed, smoothing, head, *chunks), jnp.sum(mask_BT, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_nats(unembed, smoothing, head, x_CBtD, targets_CBt, mask_CBt):
    def add(nats, chunk):
        x_BtD, targets_Bt, mask_Bt = chunk
        return nats + next_token_loss(unembed(head, x_BtD), targets_Bt, mask_Bt, smoothing=smoothing)[0], None

    return jax.lax.scan(add, jnp.zeros(()), (x_CBtD, targets_CBt, mask_CBt))[0]


def _summed_nats_forward(unembed, smoothing, head, x_CBtD, targets_CBt, mask_CBt):
    def add(total, chunk):
        x_BtD, targets_Bt, mask_Bt = chunk

        def nats(head, x_BtD):
            return next_token_loss(unembed(head, x_BtD), targets_Bt, mask_Bt, smoothing=smoothing)[0]

        value, (head_grad, x_grad_BtD) = jax.value_and_grad(nats, argnums=(0, 1))(head, x_BtD)
        return jax.tree.map(jnp.add, total, (value, head_grad)), x_grad_BtD

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, head))
    (nats, head_grad), x_grad_CBtD = jax.lax.scan(add, zero, (x_CBtD, targets_CBt, mask_CBt))
    return nats, (head_grad, x_grad_CBtD)


def _summed_nats_backward(unembed, smoothing, grads, scale):
    head_grad, x_grad_CBtD = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return head_grad, x_grad_CBtD, None, None


_summed_nats.defvjp(_summed_nats_forward, _summed_nats_backward)
