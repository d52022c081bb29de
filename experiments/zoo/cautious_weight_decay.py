"""Cautious decay: a weight decays only where the optimiser moves it towards zero anyway; and cautious updates.

Question    Is decay better where it does not work against the update, at an equal coefficient? And are updates better
            without the elements whose sign the gradient of this batch contradicts?
Reference   Decay: Chen et al. 2025, arXiv:2510.12402, algorithm 1: x - rate (u + decay [u x >= 0] x), where u is the
            optimiser's update. Updates: Liang et al. 2024, arXiv:2411.16085, algorithm 1: u [u g > 0], divided by the
            share of elements that are kept, which here is at least 0.001.
Change      Both wrap the optimiser that jaxgpt makes of the same fields without decay, which is added last. So they
            hold for Muon's matrices and for AdamW's tables, each with its own learning rate. The baseline is Muon,
            since decay belongs to it: its updates have one size, so that without decay the weights grow and learn ever
            more slowly. Parameters and state are the baseline's. No rate was tuned: the baseline's rates and its decay
            of 0.1 hold for all variants.
Command     jaxgpt study experiments/zoo/cautious_weight_decay.py
Expected    No difference that eight seeds can see: in 400 steps the whole decay of Muon's matrices is a factor of 0.6,
            and half of it stays. Cautious updates lose 0.01, since momentum is there to average batches.
Result      At equal tokens cautious decay +0.0014 ± 0.0059; no decay +0.0014 ± 0.0065; cautious updates -0.0108 ±
            0.0133, against 1.8287 (0.0053). At 15.5 s cautious decay +0.0043 ± 0.0395; no decay -0.0188 ± 0.0479;
            cautious updates -0.0173 ± 0.0753, against 1.9055 (0.0552). Eight seeds, one core of an AMD EPYC (family 25,
            AVX-512), 2026-11-25.
Verdict     No more than noise, as expected. Nor do cautious updates lose 0.01. Other work on the machine blurred the
            seconds.
"""

import dataclasses
from typing import Any, NamedTuple

import base
import jax
import jax.numpy as jnp
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.optim import relative_schedule


class CautiousState(NamedTuple):
    """The number of steps taken, and the state of the optimiser that is wrapped."""

    count: jax.Array
    inner_state: Any


def decay_where_it_agrees(update: jax.Array, x: jax.Array, decay: jax.Array | float) -> jax.Array:
    """Add decay to an update, which is to be added to x, where both have the direction of zero."""
    return update - decay * jnp.where(update * x <= 0.0, x, 0.0)


def decay_everywhere(update: jax.Array, x: jax.Array, decay: jax.Array | float) -> jax.Array:
    """Add decay to an update."""
    return update - decay * x


def keep_where_it_agrees(update: jax.Array, grad: jax.Array) -> jax.Array:
    """Return an update without the elements that climb the gradient, the others scaled up by the share kept."""
    is_kept = update * grad < 0.0
    return jnp.where(is_kept, update, 0.0) / jnp.maximum(is_kept.mean(), 1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CautiousConfig(OptimConfig):
    """AdamW or Muon, with decay and updates that give way to each other."""

    cautious_decay: bool = True  # decay only where the update has the direction of zero
    cautious_updates: bool = False  # drop the elements of the update that climb this batch's gradient

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the optimiser of the same fields without decay, and then what is cautious."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(OptimConfig)}
        inner = OptimConfig(**fields | {"weight_decay": 0.0}).make_optimizer(steps, model=model)
        rates = {"vector": 0.0, "table": self.learning_rate, "matrix": self.learning_rate}
        if self.name == "muon":
            rates["matrix"] = self.muon_learning_rate
        relative = relative_schedule(self, steps)

        def update(grads, state, params, **extra):
            updates, inner_state = optax.with_extra_args_support(inner).update(
                grads, state.inner_state, params, **extra
            )
            if self.cautious_updates:
                updates = jax.tree.map(keep_where_it_agrees, updates, grads)
            decay_one = decay_where_it_agrees if self.cautious_decay else decay_everywhere
            decay, labels = self.weight_decay * relative(state.count), matrices.choose(model)(params)
            updates = jax.tree.map(lambda u, x, label: decay_one(u, x, decay * rates[label]), updates, params, labels)
            return updates, CautiousState(state.count + 1, inner_state)

        return optax.GradientTransformationExtraArgs(
            lambda params: CautiousState(jnp.zeros((), jnp.int32), inner.init(params)), update
        )


experiment = dataclasses.replace(
    base.experiment, name="zoo-cautious-weight-decay", optim=CautiousConfig(**dataclasses.asdict(base.experiment.optim))
)


def _variant(**fields: Any) -> jaxgpt.Experiment:
    return dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, **fields))


variants = {
    "baseline": base.experiment,
    "cautious decay": experiment,
    "no decay": _variant(weight_decay=0.0),
    "cautious updates": _variant(cautious_decay=False, cautious_updates=True),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
