"""A tail average: the model is an exponential moving average of the parameters over the last part of training.

Question    Is the average of the last iterates better than the last one, where the learning rate decays to zero? And
            can it take the place of that decay?
Reference   Polyak and Juditsky 1992; Izmailov et al. 2018, arXiv:1803.05407, and Busbridge et al. 2023,
            arXiv:2307.13813, for the exponential form. The page's formula: from step `ema_start` times all steps on,
            average = ema_decay average + (1 - ema_decay) parameters, after each step.
Change      It wraps the optimiser that jaxgpt makes of the same fields, Muon here as in the baseline. Training does not
            see the average: only `eval_params` returns it, to be validated, saved and sampled. Before the tail begins
            it is a copy of the parameters. It costs one more copy of the parameters in memory. The decay was chosen by
            the validation loss of seed 0 after 200 steps: with the schedule's decay 0.95 and 0.98 give 1.9474 and
            1.9545, where the baseline has 1.9537; with a constant rate 0.95, 0.98 and 0.99 give 1.9568, 1.9568 and
            1.9801, all at Muon's rate 0.02. (At 0.01, the rate of the zoo, the baseline has 1.9400.) The tail is the second half of the
            steps throughout; no other was tried, and no rate. (AMD EPYC, two cores, 2026-11-24.)
Command     jaxgpt study experiments/zoo/ema_tail.py
Expected    Less than 0.005 gained on top of the schedule's decay, which averages by itself, and with a constant rate
            most of what the decay gains.
Result      At equal tokens average +0.0010 ± 0.0020; average, no decay +0.0206 ± 0.0105; no average, no decay +0.0963 ±
            0.0206, against 1.8287 (0.0053). At 15.7 s average +0.0034 ± 0.0150; average, no decay +0.0173 ± 0.0213; no
            average, no decay +0.0841 ± 0.0216, against 1.8448 (0.0184). Eight seeds, one core of an AMD EPYC (family
            25, AVX-512), 2026-11-25.
Verdict     No more than noise on top of the decay, as expected. At a constant rate the average gains four fifths of
            what decay gains.
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
from jaxgpt.optim import Decay
from jaxgpt.train import Params


class AverageState(NamedTuple):
    """The number of steps taken, and the average of the parameters after them."""

    count: jax.Array
    average: Params


def track_average(decay: float, start: int) -> optax.GradientTransformation:
    """Average the parameters that the updates lead to, after more than `start` steps. The updates stay as they are."""

    def init(params: Params) -> AverageState:
        # Copies: the step donates the parameters and this state, and a buffer can be donated once.
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.copy, params))

    def update(updates: Params, state: AverageState, params: Params) -> tuple[Params, AverageState]:
        count = state.count + 1
        keep = jnp.where(count > start, decay, 0.0)
        new = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda old, x: keep * old + (1.0 - keep) * x, state.average, new)
        return updates, AverageState(count, average)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailAverageConfig(OptimConfig):
    """AdamW or Muon, evaluated at an average of its last iterates."""

    ema_decay: Decay = 0.95  # weight of the old average; 1 / (1 - it) is about the number of steps that are averaged
    ema_start: Annotated[float, Interval(ge=0, le=1)] = 0.5  # share of the steps before the average begins

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the optimiser of the same fields, and then the average."""
        start = round(self.ema_start * steps)
        return optax.chain(super().make_optimizer(steps, model=model), track_average(self.ema_decay, start))

    def eval_params(self, opt_state: Any, params: Params) -> Params:
        """Return the average."""
        return opt_state[-1].average


experiment = dataclasses.replace(
    base.experiment, name="zoo-ema-tail", optim=TailAverageConfig(**dataclasses.asdict(base.experiment.optim))
)


def _constant(optim: OptimConfig) -> jaxgpt.Experiment:
    return dataclasses.replace(experiment, optim=dataclasses.replace(optim, schedule="constant"))


variants = {
    "baseline": base.experiment,
    "average": experiment,
    "average, no decay": _constant(experiment.optim),
    "no average, no decay": _constant(base.experiment.optim),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
