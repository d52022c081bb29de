"""What the zoo's objectives share: a term of the training loss that reads the logits.

It is no page: `z_loss.py` and `label_smoothing.py` import it.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn

from jaxgpt import UserError
from jaxgpt.batch import Batch
from jaxgpt.train import LossFn, Metrics, Params

# (logits_BTV in float32, batch) -> (what to add to the loss of each target, in nats [B, T], more to log [B, T])
Term = Callable[[jax.Array, Batch], tuple[jax.Array, dict[str, jax.Array]]]


def add_term(plain: LossFn, term: Term) -> LossFn:
    """Return the loss `plain`, in training with a term added; validation stays the plain loss, so that runs compare.

    The logits are taken from where the model returns them, so that the model runs once, and whatever else `plain` adds,
    such as losses that modules sow, stays in it.
    """

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
        if key is None:
            return plain(params, batch, key)
        seen: list[jax.Array] = []

        def watch(method: Callable[..., Any], args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
            out = method(*args, **kwargs)
            if context.method_name == "unembed":
                seen.append(out)
            return out

        with nn.intercept_methods(watch):
            nats, count, metrics = plain(params, batch, key)
        if len(seen) != 1:
            raise UserError(
                f"the model computes logits {len(seen)} times in a step: this objective needs it to do so once"
            )
        added_BT, logged = term(seen[0], batch)
        return nats + _sum(added_BT, batch), count, metrics | {name: _sum(x, batch) for name, x in logged.items()}

    return loss


def need_logits(head_loss: Any, what: str) -> None:
    """Raise `UserError` if the loss is computed in chunks, without all logits at once."""
    if head_loss is not None:
        raise UserError(f"parallel.loss_chunk: {what} needs all logits at once; leave the option out")


def _sum(x_BT: jax.Array, batch: Batch) -> jax.Array:
    return x_BT.sum(where=True if batch.mask_BT is None else batch.mask_BT)
