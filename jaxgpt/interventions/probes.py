"""Linear probes: what can be read off activations by a linear classifier (Alain and Bengio 2016, arXiv:1610.01644)."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError

STEPS = 100  # of L-BFGS


class Probe(NamedTuple):
    """A linear classifier, logits_UC = x_UD @ weights_DC + bias_C, and its score on rows it was not fitted to."""

    weights_DC: np.ndarray
    bias_C: np.ndarray
    accuracy: float
    loss: float  # nats per row
    chance: float  # accuracy of always answering the most frequent label of the fitted rows


def fit_probe(activations_UD: ArrayLike, labels_U: ArrayLike, *, held_out: float = 0.25, l2: float = 1e-3) -> Probe:
    """Fit a multinomial logistic regression to the first rows, and score it on the last ones.

    Args:
        activations_UD: one row per token. Put the texts after each other: neighbouring tokens are alike, so a random
            split would flatter the probe.
        labels_U: integers from 0.
        held_out: the share of rows at the end that the probe is scored on.
        l2: half the weight of the squared weights, for standardised activations.

    Raises:
        UserError: if shapes or labels do not fit, or a part of the split would be empty.
    """
    x_UD, y_U = np.asarray(activations_UD, np.float32), np.asarray(labels_U)
    if x_UD.ndim != 2 or y_U.shape != x_UD.shape[:1] or y_U.dtype.kind not in "iu" or (y_U.size and y_U.min() < 0):
        raise UserError(
            f"activations {list(x_UD.shape)}, labels {list(y_U.shape)} {y_U.dtype}: needs [U, D] and U integers from 0"
        )
    fitted = round(len(y_U) * (1 - held_out))
    if not 0 < fitted < len(y_U):
        raise UserError(f"{len(y_U)} rows with held_out={held_out}: needs rows to fit and rows to score")
    mean_D, std_D = x_UD[:fitted].mean(axis=0), np.maximum(x_UD[:fitted].std(axis=0), 1e-6)
    z_UD, C = (x_UD - mean_D) / std_D, int(y_U.max()) + 1
    weights_DC, bias_C = map(np.asarray, _fit(jnp.asarray(z_UD[:fitted]), jnp.asarray(y_U[:fitted]), C, l2))
    logits_UC = z_UD[fitted:] @ weights_DC + bias_C
    losses_U = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits_UC), jnp.asarray(y_U[fitted:]))
    weights_DC = weights_DC / std_D[:, None]
    return Probe(
        weights_DC=weights_DC,
        bias_C=bias_C - mean_D @ weights_DC,
        accuracy=float((logits_UC.argmax(axis=1) == y_U[fitted:]).mean()),
        loss=float(losses_U.mean()),
        chance=float((y_U[fitted:] == np.bincount(y_U[:fitted]).argmax()).mean()),
    )


@functools.partial(jax.jit, static_argnums=2)
def _fit(x_UD: jax.Array, y_U: jax.Array, C: int, l2: float) -> tuple[jax.Array, jax.Array]:
    def loss(params: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights_DC, bias_C = params
        losses_U = optax.softmax_cross_entropy_with_integer_labels(x_UD @ weights_DC + bias_C[None], y_U)
        return losses_U.mean() + l2 * jnp.sum(jnp.square(weights_DC))

    solver = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        params, state = carry
        value, grad = value_and_grad(params, state=state)
        updates, state = solver.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    params = (jnp.zeros((x_UD.shape[1], C)), jnp.zeros(C))
    (params, _), _ = jax.lax.scan(step, (params, solver.init(params)), length=STEPS)
    return params
