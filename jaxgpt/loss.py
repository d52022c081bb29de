"""Next-token cross-entropy, with the logits of all tokens in memory at once or of some."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jaxgpt.batch import Batch
from jaxgpt.config.serialize import Checked
from jaxgpt.train import LossFn, Metrics, Params

SOWN = ("losses", "metrics")  #: collections of what modules sow in training

#: The loss of hidden states, such as `chunked_next_token_loss`,
#: `(model, head, x_BTD, targets_BT, mask_BT, *, smoothing) -> (summed nats, number of targets)`
HeadLoss = Callable[..., tuple[jax.Array, jax.Array]]
#: logits_BTV -> log_sum_BT, the logarithm of softmax's denominator
log_sum_exp = functools.partial(jax.nn.logsumexp, axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Checked):
    """What training minimises: the cross-entropy of the next token. A subclass may minimise something else.

    >>> ObjectiveConfig().unit
    'nats per token'
    """

    unit = "nats per token"  #: unit of the validation loss. A subclass that validates with something else names it

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss: (params, batch, key) -> (summed loss, number of targets, metrics). Arguments: `loss.make_loss`."""
        return make_loss(model, head_loss=head_loss, label_smoothing=label_smoothing)


def make_loss(model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
    """Return the loss that training minimises, the cross-entropy of the next token. It applies dropout if it has a key.

    In training, what modules sow counts too: see `add_sown`.

    Args:
        model: a `GPT`, or any module tokens_BT -> logits_BTV. It is called with `train=True` in training, if it takes
            that, and with `segments_BT` and `extras`, if the batch has them.
        head_loss: computes the loss of hidden states without all logits in memory at once, by the methods of `GPT`.
            None means `next_token_loss`.
        label_smoothing: see `next_token_loss`.
    """
    has_train = "train" in inspect.signature(type(model).__call__).parameters

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
        inputs: dict[str, Any] = dict(batch.extras or {})
        if batch.segments_BT is not None:
            inputs["segments_BT"] = batch.segments_BT
        if key is not None:
            inputs |= {"rngs": {"dropout": key}, "mutable": SOWN} | ({"train": True} if has_train else {})
        forward: Any = functools.partial(model.apply, {"params": params}, batch.inputs_BT, **inputs)
        result = forward() if head_loss is None else forward(method="hidden_states")
        output_BTX, sown = (result, {}) if key is None else result
        if head_loss is None:
            nats, count = next_token_loss(output_BTX, batch.targets_BT, batch.mask_BT, smoothing=label_smoothing)
        else:
            gpt: Any = model
            sums = gpt.sharding.reduce_loss(functools.partial(head_loss, model, smoothing=label_smoothing))
            head = {name: params[name] for name in gpt.unembed_params}
            nats, count = sums(head, output_BTX, batch.targets_BT, batch.mask_BT)
        nats, metrics = add_sown(nats, count, sown)
        return nats, count, metrics

    return loss


def add_sown(nats: jax.Array, count: jax.Array, sown: dict[str, Any]) -> tuple[jax.Array, Metrics]:
    """Return (nats with the losses that modules have sown, what they report), both summed over `count` targets.

    Each scalar of the collection "losses" is in nats per target, a mean over the micro-batch, and is added. The scalars
    of "metrics" are only reported. Losses of one name are summed over the modules that sow them, and metrics averaged.
    """
    auxiliary, metrics = (_sum_by_name(sown.get(collection, {})) for collection in SOWN)
    for value, _ in auxiliary.values():
        nats += count * value
    means = {name: total / times for name, (total, times) in metrics.items()}
    means |= {name: total for name, (total, _) in auxiliary.items()}
    return nats, {name: count * value for name, value in means.items()}


def _sum_by_name(sown: dict[str, Any]) -> dict[str, tuple[jax.Array, int]]:
    """Return {name: (sum of the values sown under it in all modules, their number)}. Scanned layers stack theirs."""
    found: dict[str, tuple[jax.Array, int]] = {}
    for path, x in jax.tree.leaves_with_path(sown):
        name = next(entry.key for entry in reversed(path) if isinstance(entry, jax.tree_util.DictKey))
        total, times = found.get(name, (jnp.zeros(()), 0))
        found[name] = total + x.sum(), times + x.size
    return found


def pick_logprobs(logits_V: jax.Array, targets: jax.Array, log_sum: jax.Array) -> jax.Array:
    """Return each target's log-probability, in nats: of training, scores and the sampler alike."""
    return jnp.take_along_axis(logits_V, targets[..., None], axis=-1)[..., 0] - log_sum


def next_token_loss(
    logits_BTV: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array | None = None,
    *,
    smoothing: float = 0.0,
    log_sum_exp: Callable[[jax.Array], jax.Array] = log_sum_exp,
) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy in nats and the number of targets it sums over, both float32 scalars.

    Sums, not a mean, so that micro-batches and devices with different counts add up to the right mean. `mask_BT` is
    False where a target does not count. A target may have any value there: no label means "masked" (-1 would be the last
    class). `smoothing` is the share of each target that is spread evenly over all V tokens (arXiv:1512.00567).
    """
    if mask_BT is None:
        mask_BT = jnp.ones(targets_BT.shape, bool)
    targets_BT = jnp.where(mask_BT, targets_BT, 0)
    logits_BTV = logits_BTV.astype(jnp.float32)
    log_sum_BT = log_sum_exp(logits_BTV)
    nats_BT = -pick_logprobs(logits_BTV, targets_BT, log_sum_BT)
    if smoothing:
        nats_BT = (1.0 - smoothing) * nats_BT + smoothing * (log_sum_BT - logits_BTV.mean(axis=-1))
    return jnp.sum(nats_BT, where=mask_BT), jnp.sum(mask_BT, dtype=jnp.float32)


def chunked_next_token_loss(
    model: nn.Module,
    head: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array | None = None,
    *,
    chunk: int,
    smoothing: float = 0.0,
    log_sum_exp: Callable[[jax.Array], jax.Array] = log_sum_exp,
) -> tuple[jax.Array, jax.Array]:
    """Return `next_token_loss` of hidden states, with the logits of `chunk` tokens per row in memory at once.

    `head` has the parameters that `model.unembed` reads, and no others. T is a multiple of `chunk`. GPT-2's logits at
    32 x 1024 tokens are 6.6 GB in float32, several times the rest of the model's memory. The forward pass also computes
    the gradients of each chunk, which the backward pass only scales: nothing is computed twice.
    """
    if mask_BT is None:
        mask_BT = jnp.ones(targets_BT.shape, bool)
    B, T = targets_BT.shape
    chunk = min(chunk, T)
    # Chunks of the context, not of the rows, which may be on different devices.
    chunks = jax.tree.map(
        lambda x: x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1), (x_BTD, targets_BT, mask_BT)
    )
    how = {"smoothing": smoothing, "log_sum_exp": log_sum_exp}
    loss, gradient = (functools.partial(function, **how) for function in (next_token_loss, _logits_gradient))
    unembed = functools.partial(model.apply, method="unembed")
    nats = _summed_nats((unembed, loss, gradient), {"params": head}, *chunks)
    return nats, jnp.sum(mask_BT, dtype=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_nats(functions, head, x_CBtD, targets_CBt, mask_CBt):
    unembed, loss, _ = functions

    def add(nats, chunk):
        x_BtD, *which = chunk
        return nats + loss(unembed(head, x_BtD), *which)[0], None

    return jax.lax.scan(add, jnp.zeros(()), (x_CBtD, targets_CBt, mask_CBt))[0]


def _summed_nats_forward(functions, head, x_CBtD, targets_CBt, mask_CBt):
    unembed, loss, gradient = functions

    def add(total, chunk):
        x_BtD, *which = chunk
        logits_BtV, pull_back = jax.vjp(unembed, head, x_BtD)
        value, _ = loss(logits_BtV, *which)
        head_grad, x_grad_BtD = pull_back(gradient(logits_BtV, *which))
        return jax.tree.map(jnp.add, total, (value, head_grad)), x_grad_BtD

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, head))
    (nats, head_grad), x_grad_CBtD = jax.lax.scan(add, zero, (x_CBtD, targets_CBt, mask_CBt))
    return nats, (head_grad, x_grad_CBtD)


def _logits_gradient(logits_BtV, targets_Bt, mask_Bt, *, smoothing, log_sum_exp):
    """Return the gradient of `next_token_loss` with respect to its logits. Autodiff would scatter -1 into zeros."""
    smoothed_BtV = optax.smooth_labels(jax.nn.one_hot(targets_Bt, logits_BtV.shape[-1]), smoothing)
    log_sum_Bt1 = log_sum_exp(logits_BtV)[..., None]
    return jnp.where(mask_Bt[..., None], jnp.exp(logits_BtV - log_sum_Bt1) - smoothed_BtV, 0.0)


def _summed_nats_backward(functions, grads, scale):
    head_grad, x_grad_CBtD = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
    return head_grad, x_grad_CBtD, None, None


_summed_nats.defvjp(_summed_nats_forward, _summed_nats_backward)
