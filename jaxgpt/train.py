"""One training step, as pure functions. Transformations (jit, donation, devices) are applied in `parallel`."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxgpt.batch import Batch
from jaxgpt.config import NO_LORA, LoraConfig
from jaxgpt.lora import init_adapters, merged
from jaxgpt.loss import chunked_next_token_loss, next_token_loss
from jaxgpt.model import GPT

WINDOW = 128  # gradient norms of taken steps that the guard remembers
ENOUGH = 16  # of them, before another one can be called a spike
TAKEN, NOT_FINITE, SPIKE = range(3)  # what became of a step: its metrics["skipped"]


@struct.dataclass
class Guard:
    """What skipped steps leave behind: parameters and optimiser do not know of them."""

    skipped: jax.Array  # int32: steps skipped so far
    in_row: jax.Array  # int32: of them, those since the last one that was taken
    norms: jax.Array  # float32 [WINDOW]: gradient norms of the last steps taken, in a ring; NaN: none yet

    @staticmethod
    def new() -> "Guard":
        # An array for each, since each is donated.
        skipped, in_row = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return Guard(skipped=skipped, in_row=in_row, norms=jnp.full(WINDOW, jnp.nan))


@struct.dataclass
class TrainState:
    """All that changes from step to step; with the experiment and the data it is the whole run."""

    step: jax.Array  # int32: batches seen, of which all but `guard.skipped` moved the parameters
    params: Any  # float32: all those that are trained
    opt_state: optax.OptState
    guard: Guard
    base: Any = None  # where `params` are adapters, the parameters that they are of, which stay; see `whole`


def run_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """A run's two keys: of its parameters, and of its dropout."""
    init_key, dropout_key = jax.random.split(jax.random.key(seed))
    return init_key, dropout_key


def init_state(
    model: GPT,
    optimizer: optax.GradientTransformation,
    key: jax.Array,
    params: Any = None,
    *,
    lora: LoraConfig = NO_LORA,
) -> TrainState:
    """The state of step 0. params: of the model, to start from; None: drawn from the key alone, whatever the batch."""
    base = None
    if params is None:
        params = model.init(key, jnp.zeros((1, 1), jnp.int32))["params"]
    if lora.rank is not None:
        base, params = params, init_adapters(lora, jax.random.fold_in(key, 1), params)
    return TrainState(
        step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params), guard=Guard.new(), base=base
    )


def whole(state: TrainState, *, lora: LoraConfig) -> Any:
    """The parameters as the model takes them."""
    return state.params if state.base is None else merged(lora, state.base, state.params)


def train_step(
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    *,
    model: GPT,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    lora: LoraConfig = NO_LORA,
    accumulation: int = 1,
    loss_chunk: int | None = None,
    label_smoothing: float = 0.0,
    skip_spikes: float | None = None,
    mean: Callable[[Any], Any] = lambda sums: sums,
) -> tuple[TrainState, dict[str, Any]]:
    """One optimiser step on one batch -> (state, metrics: scalars).

    metrics: "loss", "grad_norm", "learning_rate" (which the optimiser used, or would have), and those of `judged`.
    A step that `judged` skips leaves parameters and optimiser as they were; `step` advances, and the data with it.

    key: the run's; dropout in step t uses `fold_in(key, t)`, so that a resumed run draws what an uninterrupted
    one would. accumulation: micro-batches, run one after the other; gradients are summed, then divided by the
    number of targets, so the result is that of one big batch. loss_chunk: see `batch_loss`.
    mean: over the devices that hold the other parts of the batch, where each runs this function by itself.

    The same state, batch and key give the same bits on CPU, which tests hold. On GPU nothing asks for deterministic
    operations: the gradient of an embedding adds rows in any order there, cuDNN's backward pass may, and another process
    may choose other kernels for its products. XLA_FLAGS=--xla_gpu_deterministic_ops=true asks for them; untried.
    """
    step_key = jax.random.fold_in(key, state.step)

    def gradients(micro: Batch, index) -> tuple:
        micro_key = jax.random.fold_in(step_key, index)

        def loss(params) -> tuple[jax.Array, jax.Array]:
            params = whole(dataclasses.replace(state, params=params), lora=lora)
            return batch_loss(
                params, micro, micro_key, model=model, loss_chunk=loss_chunk, label_smoothing=label_smoothing
            )

        (nats, count), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return nats, count, grads

    if accumulation == 1:
        sums = gradients(batch, 0)
    else:
        micros = micro_batches(batch, accumulation)
        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
        sums, _ = jax.lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, gradients(*x)), None),
            zero,
            (micros, jnp.arange(accumulation)),
        )

    nats, count, grads = mean(sums)
    count = jnp.where(count > 0, count, 1.0)  # a batch whose every target is masked teaches nothing, and is no NaN
    grads = jax.tree.map(lambda g: g / count, grads)
    loss, norm = nats / count, optax.tree.norm(grads)
    guard, verdict = judged(state.guard, state.step, loss, norm, skip_spikes=skip_spikes)

    # The optimiser counts the steps that it takes, and its schedule follows that count.
    rate = schedule(state.step - state.guard.skipped)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    new = (optax.apply_updates(state.params, updates), opt_state)
    old = (state.params, state.opt_state)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(verdict["skipped"] == TAKEN, new, old), new, old)
    state = dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state, guard=guard)
    return state, {"loss": loss, "grad_norm": norm, "learning_rate": rate} | verdict


