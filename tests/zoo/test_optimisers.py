"""experiments/zoo, optimisers: three steps of each against NumPy, written from the papers; labels; what is evaluated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig, by_rank, make_optimizer
from tests.helpers import import_pages

cautious, ema_tail, line_search, lion, normuon, polar, schedule_free, spikes, soap = import_pages(
    "zoo",
    "cautious_weight_decay",
    "ema_tail",
    "line_search",
    "lion",
    "normuon",
    "polar_express",
    "schedule_free",
    "skip_spikes",
    "soap",
)

MODEL = GPTConfig()
# float32 against float64, through a few square roots and products.
CLOSE = dict(rtol=2e-4, atol=2e-6)
PLAIN = dict(schedule="constant", warmup_steps=0, grad_clip=None, learning_rate=0.01, muon_learning_rate=0.02)
MATRIX, TABLE, VECTOR = ("h_0", "mlp", "kernel"), ("wte", "embedding"), ("h_0", "ln_1", "scale")
SHAPES = {MATRIX: (4, 4), TABLE: (5, 4), VECTOR: (4,)}
DECAYED = {MATRIX: 0.5, TABLE: 0.5, VECTOR: 0.0}


def tree(values):
    """A tree of parameters by the paths of their names."""
    return {
        "h_0": {"mlp": {"kernel": values[MATRIX]}, "ln_1": {"scale": values[VECTOR]}},
        "wte": {"embedding": values[TABLE]},
    }


def flat(params):
    return {
        path: np.asarray(params[path[0]][path[1]] if path == TABLE else params[path[0]][path[1]][path[2]])
        for path in SHAPES
    }


def draw(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=shape) for path, shape in shapes.items()}


def take_steps(config, steps=3, shapes=SHAPES):
    """(parameters after each step, their `eval_params`), with gradients that are drawn."""
    optimizer = config.make_optimizer(steps, model=MODEL)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree(draw(0, shapes)))
    state, found, evaluated = optimizer.init(params), [], []
    update = jax.jit(optax.with_extra_args_support(optimizer).update)
    for step in range(steps):
        grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree(draw(step + 1, shapes)))
        updates, state = update(grads, state, params, value=jnp.zeros(()))
        params = optax.apply_updates(params, updates)
        found.append(flat(params))
        evaluated.append(flat(config.eval_params(state, params)))
    return found, evaluated


def adam(b1, b2, eps=1e-8, *, first=1):
    """NumPy's Adam: (gradient, number of the step) -> update, for one parameter."""
    m = v = 0.0

    def step(g, t):
        nonlocal m, v
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        return m / (1 - b1 ** (t + first)) / (np.sqrt(v / (1 - b2 ** (t + first))) + eps)

    return step


def test_lion_is_algorithm_2():
    found, _ = take_steps(lion.LionConfig(**PLAIN, weight_decay=0.5, beta1=0.9, beta2=0.99))
    for path, x in draw(0).items():
        m = np.zeros(SHAPES[path])
        for step, after in enumerate(found):
            g = draw(step + 1)[path]
            x = x - 0.01 * (np.sign(0.9 * m + 0.1 * g) + DECAYED[path] * x)
            m = 0.99 * m + 0.01 * g
            np.testing.assert_allclose(after[path], x, **CLOSE)


def test_schedule_free_is_algorithm_1():
    """With a warm-up, since the average weighs the iterates by the learning rate."""
    config = schedule_free.ScheduleFreeConfig(**PLAIN | {"warmup_steps": 2}, weight_decay=0.5, beta1=0.9, beta2=0.99)
    rates = [0.01 / 3, 0.02 / 3, 0.01, 0.01]
    found, evaluated = take_steps(config, steps=4)
    for path, z in draw(0).items():
        x, y, total, precondition = z, z, 0.0, adam(0.0, 0.99)
        for step, rate in enumerate(rates):
            z = z - rate * (precondition(draw(step + 1)[path], step) + DECAYED[path] * y)
            total += rate**2
            x = x + rate**2 / total * (z - x)
            y = 0.1 * z + 0.9 * x
            np.testing.assert_allclose(found[step][path], y, **CLOSE)
            np.testing.assert_allclose(evaluated[step][path], x, **CLOSE)


