"""Next-token cross-entropy."""

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
