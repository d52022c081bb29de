"""experiments/zoo, optimisers: three steps of each against NumPy, written from the papers; labels; what is evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxgpt.model import GPTConfig
from tests.helpers import import_pages
from tests.test_optim import newton_schulz

lion, normuon, schedule_free, spikes, soap = import_pages(
    "zoo", "lion", "normuon", "schedule_free", "skip_spikes", "soap"
)

MODEL = GPTConfig()
# float32 against float64, through a few square roots and products.
CLOSE = dict(rtol=2e-4, atol=2e-6)
PLAIN = dict(schedule="constant", warmup_steps=0, grad_clip=None, learning_rate=0.01, muon_learning_rate=0.02)
MATRIX, TABLE, VECTOR = ("h_0", "mlp", "kernel"), ("wte", "embedding"), ("h_0", "ln_1", "scale")
SHAPES = {MATRIX: (4, 4), TABLE: (5, 4), VECTOR: (4,)}
DECAYED = {MATRIX: 0.5, TABLE: 0.5, VECTOR: 0.0}


def draw(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape) for path, shape in shapes.items()}


def tree(*drawn):
    """What is drawn, as parameters or gradients."""
    return unflatten_dict({path: jnp.asarray(x, jnp.float32) for path, x in draw(*drawn).items()})


def take_steps(config, steps=3, shapes=SHAPES):
    """(parameters after each step, their `eval_params`), with gradients that are drawn."""
    optimizer = config.make_optimizer(steps, model=MODEL)
    params = tree(0, shapes)
    state, found, evaluated = optimizer.init(params), [], []
    update = jax.jit(optax.with_extra_args_support(optimizer).update)
    for step in range(steps):
        updates, state = update(tree(step + 1, shapes), state, params, value=jnp.zeros(()))
        params = optax.apply_updates(params, updates)
        found.append(flatten_dict(params))
        evaluated.append(flatten_dict(config.eval_params(state, params)))
    return found, evaluated


def test_lion_is_algorithm_2():
    found, _ = take_steps(lion.LionConfig(**PLAIN, weight_decay=0.5, beta1=0.9, beta2=0.99))
    for path, x in draw(0).items():
        m = np.zeros(SHAPES[path])
        for step, after in enumerate(found):
            g = draw(step + 1)[path]
            x = x - 0.01 * (np.sign(0.9 * m + 0.1 * g) + DECAYED[path] * x)
            m = 0.99 * m + 0.01 * g
            np.testing.assert_allclose(after[path], x, **CLOSE)


def test_spikes_are_judged_by_the_median_of_the_steps_taken():
    """Against the same in NumPy, over more norms than are remembered. Of the steps that are not taken nothing stays."""
    add_one = optax.stateless(lambda updates, _: jax.tree.map(jnp.ones_like, updates))
    optimizer = spikes.skip_spikes(optax.chain(add_one, optax.scale_by_schedule(lambda count: count + 1.0)), 3.0)
    update = jax.jit(optimizer.update)
    norms = np.exp(np.random.default_rng(0).normal(size=3 * spikes.NUM_NORMS)).astype(np.float32)
    norms[[5, 200, spikes.MIN_NORMS]] = 1e6  # the first is too early to be judged, the last is the first that is
    state, taken = optimizer.init(jnp.zeros(())), []
    for norm in norms:
        is_spike = len(taken) >= spikes.MIN_NORMS and norm > 3.0 * np.median(taken[-spikes.NUM_NORMS :])
        taken += [] if is_spike else [norm]
        step, state = update(jnp.float32(norm), state, jnp.zeros(()))
        assert (bool(state.is_spike), float(step)) == (is_spike, 0.0 if is_spike else len(taken))
    assert len(norms) - len(taken) > 30 and taken.count(1e6) == 1
    assert spikes.SkipSpikesConfig().metrics({}, {}, state) == {"spike": float(is_spike)}


WIDE = SHAPES | {MATRIX: (3, 6)}


def test_normuon_is_algorithm_1_with_columns_as_neurons():
    found, _ = take_steps(normuon.NorMuonConfig(**PLAIN, weight_decay=0.5, neuron_decay=0.75), shapes=WIDE)
    x, v, m = draw(0, WIDE)[MATRIX], 0.0, 0.0
    for step, after in enumerate(found):
        g = draw(step + 1, WIDE)[MATRIX]
        m = 0.95 * m + 0.05 * g
        o = newton_schulz(0.95 * m / (1 - 0.95 ** (step + 2)) + 0.05 * g / (1 - 0.95 ** (step + 1)))
        v = 0.75 * v + 0.25 * np.mean(o * o, axis=0)  # of each output, a column of [inputs, outputs]
        divided = o / np.sqrt(v)
        o = divided * np.linalg.norm(o) / np.linalg.norm(divided)
        x = x - 0.02 * (np.sqrt(6 / 3) * o + 0.5 * x)
        np.testing.assert_allclose(after[MATRIX], x, **CLOSE)


def test_soap_is_algorithm_3():
    """With a basis that is refreshed in every second step. Signs of eigenvectors cancel."""
    config = soap.SoapConfig(**PLAIN, weight_decay=0.5, beta1=0.9, beta2=0.95, refresh_every=2)
    found, _ = take_steps(config, steps=5)
    for path in (MATRIX, TABLE):
        x, m, v, left, right = draw(0)[path], 0.0, 0.0, 0.0, 0.0
        q_left = q_right = np.zeros(())
        for step, after in enumerate(found):
            g = draw(step + 1)[path]
            update = np.zeros_like(g)
            if step:
                m = 0.9 * m + 0.1 * g
                v = 0.95 * v + 0.05 * (q_left.T @ g @ q_right) ** 2
                rotated = q_left.T @ m @ q_right / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
                update = q_left @ rotated @ q_right.T
            left, right = 0.95 * left + 0.05 * g @ g.T, 0.95 * right + 0.05 * g.T @ g
            if not step:
                q_left, q_right = (np.linalg.eigh(x)[1][:, ::-1] for x in (left, right))
            elif step % 2 == 0:
                order = np.argsort(-np.diag(q_left.T @ left @ q_left))
                q_left, v = np.linalg.qr(left @ q_left[:, order])[0], v[order]
                order = np.argsort(-np.diag(q_right.T @ right @ q_right))
                q_right, v = np.linalg.qr(right @ q_right[:, order])[0], v[:, order]
            x = x - 0.01 * (update + 0.5 * x)
            np.testing.assert_allclose(after[path], x, rtol=2e-3, atol=2e-5)
