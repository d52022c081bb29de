"""Next-token cross-entropy."""

import jax
import jax.numpy as jnp
import optax


def next_token_loss(
    logits_BTV: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The summed cross-entropy in nats and the number of targets it sums over, both float32 scalars.

    Sums, not a mean, so that micro-batches and devices with different counts add up to the right mean.
    mask_BT: False where a target does not count. Its value there may be anything: a label of -1 would silently
    mean the last class, so it is masked by `where`, never by a label.
    """
    if mask_BT is None:
        mask_BT = jnp.ones(targets_BT.shape, bool)
    targets_BT = jnp.where(mask_BT, targets_BT, 0)
    nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV.astype(jnp.float32), targets_BT)
    return jnp.sum(nats_BT, where=mask_BT), jnp.sum(mask_BT, dtype=jnp.float32)
