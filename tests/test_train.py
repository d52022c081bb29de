"""Invariants of the step: accumulation, resumption, donation, recompilation, and that it learns."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.batch import Batch
from jaxgpt.errors import UserError
from jaxgpt.loss import make_loss
from jaxgpt.model import GPT
from jaxgpt.optim import OptimConfig, learning_rate, make_optimizer
from jaxgpt.parallel.strategy import make_single
from jaxgpt.train import eval_step, init_state, train_step
from tests.helpers import TINY, tokens_BT

OPTIM = OptimConfig(learning_rate=1e-2, warmup_steps=2)
CONFIG = dataclasses.replace(TINY, n_layer=1)
STEPS = 8


@functools.cache
def make_step(config=CONFIG, optim=OPTIM, grad_accum_steps=1):
    """(step, its compiled form, the state of step 0); compiled once for all tests of this file."""
    model, optimizer = GPT(config), make_optimizer(optim, STEPS)
    step = functools.partial(
        train_step,
        loss_fn=make_loss(model),
        optimizer=optimizer,
        schedule=learning_rate(optim, STEPS),
        grad_accum_steps=grad_accum_steps,
    )
    state = jax.jit(functools.partial(init_state, model, optimizer))(jax.random.key(0))
    return step, jax.jit(step), state


def make_batch(mask=None):
    text_BT1 = tokens_BT(dataclasses.replace(CONFIG, block_size=CONFIG.block_size + 1), 4)
    mask = jnp.ones((4, CONFIG.block_size), bool) if mask is None else mask
    return Batch(inputs_BT=text_BT1[:, :-1], targets_BT=text_BT1[:, 1:], mask_BT=mask)


def run(compiled, state, steps=STEPS, batch=None):
    """Losses of some steps on one batch, and the state after them."""
    losses = []
    batch = make_batch() if batch is None else batch
    for _ in range(steps):
        state, metrics = compiled(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    return losses, state


# Sums of float32 in another order, through Adam, whose first steps are sign-like: 1e-4 of the learning rate's size.
ACCUMULATION_TOLERANCE = dict(rtol=1e-4, atol=1e-6)


def test_accumulation_equals_one_big_batch():
    """Also when the micro-batches have different numbers of targets. And it learns."""
    mask = np.ones((4, CONFIG.block_size), bool)
    mask[0, :5], mask[3] = False, False
    batch = make_batch(jnp.asarray(mask))
    one, _ = run(*make_step()[1:], batch=batch)
    four, _ = run(*make_step(grad_accum_steps=4)[1:], batch=batch)
    np.testing.assert_allclose(one, four, **ACCUMULATION_TOLERANCE)
    assert one[-1] < one[0] - 0.15


def test_micro_batches_draw_their_own_dropout():
    """Two equal micro-batches lose differently: rows 0 and 2 are one, rows 1 and 3 the other."""
    twins = jax.tree.map(lambda x: jnp.repeat(x[:2], 2, axis=0), make_batch())
    _, compiled, state = make_step(dataclasses.replace(CONFIG, dropout=0.5), grad_accum_steps=2)
    first = jnp.zeros((4, CONFIG.block_size), bool).at[::2].set(True)
    masked = (twins._replace(mask_BT=mask) for mask in (first, ~first))
    losses = {float(compiled(state, half, jax.random.key(1))[1]["loss"]) for half in masked}
    assert len(losses) == 2


def test_a_metric_with_a_name_of_ours_is_refused():
    step, _, state = make_step()
    with pytest.raises(UserError, match="'val_loss', as one of jaxgpt's: rename it"):
        jax.eval_shape(
            functools.partial(step, report=lambda *_: {"val_loss": 1.0}), state, make_batch(), jax.random.key(0)
        )


def test_a_batch_without_targets_is_no_nan():
    _, compiled, state = make_step()
    batch = make_batch(jnp.zeros((4, CONFIG.block_size), bool))
    state, metrics = compiled(state, batch, jax.random.key(1))
    assert float(metrics["loss"]) == 0.0
    chex.assert_tree_all_finite(state.params)


def test_every_step_draws_its_own_dropout():
    _, compiled, state = make_step(dataclasses.replace(CONFIG, dropout=0.5), grad_accum_steps=2)
    losses = {float(compiled(state.replace(step=t), make_batch(), jax.random.key(1))[1]["loss"]) for t in jnp.arange(3)}
    assert len(losses) == 3


def test_gradients_are_those_of_the_mean_loss():
    """Adam forgets the scale of its gradients, so look at their norm."""
    _, compiled, state = make_step()
    mask = jnp.ones((4, CONFIG.block_size), bool).at[0].set(False)
    batch = make_batch(mask)

    def mean_loss(params):
        nats, count = eval_step(params, batch, loss_fn=make_loss(GPT(CONFIG)))
        return nats / count

    expected = optax.tree.norm(jax.jit(jax.grad(mean_loss))(state.params))
    assert float(compiled(state, batch, jax.random.key(1))[1]["grad_norm"]) == pytest.approx(float(expected), rel=1e-4)


def test_one_compilation_and_donated_state():
    step, _, state = make_step()
    state = jax.tree.map(jnp.copy, state)
    chex.clear_trace_counter()
    traced = chex.assert_max_traces(functools.wraps(train_step)(lambda *args: step(*args)), n=1)
    compiled = make_single().jit_train_step(traced, None, False)
    for seed in range(3):
        before = state
        state, _ = compiled(state, make_batch(), jax.random.key(seed))
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))


def poisoned(batch):
    """With one target outside the vocabulary, whose loss is NaN."""
    return batch._replace(targets_BT=batch.targets_BT.at[1, 2].set(CONFIG.vocab_size))


def test_a_step_that_is_not_finite_is_as_if_it_had_not_been():
    """Parameters and optimiser bit for bit; only the batches go on, and the learning rate waits."""
    _, compiled, state = make_step(grad_accum_steps=4)
    key, batch = jax.random.key(1), make_batch()
    _, one = run(compiled, state, 3)
    bad, told = compiled(one, poisoned(batch), key)
    assert not np.isfinite(float(told["loss"]))
    assert int(told["skipped_in_a_row"]) == 1
    chex.assert_trees_all_equal((bad.params, bad.opt_state), (one.params, one.opt_state))
    assert (int(bad.step), int(bad.skipped)) == (4, 1)
    bad, told = compiled(bad, poisoned(batch), key)
    assert int(told["skipped_in_a_row"]) == 2
    after, told = compiled(bad, batch, key)
    expected, as_told = compiled(one, batch, key)
    chex.assert_trees_all_equal((after.params, after.opt_state), (expected.params, expected.opt_state))
    assert (int(told["skipped_in_a_row"]), int(after.skipped)) == (0, 2)
    assert float(told["learning_rate"]) == float(as_told["learning_rate"])
