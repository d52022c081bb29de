"""Analyses of a model's parts: attribution, scores of heads, the Jacobian lens, linear probes, and a picture of them.

They are built on `jaxgpt.interventions`, which has patching, ablation and the logit lens. inspect_run.py is a study that
uses them all.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure  # pyplot would set global state
from numpy.typing import ArrayLike

from jaxgpt import GPT, UserError
from jaxgpt.config.validate import short_repr
from jaxgpt.interventions import run
from jaxgpt.interventions.analyses import unembed_each
from jaxgpt.interventions.model import (
    ACTIVATIONS,
    EDITS,
    EMBEDDING,
    EditedGPT,
    check_tokens,
    stream_names,
    unroll,
)
from jaxgpt.sample.quantize import with_decode_matrices
from jaxgpt.train import Params

ROWS_AT_ONCE = 8  # rows of the Jacobians computed in one batch
STEPS = 100  # L-BFGS steps to fit a probe


class Attribution(NamedTuple):
    """Contributions to the difference of two logits at the last position. Their sum is the difference."""

    embedding: jax.Array  # []: token and position together
    heads_LN: jax.Array  # each head
    biases_L: jax.Array  # the bias of attention's c_proj in each layer
    mlps_L: jax.Array  # each MLP
    norm: jax.Array  # []: the bias of the last norm
    __repr__ = short_repr

    def total(self) -> jax.Array:
        """Return the difference of the logits."""
        return sum((x.sum() for x in self), jnp.zeros(()))


def logit_attribution(model: GPT, params: Params, tokens_T: Any, token: int, other: int) -> Attribution:
    """Return what each part adds to logit(token) - logit(other) at the last position.

    The stream is a sum of what the embedding, the heads and the MLPs write. The last norm is linear in it once its
    standard deviation is fixed at the text's. Effects by way of later parts are not in it: see `patch` of
    `jaxgpt.interventions`. Sources: Elhage et al. 2021, transformer-circuits.pub/2021/framework, and Wang et al. 2022,
    arXiv:2211.00593, section 3.1.

    Args:
        model: a model with norm_position="pre" and without logit_softcap.
        tokens_T: token ids.
        token: id of the token with the logit that counts as positive.
        other: id of the token with the logit that counts as negative.

    Raises:
        UserError: for a model with logits that are not such a sum, or tokens that it does not have.
    """
    model, params = unroll(model, params)
    c, layers = model.config, range(model.config.n_layer)
    if c.norm_position != "pre" or c.logit_softcap is not None:
        raise UserError(
            f"norm_position={c.norm_position!r}, logit_softcap={c.logit_softcap}: the logits are not a sum of what each "
            "part writes. Give a model with 'pre' and None"
        )
    if not all(0 <= id < (c.vocab_size or 0) for id in (token, other)):
        raise UserError(f"tokens {token} and {other}: give 0 to {(c.vocab_size or 0) - 1}")
    names = [EMBEDDING, *(f"h_{layer}/{place}" for layer in layers for place in ("heads", "mlp", "stream"))]
    read = run(model, params, np.asarray(tokens_T)[None], read=names).activations
    return _attribute(model, params, {name: x[:, -1:] for name, x in read.items()}, token, other)


@functools.partial(jax.jit, static_argnums=0)
@with_decode_matrices
def _attribute(
    model: EditedGPT, params: Params, read: dict[str, jax.Array], token: jax.Array, other: jax.Array
) -> Attribution:
    """Return the contributions, from the activations of the last token, [1, 1, ...]."""
    c, norm = model.config, params["ln_f"]

    def centre(x_XD: jax.Array) -> jax.Array:
        return x_XD - x_XD.mean(axis=-1, keepdims=True) if c.norm == "layernorm" else x_XD

    def attribute(model: EditedGPT) -> jax.Array:
        heads, biases = [], []
        for layer, block in enumerate(model.h):
            heads_11NH, eye_N1N1 = read[f"h_{layer}/heads"], jnp.eye(c.n_head)[:, None, :, None]
            biases.append(block.attn.c_proj(jnp.zeros_like(heads_11NH).reshape(1, 1, -1))[0])
            heads.append(block.attn.c_proj((eye_N1N1 * heads_11NH).reshape(c.n_head, 1, -1))[:, 0] - biases[-1])
        mlps = [read[f"h_{layer}/mlp"][0] for layer in range(c.n_layer)]
        parts_XD = jnp.concatenate([read[EMBEDDING][0], *heads, *biases, *mlps]).astype(jnp.float32)
        stream_1D = read[f"h_{c.n_layer - 1}/stream"][0].astype(jnp.float32)
        deviation = jnp.sqrt(jnp.square(centre(stream_1D)).mean() + c.norm_eps)
        scale_D = norm["scale"] + 1.0 if c.norm_offset else norm["scale"]
        normed_XD = centre(parts_XD) / deviation * scale_D[None]
        bias_1D = norm["bias"][None] if "bias" in norm else jnp.zeros_like(stream_1D)
        return model.unembed(jnp.concatenate([normed_XD, bias_1D])[None])[0]

    logits_XV: Any = model.apply({"params": params}, method=attribute)
    found_X = logits_XV[:, token] - logits_XV[:, other]
    ends = np.cumsum([1, c.n_layer * c.n_head, c.n_layer, c.n_layer])
    embedding, heads_X, biases_L, mlps_L, bias = jnp.split(found_X, ends)
    return Attribution(embedding[0], heads_X.reshape(c.n_layer, -1), biases_L, mlps_L, bias[0])


def induction_scores(model: GPT, params: Params, tokens_BT: Any, *, period: int) -> jax.Array:
    """Return how much each head attends to the token after the last occurrence of the current one, [L, N].

    Source: Olsson et al. 2022, arXiv:2209.11895. Their induction heads have high scores on repeated random tokens.

    Args:
        tokens_BT: rows that repeat after `period` tokens, such as `repeat_random_tokens` makes.
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
        raise UserError("tokens of 1 per row: give at least 2")
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


