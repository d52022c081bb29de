"""K-Maxwell momentum: Muon reads a mixture of six running means, whose mean age falls while it trains.

Question    One decay rate gives one shape of memory. Is a mixture with a long tail, which becomes younger, better?
Reference   github.com/KellerJordan/modded-nanogpt, pull request 359 (2026-08-28) and its report at commit ed11f6a: after step
            750 of 3125 there are six running means of the gradient with ages log-spaced from 3 to 64 steps, all of which
            start as the single one. Their mixture has a mean age of 50 steps at first and 22 at the end, on a straight
            line between two sets of weights, and takes the place of the single mean in Nesterov's rule with 0.95.
            3065 steps instead of 3125.
Change      The beginning is a share of the steps (0.24). Ages are in steps, since Muon's momentum is 0.95, an age of 19, here
            as there. The report does not say which weights have a mean age: here they are the least uneven ones,
            proportional to exp(c age). It is on plain Muon with the baseline's schedule, as its older version in pull request 357 is;
            left out are the sphere of MuonH and the schedule of 351. It keeps six more copies of the matrices.
Command     jaxgpt study experiments/zoo/kmaxwell.py
Expected    see ../laptop/forecasts.py.
Result      see ../laptop/forecasts.py. The study of eight seeds has not been run.
Verdict     see ../../docs/findings/forecasts.md.
"""

import dataclasses
from typing import Annotated, Literal, NamedTuple

import base
import jax
import jax.numpy as jnp
import matrices
import numpy as np
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig, UserError
from jaxgpt.config.validate import Interval, PositiveFloat


class MixtureState(NamedTuple):
    """The number of steps taken, and the running means of the gradient."""

    count: jax.Array
    single: optax.Updates
    means: optax.Updates  # arrays [K, ...]: K running means of each matrix


def weights_of(mean_age: float, ages: np.ndarray) -> np.ndarray:
    """Return weights proportional to exp(c age) that sum to 1 and have this mean age."""
    low, high = -2.0, 2.0
    for _ in range(100):
        c = (low + high) / 2
        weights = np.exp(c * (ages - ages[-1 if c > 0 else 0]))
        weights /= weights.sum()
        low, high = (c, high) if weights @ ages < mean_age else (low, c)
    return weights


def mix_momentum(beta: float, ages: np.ndarray, first: np.ndarray, last: np.ndarray, start: int, steps: int):
    """Return Nesterov's direction of the single mean until `start` steps are taken, and then of the mixture.

    first, last: weights of the means [K] after `start` and after `steps` steps.
    """
    decays = jnp.asarray(ages / (1.0 + ages), jnp.float32)
    along = lambda vector_K, x: vector_K.reshape(-1, *[1] * x.ndim)  # noqa: E731

    def init(params: optax.Params) -> MixtureState:
        means = jax.tree.map(lambda x: jnp.zeros((len(ages), *x.shape), x.dtype), params)
        return MixtureState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), means)

    def update(updates: optax.Updates, state: MixtureState, params: optax.Params | None = None):
        count = state.count + 1
        is_mixed = count > start
        share = jnp.clip((count - start) / max(1, steps - start), 0.0, 1.0)
        weights_K = (1.0 - share) * jnp.asarray(first, jnp.float32) + share * jnp.asarray(last, jnp.float32)
        single = jax.tree.map(lambda m, g: beta * m + (1.0 - beta) * g, state.single, updates)
        corrected = jax.tree.map(lambda m: m / (1.0 - beta**count), single)

        def advance(means: jax.Array, g: jax.Array, start_as: jax.Array) -> jax.Array:
            decay = along(decays, g)
            return jnp.where(is_mixed, decay * means + (1.0 - decay) * g[None], start_as[None])

        means = jax.tree.map(advance, state.means, updates, corrected)

        def direct(g: jax.Array, m: jax.Array, means: jax.Array) -> jax.Array:
            single = beta * m / (1.0 - beta ** (count + 1)) + (1.0 - beta) * g / (1.0 - beta**count)
            mixed = beta * jnp.sum(along(weights_K, g) * means, axis=0) + (1.0 - beta) * g
            return jnp.where(is_mixed, mixed, single)

        return jax.tree.map(direct, updates, single, means), MixtureState(count, single, means)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KMaxwellConfig(OptimConfig):
    """Muon with K-Maxwell momentum for the blocks' matrices, AdamW for the rest."""

    name: Literal["adamw", "muon"] = "muon"  # muon: what the page changes
    memories: Annotated[int, Interval(ge=2, le=16)] = 6  # running means
    youngest: PositiveFloat = 3.0  # mean age of the shortest memory in steps
    oldest: PositiveFloat = 64.0
    first_age: PositiveFloat = 50.0  # mean age of the mixture at its beginning
    last_age: PositiveFloat = 22.0  # and after all steps
    mix_start: Annotated[float, Interval(ge=0, le=1)] = 0.24  # share of the steps before the mixture

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.name != "muon":
            raise UserError(f"name={self.name}: K-Maxwell changes Muon, take muon")
        if not all(self.youngest < age < self.oldest for age in (self.first_age, self.last_age)):
            raise UserError("first_age and last_age must lie between youngest and oldest")

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Muon, given the mixture in place of its momentum."""
        ages = np.geomspace(self.youngest, self.oldest, self.memories)
        first, last = (weights_of(age, ages) for age in (self.first_age, self.last_age))
        orthogonalize = optax.contrib.scale_by_muon(
            beta=0.0, nesterov=False, weight_dimension_numbers=matrices.dimension_numbers
        )
        mixture = mix_momentum(self.momentum, ages, first, last, round(self.mix_start * steps), steps)
        return matrices.muon_like(self, optax.chain(mixture, orthogonalize), steps, model)


experiment = dataclasses.replace(
    base.experiment, name="zoo-kmaxwell", optim=KMaxwellConfig(**dataclasses.asdict(base.experiment.optim))
)

variants = {"baseline": base.experiment, "kmaxwell": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
