"""A blended tail: the model is part the last iterate, and part an average of the tail with a short memory.

Question    Does a shorter memory of the average lower the loss, where the learning rate decays to zero?
Reference   github.com/KellerJordan/modded-nanogpt, pull requests 325 (2026-06-12) and 331 (2026-06-22): from step 2400 of 2730
            on, average += (parameters - average) / tau, and the model that is evaluated is (1 - 0.65) parameters + 0.65
            average, in all but the token embedding. 331 shortens tau from 150 to 120 steps, and with that the run from
            2690 to 2660.
Change      It wraps Muon, as `ema_tail.py` does. tau and the beginning are shares of all steps: 150 of 2690 and 120 of 2660
            are 0.056 and 0.045, and 2400 of 2690 is 0.89. Left out is all else of that stack: SOAP, floors of rows,
            lookahead, cautious decay, and a schedule that ends 215 steps after the evaluation. 331 also retunes that
            schedule and the lookahead, so that its 30 steps are not those of tau alone.
Command     jaxgpt study experiments/zoo/tail_blend.py
Expected    see ../laptop/forecasts.py.
Result      see ../laptop/forecasts.py. The study of eight seeds has not been run.
Verdict     see ../../docs/findings/forecasts.md.
"""

import dataclasses
from typing import Annotated, Any

import base
import ema_tail
import jax
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import Fraction, Interval
from jaxgpt.train import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailBlendConfig(OptimConfig):
    """AdamW or Muon, evaluated between its last iterate and an average of the tail."""

    tail_memory: Annotated[float, Interval(gt=0, le=1)] = 0.045  # time constant of the average, as a share of the steps
    tail_start: Annotated[float, Interval(ge=0, le=1)] = 0.89  # share of the steps before the average begins
    tail_weight: Fraction = 0.65  # weight of the average in what is evaluated

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the optimiser of the same fields, and then the average."""
        decay = 1.0 - 1.0 / max(1.0, self.tail_memory * steps)
        average = ema_tail.track_average(decay, round(self.tail_start * steps))
        return optax.chain(super().make_optimizer(steps, model=model), average)

    def eval_params(self, opt_state: Any, params: Params) -> Params:
        """Return the blend, in which the token embedding is the last one."""
        w = self.tail_weight
        blend = jax.tree.map(lambda x, average: (1.0 - w) * x + w * average, params, opt_state[-1].average)
        return blend | {"wte": params["wte"]}


experiment = dataclasses.replace(
    base.experiment, name="zoo-tail-blend", optim=TailBlendConfig(**dataclasses.asdict(base.experiment.optim))
)

variants = {
    "baseline": base.experiment,
    "longer tail": dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, tail_memory=0.056)),
    "shorter tail": experiment,
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
