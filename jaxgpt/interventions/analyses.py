"""The standard analyses of a model's parts: ablation, patching and the logit lens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from jaxgpt.config.validate import check_value, short_repr
from jaxgpt.errors import UserError
from jaxgpt.interventions.model import (
    EDITS,
    Edit,
    EditedGPT,
    check_place,
    replace,
    run,
    run_each,
    stream_names,
    token_losses,
    unroll,
    zero,
)
from jaxgpt.model import GPT
from jaxgpt.statistics import MeanInterval, mean_interval
from jaxgpt.train import Params

AT_ONCE = 4096  # tokens in one batch, but at least one set of edits
BY_HEAD = ("queries", "keys", "values", "pattern", "heads")

Metric = Callable[[jax.Array], Any]


class Ablations(NamedTuple):
    """How much the loss rises without each part of the model, in nats per token."""

    loss: float  # loss of the whole model, in nats per token
    heads: MeanInterval  # the rise without each head, over rows, in nats per token: arrays [L, N]
    mlps: MeanInterval  # the rise without each MLP, over rows, in nats per token: arrays [L]
    __repr__ = short_repr


def ablate_all(model: GPT, params: Params, tokens_BT: Any, *, by: Literal["zero", "mean"] = "mean") -> Ablations:
    """Return the rise of the loss for each head and each MLP, when only that part is ablated.

    Mean ablation keeps what a part adds to every token, on which later layers may rely (Wang et al. 2022,
    arXiv:2211.00593). Zero ablation removes that too.

    Args:
        tokens_BT: at least two rows, over which intervals are computed: documents or windows of held-out text.
        by: replace the part's output by zero, or by its mean over the positions that predict a target.
    """
    tokens_BT, L, N = np.asarray(tokens_BT), model.config.n_layer, model.config.n_head
    check_value("by", by, Literal["zero", "mean"])
    if len(tokens_BT) < 2:
        raise UserError(f"{len(tokens_BT)} row: give at least 2 for an interval")
    means = {}
    if by == "mean":
        names = [f"h_{layer}/{place}" for layer in range(L) for place in ("heads", "mlp")]
        read = run(model, params, tokens_BT, read=names).activations
        means = {name: np.asarray(x, np.float32)[:, :-1].mean(axis=(0, 1)) for name, x in read.items()}

    def ablate(place: str, layer: int, head: int | None = None) -> Edit:
        if by == "zero":
            return zero(place, layer, index=head)
        mean = means[f"h_{layer}/{place}"]
        return replace(place, layer, by=mean if head is None else mean[head], index=head)

    edits = [[], *([ablate("heads", layer, head)] for layer in range(L) for head in range(N))]
    edits += [[ablate("mlp", layer)] for layer in range(L)]
    at_once = max(1, AT_ONCE // tokens_BT.size)
    row_losses = Partial(_row_losses, tokens_BT)
    losses = np.asarray(run_each(model, params, tokens_BT, edits, row_losses, at_once=at_once))
    rises = mean_interval(losses[1:] - losses[0])
    heads = MeanInterval(*(x[: L * N].reshape(L, N) for x in rises))
    return Ablations(float(losses[0].mean()), heads, mlps=MeanInterval(*(x[L * N :] for x in rises)))


def _row_losses(tokens_BT: jax.Array, logits_BTV: jax.Array) -> jax.Array:
    return token_losses(logits_BTV, tokens_BT).mean(axis=1)


def patch(model: GPT, params: Params, into_T: Any, source_T: Any, place: str, metric: Metric) -> jax.Array:
    """Return a text's metric with one activation of another text: [L, T, N] by head, else [L, T].

    Layers before the patch are computed once for all patches. Sources: Vig et al. 2020, arXiv:2004.12265, Meng et al.
    2022, arXiv:2202.05262, and by heads, Wang et al. 2022, arXiv:2211.00593. Raises `UserError` for an unknown place or token.

    Args:
        into_T: token ids of the text that is patched.
        source_T: token ids of the text that the activations come from, as many.
        place: where, in each layer (`model.PLACES`): "heads", "queries" or "pattern" by head, "keys" or "values" by
            key/value head, "attention", "middle", "units", "mlp" or "stream" by token.
        metric: a function of the next token's logits_V, such as `lambda z_V: z_V[right] - z_V[wrong]`. Give the same one
            again to use the compiled programs again.
    """
    check_place(model.config, f"h_0/{place}")
    if np.ndim(into_T) != 1 or np.shape(into_T) != np.shape(source_T):
        raise UserError(f"tokens of shapes {list(np.shape(into_T))} and {list(np.shape(source_T))}: give [T] twice")
    model, params = unroll(model, params | {EDITS: {}})
    L, streams = model.config.n_layer, stream_names(model)
    names = [f"h_{layer}/{place}" for layer in range(L)]
    read = run(model, params, np.stack([into_T, source_T]), read=[*streams, *names]).activations
    shape = read[names[0]].shape[1 : 3 if place in BY_HEAD else 2]
    patches = np.stack([x.ravel() for x in np.indices(shape)], axis=1)  # (position,) or (position, head)
    size = -(-len(patches) // -(-len(patches) * shape[0] // AT_ONCE))  # batches of equal shapes, hence one program
    found = []
    for layer, name in enumerate(names):
        entered_1TD, source_TX = read[streams[layer]][:1], read[name][1]
        for first in range(0, len(patches), size):
            batch = patches[np.minimum(np.arange(first, first + size), len(patches) - 1)]
            x_RTD = _run_patched_block(model, layer, name, params, entered_1TD, source_TX, jnp.asarray(batch))
            for later in range(layer + 1, L):
                x_RTD = _run_block(model, later, params, x_RTD)
            found.append(_measure(model, params, x_RTD[:, -1:], metric)[: len(patches) - first])
    result = jnp.concatenate(found)
    return result.reshape(L, *shape, *result.shape[1:])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_patched_block(
    model: EditedGPT,
    layer: int,
    name: str,
    params: Params,
    entered_1TD: jax.Array,
    source_TX: jax.Array,
    patches: jax.Array,
) -> jax.Array:
    """Return the stream after the block, x_RTD. source_TX: the activations of the other text at the place `name`."""

    def run_one(patch: jax.Array) -> Any:
        here = jnp.zeros(source_TX.shape[: len(patch)], bool).at[tuple(patch)].set(True)
        here = here.reshape(*here.shape, *(1,) * (source_TX.ndim - here.ndim))
        edit = {"keep": jnp.where(here, 0.0, 1.0), "add": jnp.where(here, source_TX.astype(jnp.float32), 0.0)}
        return model.apply({"params": params | {EDITS: {name: edit}}}, layer, entered_1TD, method="run_block")

    return jax.vmap(run_one)(patches)[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_block(model: EditedGPT, layer: int, params: Params, x_RTD: jax.Array) -> Any:
    return model.apply({"params": params}, layer, x_RTD, method="run_block")


@functools.partial(jax.jit, static_argnums=(0, 3))
def _measure(model: EditedGPT, params: Params, x_R1D: jax.Array, metric: Metric) -> Any:
    logits_R1V: Any = model.apply({"params": params}, x_R1D, method="predict")
    return jax.vmap(metric)(logits_R1V[:, 0])


def logit_lens(model: GPT, params: Params, tokens_BT: Any) -> jax.Array:
    """Return the logits predicted from the embedding and after each block, [L + 1, B, T, V].

    The logit lens applies the last norm and the output matrix to the stream of each layer (nostalgebraist 2020,
    "interpreting GPT: the logit lens"). The last entry is the model's own logits.
    """
    model, params = unroll(model, params)
    names = stream_names(model)
    found = run(model, params, tokens_BT, read=names)
    return unembed_each(model, params, jnp.stack([found.activations[name] for name in names]))


@functools.partial(jax.jit, static_argnums=0)
def unembed_each(model: EditedGPT, params: Params, streams_LBTD: jax.Array) -> Any:
    """Return the logits predicted from each stream."""
    return jax.lax.map(lambda x_BTD: model.apply({"params": params}, x_BTD, method="predict"), streams_LBTD)
