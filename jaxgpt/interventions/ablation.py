"""Measure how much the loss rises when a part of the model is ablated."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.tree_util import Partial
from numpy.typing import ArrayLike

from jaxgpt.errors import UserError
from jaxgpt.interventions.edits import Edit, replace, zero
from jaxgpt.interventions.forward import run, run_each, token_losses
from jaxgpt.model import GPT
from jaxgpt.statistics import MeanInterval, mean_interval
from jaxgpt.train import Params

AT_ONCE = 4096  # tokens in one batch, but at least one set of edits


class Ablations(NamedTuple):
    """The rise of the loss without each part."""

    loss: float  # of the whole model, nats per token
    heads: MeanInterval  # over rows, in nats per token; arrays [L, N]
    mlps: MeanInterval  # arrays [L]


def ablate_all(
    model: GPT,
    params: Params,
    tokens_BT: Any,
    *,
    by: Literal["zero", "mean"] = "mean",
    mask_BT: ArrayLike | None = None,
) -> Ablations:
    """Return the rise of the loss when each head, and each MLP, is ablated alone.

    Mean ablation keeps what a part adds to every token, on which later layers may rely (Wang et al. 2022,
    arXiv:2211.00593); zero ablation removes that too.

    Args:
        model: decoder-only.
        params: its parameters.
        tokens_BT: at least two rows, over which intervals are computed: documents or windows of held-out text.
        by: replace the part's output by zero, or by its mean over the positions that predict targets that count.
        mask_BT: bool, targets that count (not padding), for tokens 1, 2 ... of each row, [B, T - 1]. None means all.
    """
    tokens_BT, L, N = np.asarray(tokens_BT), model.config.n_layer, model.config.n_head
    if by not in ("zero", "mean"):
        raise UserError(f"by={by!r}: needs zero or mean")
    shape = (len(tokens_BT), tokens_BT.shape[-1] - 1)
    mask = np.ones(shape, bool) if mask_BT is None else np.asarray(mask_BT, bool)
    if len(tokens_BT) < 2:
        raise UserError(f"{len(tokens_BT)} row: needs at least 2 for an interval")
    if mask.shape != shape or not mask.any(axis=1).all():
        raise UserError(f"mask of shape {list(mask.shape)}: needs {list(shape)}, with a target in each row")
    parts = [("heads", layer, head) for layer in range(L) for head in range(N)]
    parts += [("mlp", layer, None) for layer in range(L)]
    means = {}
    if by == "mean":
        names = [f"h_{layer}/{place}" for layer in range(L) for place in ("heads", "mlp")]
        read = run(model, params, tokens_BT, read=names).activations
        means = {name: np.asarray(x, np.float32)[:, :-1][mask].mean(axis=0) for name, x in read.items()}

    def ablate(place: str, layer: int, head: int | None) -> Edit:
        if by == "zero":
            return zero(place, layer, index=head)
        mean = means[f"h_{layer}/{place}"]
        return replace(place, layer, by=mean if head is None else mean[head], index=head)

    edits = [[], *([ablate(*part)] for part in parts)]
    at_once = max(1, AT_ONCE // tokens_BT.size)
    row_losses = Partial(_row_losses, tokens_BT, mask)
    losses = np.asarray(run_each(model, params, tokens_BT, edits, row_losses, at_once=at_once))
    rises = mean_interval(losses[1:] - losses[0])
    heads = MeanInterval(*(x[: L * N].reshape(L, N) for x in rises))
    return Ablations(float(losses[0].mean()), heads, mlps=MeanInterval(*(x[L * N :] for x in rises)))


def _row_losses(tokens_BT: jax.Array, mask_BT: jax.Array, logits_BTV: jax.Array) -> jax.Array:
    return token_losses(logits_BTV, tokens_BT).mean(axis=1, where=mask_BT)