@pytest.mark.parametrize(("decay", "updates"), [(True, False), (False, True), (True, True), (False, False)])
def test_cautious_decay_and_updates(decay, updates):
    config = cautious.CautiousConfig(
        **PLAIN, weight_decay=0.5, beta1=0.9, beta2=0.99, cautious_decay=decay, cautious_updates=updates
    )
    found, _ = take_steps(config)
    for path, x in draw(0).items():
        optimizer = adam(0.9, 0.99)
        for step, after in enumerate(found):
            g = draw(step + 1)[path]
            u = optimizer(g, step)
            if updates:
                u = u * (u * g > 0) / np.maximum(np.mean(u * g > 0), 1e-3)
            u = u + DECAYED[path] * (np.where(u * x >= 0, x, 0.0) if decay else x)
            x = x - 0.01 * u
            np.testing.assert_allclose(after[path], x, **CLOSE)


def test_the_average_begins_at_the_tail():
    config = ema_tail.TailAverageConfig(**PLAIN, ema_decay=0.75, ema_start=0.4)
    plain, _ = take_steps(OptimConfig(**PLAIN), steps=5)
    found, evaluated = take_steps(config, steps=5)
    for path in SHAPES:
        average = plain[1][path]
        for step in range(5):
            np.testing.assert_array_equal(found[step][path], plain[step][path])
            average = plain[step][path] if step < 2 else 0.75 * average + 0.25 * plain[step][path]
            np.testing.assert_allclose(evaluated[step][path], average, **CLOSE)


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


def test_a_step_is_halved_until_the_loss_of_its_batch_falls():
    """From 0.1 down a parabola: steps of 1, 1/2 and 1/4 end higher up on its other side."""
    optimizer = line_search.search_line(10, 1.0)
    state = optimizer.init(jnp.zeros(()))
    value_and_grad = jax.value_and_grad(lambda x: 50.0 * x**2)
    step, state = optimizer.update(jnp.float32(-1.0), state, jnp.float32(0.1), value_and_grad=value_and_grad)
    assert float(step) == -0.125
    assert line_search.LineSearchConfig().metrics({}, {}, (None, state)) == {"length": 0.125}


def orthogonalize(x, coefficients):
    """Newton-Schulz by singular values, which is what its products of matrices amount to."""
    u, s, vt = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


def nesterov(beta=0.95):
    """The momentum of Optax's Muon: (gradient, number of the step) -> direction before orthogonalisation."""
    m = 0.0

    def step(g, t):
        nonlocal m
        m = beta * m + (1 - beta) * g
        return beta * m / (1 - beta ** (t + 2)) + (1 - beta) * g / (1 - beta ** (t + 1))

    return step


WIDE = SHAPES | {MATRIX: (3, 6)}


def test_normuon_is_algorithm_1_with_columns_as_neurons():
    found, _ = take_steps(normuon.NorMuonConfig(**PLAIN, weight_decay=0.5, neuron_decay=0.75), shapes=WIDE)
    x, v, momentum = draw(0, WIDE)[MATRIX], 0.0, nesterov()
    for step, after in enumerate(found):
        o = orthogonalize(momentum(draw(step + 1, WIDE)[MATRIX], step), [(3.4445, -4.7750, 2.0315)] * 5)
        v = 0.75 * v + 0.25 * np.mean(o * o, axis=0)  # of each output, a column of [inputs, outputs]
        divided = o / np.sqrt(v)
        o = divided * np.linalg.norm(o) / np.linalg.norm(divided)
        x = x - 0.02 * (np.sqrt(6 / 3) * o + 0.5 * x)
        np.testing.assert_allclose(after[MATRIX], x, **CLOSE)


def test_without_its_own_direction_muon_like_is_muon():
    """Newton-Schulz's polynomial in the page's place, so that all that differs between the pages and Muon is theirs."""
    config = OptimConfig(**PLAIN, name="muon", weight_decay=0.5, beta2=0.9)
    direction = optax.contrib.scale_by_muon(weight_dimension_numbers=normuon.matrices.dimension_numbers)
    ours = normuon.matrices.muon_like(config, direction, 3, MODEL)
    theirs = make_optimizer(config, 3, label_parameter=by_rank)
    params = jax.tree.map(jnp.asarray, tree(draw(0, WIDE)))
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for step in range(3):
        grads = jax.tree.map(jnp.asarray, tree(draw(step + 1, WIDE)))
        (first, states[0]), (second, states[1]) = (
            ours.update(grads, states[0], params),
            theirs.update(grads, states[1], params),
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), first, second)


# Algorithm 1 of arXiv:2505.16932, before the division by the safety factor.
PAPER = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
]


def test_polar_express_has_the_coefficients_of_the_paper():
    safe = np.array(PAPER) / np.vstack([1.01 ** np.array([[1, 3, 5]])] * 7 + [np.ones((1, 3))])
    np.testing.assert_allclose(polar.polar_express(8, 1e-3), safe, rtol=1e-6)


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