def judged(
    guard: Guard, step: jax.Array, loss: jax.Array, norm: jax.Array, *, skip_spikes: float | None
) -> tuple[Guard, dict[str, jax.Array]]:
    """(the guard after this step, {"skipped": TAKEN, NOT_FINITE or SPIKE, "in_row": steps skipped in a row}).

    A finite gradient norm is enough for finite updates: it bounds the squares that Adam keeps, and OptimConfig bounds
    what multiplies them. To look at the updates too takes 1.4 ms of nanoGPT's CPU configuration, 2.5% of its step.
    skip_spikes: how many times the median of the last WINDOW norms is too much; the metrics have that "median" then.
    None: any is taken.
    """
    count = step - guard.skipped
    skipped = jnp.where(jnp.isfinite(loss) & jnp.isfinite(norm), TAKEN, NOT_FINITE)
    told = {}
    if skip_spikes is not None:
        told["median"] = jnp.nanmedian(guard.norms)
        spike = (count >= ENOUGH) & (norm > skip_spikes * told["median"])
        skipped = jnp.where(spike & (skipped == TAKEN), SPIKE, skipped)
    taken = skipped == TAKEN
    guard = Guard(
        skipped=jnp.where(taken, guard.skipped, guard.skipped + 1),
        in_row=jnp.where(taken, 0, guard.in_row + 1),
        norms=jnp.where(taken, guard.norms.at[count % WINDOW].set(norm), guard.norms),
    )
    return guard, {"skipped": skipped, "in_row": guard.in_row} | told


def micro_batches(batch: Batch, accumulation: int) -> Batch:
    """The same rows with a first axis of turns: each has every accumulation-th row.

    Where the rows lie on different devices, each keeps its own.
    """
    return jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)


def batch_loss(
    params: Any,
    micro: Batch,
    key: jax.Array | None,
    *,
    model: GPT,
    loss_chunk: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """(summed nats, number of targets) of one batch; key: of dropout, None for none.

    loss_chunk: tokens of each sequence whose logits are in memory at once, a divisor of T; None: all.
    label_smoothing: see `next_token_loss`.
    """
    how: Any = {
        "train": key is not None,
        "rngs": None if key is None else {"dropout": key},
        "segments_BT": micro.segments_BT,
        "source_BS": micro.source_BS,
        "source_segments_BS": micro.source_segments_BS,
    }
    if loss_chunk is None or loss_chunk >= micro.targets_BT.shape[1]:
        logits_BTV: Any = model.apply({"params": params}, micro.inputs_BT, **how)
        return next_token_loss(logits_BTV, micro.targets_BT, micro.mask_BT, smoothing=label_smoothing)
    x_BTD: Any = model.apply({"params": params}, micro.inputs_BT, method="features", **how)

    def unembed(head: Any, x_BTD: jax.Array) -> jax.Array:
        logits_BTV: Any = model.apply({"params": head}, x_BTD, method="unembed")
        return logits_BTV

    head = {name: params[name] for name in model.head}
    sums = model.sharding.reduce_loss(
        functools.partial(chunked_next_token_loss, unembed, chunk=loss_chunk, smoothing=label_smoothing)
    )
    return sums(head, x_BTD, micro.targets_BT, micro.mask_BT)


def eval_step(params: Any, batch: Batch, *, model: GPT, loss_chunk: int | None = None) -> tuple[jax.Array, jax.Array]:
    """(summed nats, number of targets) of one batch, without dropout."""
    return batch_loss(params, batch, None, model=model, loss_chunk=loss_chunk)


def mean_loss(eval_step: Callable, params: dict, batches: Iterable[Batch]) -> tuple[float, int]:
    """(nats per target, number of targets) over all batches; eval_step as `train.eval_step`, compiled.

    Sums are added in float64 on the host, so that a million windows lose nothing.
    """
    nats, count = 0.0, 0.0
    pending: deque = deque()
    for batch in batches:
        pending.append(eval_step(params, batch))
        if len(pending) > 2:  # at most two in flight, see `in_flight`
            batch_nats, batch_count = pending.popleft()
            nats, count = nats + float(batch_nats), count + float(batch_count)
    for batch_nats, batch_count in pending:
        nats, count = nats + float(batch_nats), count + float(batch_count)
    assert count, "no targets to evaluate on"
    return nats / count, int(count)
