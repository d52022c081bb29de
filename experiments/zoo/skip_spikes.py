"""Skipped spikes: a step whose gradient is far larger than its predecessors' leaves parameters and optimiser as they are.

Question    Is a step better skipped than clipped, where the norm of its gradient is several times the median?
Reference   PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) restarts before a spike and skips its batches.
            The rule here is a simple one of this kind: a step is a spike if its gradient norm exceeds `skip_spikes`
            times the median of the last 128 norms of taken steps. The first 16 steps are never spikes.
Change      It wraps the optimiser that jaxgpt makes of the same fields, Muon here as in the baseline. A spike changes
            neither parameters nor moments, nor does it advance the schedule, though the logged learning rate counts it.
            The norms are 128 numbers in the optimiser's state. Clipping to a norm of 1 stays on. Each line of the log
            says as `spike` whether its step was one. The factor was not tuned.
Command     jaxgpt study experiments/zoo/skip_spikes.py
Expected    No difference: a run of 400 steps at the baseline's rates has no spikes, and clipping bounds those it has.
Result      none: it has not been studied.
Verdict     none.
"""

import dataclasses
from typing import Annotated, Any, NamedTuple

import base
import jax
import jax.numpy as jnp
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import Interval
from jaxgpt.train import Metrics, Params

NUM_NORMS = 128  # gradient norms of taken steps to keep
MIN_NORMS = 16  # norms needed before a step can be a spike


class SpikeState(NamedTuple):
    """The number of steps taken, their last gradient norms, and the state of the optimiser that is wrapped."""

    taken: jax.Array  # int32
    norms: jax.Array  # float32 [NUM_NORMS]: a ring, NaN where empty
    is_spike: jax.Array  # bool: the last step was skipped
    inner_state: Any


def skip_spikes(inner: optax.GradientTransformation, factor: float) -> optax.GradientTransformationExtraArgs:
    """Take no step if the gradient norm exceeds `factor` times the median of the last norms of taken steps."""

    def init(params: Params) -> SpikeState:
        norms = jnp.full(NUM_NORMS, jnp.nan, jnp.float32)
        return SpikeState(jnp.zeros((), jnp.int32), norms, jnp.zeros((), bool), inner.init(params))

    def update(grads: Params, state: SpikeState, params: Params, **extra: Any) -> tuple[Params, SpikeState]:
        norm = optax.tree.norm(grads)
        is_spike = (state.taken >= MIN_NORMS) & (norm > factor * jnp.nanmedian(state.norms))
        updates, inner_state = optax.with_extra_args_support(inner).update(grads, state.inner_state, params, **extra)
        norms = state.norms.at[state.taken % NUM_NORMS].set(norm)
        taken = SpikeState(state.taken + 1, norms, is_spike, inner_state)
        skipped = state._replace(is_spike=is_spike)
        state = jax.tree.map(lambda old, new: jnp.where(is_spike, old, new), skipped, taken)
        return jax.tree.map(lambda x: jnp.where(is_spike, 0.0, x), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipSpikesConfig(OptimConfig):
    """AdamW or Muon, without the steps whose gradients are spikes."""

    skip_spikes: Annotated[float, Interval(gt=1)] = 5.0  # skip gradient norms over this many times their median

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the optimiser of the same fields, which takes no step at a spike."""
        return skip_spikes(super().make_optimizer(steps, model=model), self.skip_spikes)

    def metrics(self, grads: Params, updates: Params, opt_state: Any) -> Metrics:
        """Return whether the step is a spike, as 1 or 0."""
        return {"spike": opt_state.is_spike.astype(jnp.float32)}


experiment = dataclasses.replace(
    base.experiment, name="zoo-skip-spikes", optim=SkipSpikesConfig(**dataclasses.asdict(base.experiment.optim))
)


def _variant(factor: float) -> jaxgpt.Experiment:
    return dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, skip_spikes=factor))


variants = {
    "baseline": base.experiment,
    "over 5 medians": experiment,
    "over 2 medians": _variant(2.0),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
