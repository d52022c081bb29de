"""Read off activations: predictions by the logit lens and the Jacobian lens, labels by linear probes."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import EMBEDDING
from jaxgpt.interventions.model import ACTIVATIONS, EDITS, EditedGPT, check_tokens, run, unroll
from jaxgpt.model import GPT
from jaxgpt.train import Params

AT_ONCE = 8  # rows of the Jacobians computed in one batch
STEPS = 100  # of L-BFGS, in fitting a probe


def logit_lens(model: GPT, params: Params, tokens_BT: Any, transport_LDD: jax.Array | None = None) -> jax.Array:
    """Return the logits predicted from the embedding and after each block, [L + 1, B, T, V].

    The logit lens applies the last norm and the output matrix to the stream of each layer (nostalgebraist 2020,
    "interpreting GPT: the logit lens"). With `transport_LDD` of `fit_jacobian_lens` each stream is first carried to
    the last layer: the Jacobian lens. The last entry is the model's own logits in both.
    """
    model, params = unroll(model, params)
    names = stream_names(model)
    found = run(model, params, tokens_BT, read=names)
    return _unembed_each(model, params, jnp.stack([found.activations[name] for name in names]), transport_LDD)


def fit_jacobian_lens(model: GPT, params: Params, tokens_BT: Any, *, skip_first: int = 0) -> jax.Array:
    """Return the mean Jacobian of the last stream with respect to the embedding and each block's stream, [L, D, D].

    Each is the effect of a token's stream on the last stream of the same and all later tokens, summed over those and
    averaged over tokens and rows: Gurnee et al. 2026, transformer-circuits.pub/2026/workspace. The last block, whose
    Jacobian is the identity, has no entry.

    Args:
        model: decoder-only.
        params: its parameters.
        tokens_BT: a sample of text; the cost is D backward passes.
        skip_first: positions at the start of each row to leave out, which often attend to nothing but themselves. The
            last position is left out as well, as in the paper.
    """
    model, params = unroll(model, params)
    tokens = check_tokens(model, tokens_BT)
    if not 0 <= skip_first < tokens.shape[1] - 1:
        raise UserError(f"skip_first={skip_first} of {tokens.shape[1]} tokens: needs 0 to {tokens.shape[1] - 2}")
    return _fit_lens(model.clone(read=tuple(stream_names(model)[-1:])), params, tokens, skip_first)


def stream_names(model: GPT) -> list[str]:
    """Return the names of the residual streams, from the embedding to the last block's."""
    return [EMBEDDING, *(f"h_{layer}/stream" for layer in range(model.config.n_layer))]


@functools.partial(jax.jit, static_argnums=0)
def _unembed_each(model: EditedGPT, params: Params, streams_LBTD: jax.Array, transport_LDD: jax.Array | None) -> Any:
    if transport_LDD is not None:
        transported_LBTD = jnp.einsum("lbtd,led->lbte", streams_LBTD[:-1], transport_LDD)
        streams_LBTD = jnp.concatenate([transported_LBTD, streams_LBTD[-1:]])

    def unembed(module: EditedGPT, x_BTD: jax.Array) -> jax.Array:
        return module.unembed(module.norm_output(x_BTD))

    return jax.lax.map(lambda x_BTD: model.apply({"params": params}, x_BTD, method=unembed), streams_LBTD)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _fit_lens(model: EditedGPT, params: Params, tokens_BT: jax.Array, skip_first: int) -> jax.Array:
    (B, T), D = tokens_BT.shape, model.config.n_embd
    *names, last = stream_names(model)
    valid_T = (jnp.arange(T) >= skip_first) & (jnp.arange(T) < T - 1)

    def last_stream(offsets_LTD: jax.Array) -> jax.Array:
        keep = jnp.ones((1, D))
        edits = {name: {"keep": keep, "add": offsets_TD} for name, offsets_TD in zip(names, offsets_LTD, strict=True)}
        result: Any = model.apply({"params": params | {EDITS: edits}}, tokens_BT, mutable=[ACTIVATIONS])
        return result[1][ACTIVATIONS][last]

    x_BTD, backward = jax.vjp(last_stream, jnp.zeros((len(names), T, D)))

    def row(d: jax.Array) -> jax.Array:
        one_D = jnp.arange(D) == d
        cotangent_BTD = jnp.broadcast_to((valid_T[:, None] & one_D[None])[None], x_BTD.shape).astype(x_BTD.dtype)
        (grad_LTD,) = backward(cotangent_BTD)
        return jnp.einsum("ltd,t->ld", grad_LTD, valid_T.astype(jnp.float32))

    rows_DLD = jax.lax.map(row, jnp.arange(D), batch_size=min(AT_ONCE, D))
    return rows_DLD.swapaxes(0, 1) / (B * valid_T.sum())


class Probe(NamedTuple):
    """A linear classifier, logits_UC = x_UD @ weights_DC + bias_C, and its score on rows it was not fitted to."""

    weights_DC: np.ndarray
    bias_C: np.ndarray
    accuracy: float
    loss: float  # nats per row
    chance: float  # accuracy of always answering the most frequent label of the fitted rows


def fit_probe(activations_UD: ArrayLike, labels_U: ArrayLike, *, held_out: float = 0.25, l2: float = 1e-3) -> Probe:
    """Fit a multinomial logistic regression to the first rows, and score it on the last ones.

    A linear probe shows what a layer makes linearly readable (Alain and Bengio 2016, arXiv:1610.01644).

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
    weights_DC, bias_C = map(np.asarray, _fit_probe(jnp.asarray(z_UD[:fitted]), jnp.asarray(y_U[:fitted]), C, l2))
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
def _fit_probe(x_UD: jax.Array, y_U: jax.Array, C: int, l2: float) -> tuple[jax.Array, jax.Array]:
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