def fit_jacobian_lens(model: GPT, params: Params, tokens_BT: Any, *, skip_first: int = 0) -> jax.Array:
    """Return the mean Jacobian of the last stream with respect to the embedding and each block's stream, [L, D, D].

    Each is the effect of a token's stream on the last stream of the same and all later tokens, summed over those and
    averaged over tokens and rows: Gurnee et al. 2026, transformer-circuits.pub/2026/workspace. The last block has no
    entry, because its Jacobian is the identity.

    Args:
        tokens_BT: a sample of text. The cost is D backward passes.
        skip_first: positions at the start of each row to leave out, which often attend to nothing but themselves. The
            last position is left out as well, as in the paper.
    """
    model, params = unroll(model, params)
    tokens = check_tokens(model, tokens_BT)
    if not 0 <= skip_first < tokens.shape[1] - 1:
        raise UserError(f"skip_first={skip_first} of {tokens.shape[1]} tokens: give 0 to {tokens.shape[1] - 2}")
    return _fit_lens(model.clone(read=tuple(stream_names(model)[-1:])), params, tokens, skip_first)


def jacobian_lens(model: GPT, params: Params, tokens_BT: Any, transport_LDD: jax.Array) -> jax.Array:
    """Return the logits predicted from the embedding and after each block, [L + 1, B, T, V].

    Each stream is first carried to the last layer by a matrix of `fit_jacobian_lens`. The last entry is the model's own
    logits, as it is in `jaxgpt.interventions.logit_lens`.
    """
    model, params = unroll(model, params)
    names = stream_names(model)
    found = run(model, params, tokens_BT, read=names).activations
    streams_LBTD = jnp.stack([found[name] for name in names])
    carried_LBTD = jnp.einsum("lbtd,led->lbte", streams_LBTD[:-1], transport_LDD)
    return unembed_each(model, params, jnp.concatenate([carried_LBTD, streams_LBTD[-1:]]))


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

    rows_DLD = jax.lax.map(row, jnp.arange(D), batch_size=min(ROWS_AT_ONCE, D))
    return rows_DLD.swapaxes(0, 1) / (B * valid_T.sum())


class Probe(NamedTuple):
    """A linear classifier, logits_UC = x_UD @ weights_DC + bias_C, and its score on rows it was not fitted to."""

    weights_DC: np.ndarray  # weights
    bias_C: np.ndarray  # bias
    accuracy: float  # share of the rows that it labels correctly
    loss: float  # nats per row
    chance: float  # accuracy of always answering the most frequent label of the fitted rows
    __repr__ = short_repr


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
            f"activations {list(x_UD.shape)}, labels {list(y_U.shape)} {y_U.dtype}: give [U, D] and U integers from 0"
        )
    fitted = round(len(y_U) * (1 - held_out))
    if not 0 < fitted < len(y_U):
        raise UserError(f"{len(y_U)} rows with held_out={held_out}: give rows to fit and rows to score")
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


def plot_heatmap(
    values_RC: ArrayLike,
    *,
    title: str,
    unit: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Figure:
    """Return a figure of a matrix: white is 0, blue is positive, red is negative.

    Args:
        values_RC: for example [L, N], one value per head.
        title: above the matrix.
        unit: the unit of the values, written at the scale.
        rows: names of the rows. None means layer 0, layer 1 ...
        columns: names of the columns. None means 0, 1 ...
    """
    values_RC = np.asarray(values_RC, np.float32)
    R, C = values_RC.shape
    figure = Figure(figsize=(max(4.0, 0.35 * C + 2.5), max(2.0, 0.35 * R + 1.2)), layout="constrained")
    axes = figure.add_subplot(title=title)
    most = float(np.nanmax(np.abs(values_RC))) or 1.0
    figure.colorbar(axes.imshow(values_RC, cmap="RdBu", vmin=-most, vmax=most, aspect="auto"), label=unit)
    axes.set_yticks(range(R), [f"layer {i}" for i in range(R)] if rows is None else list(rows))
    axes.set_xticks(range(C), list(map(str, range(C))) if columns is None else list(columns))
    return figure
