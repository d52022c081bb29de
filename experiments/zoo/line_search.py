"""A line search: the length of each step is halved until the loss of its own batch falls far enough.

Question    Does a step that is as long as its batch allows make a rate by hand unnecessary?
Reference   Armijo 1966, Pacific J. Math. 16(1); Vaswani et al. 2019, arXiv:1905.09997, who search on the batch of the step.
Change      The search wraps the direction of AdamW without its rate. Optax's search needs the batch's loss, its gradient
            and the loss as a function of parameters. All three come from `value_and_grad`, which jaxgpt gives to an update
            that takes it: XLA drops the gradients that are not used. The logged learning rate is the length of the step.
Command     jaxgpt study experiments/zoo/line_search.py
Expected    A higher loss than the baseline's, as each step costs several forward passes and follows one small batch.
Result      none: it has not been studied.
Verdict     none.
"""

import dataclasses
from typing import Any

import base
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import PositiveFloat, PositiveInt
from jaxgpt.train import Metrics, Params


def search_line(max_steps: int, longest: float) -> optax.GradientTransformationExtraArgs:
    """Scale an update to at most `longest` times its length, halved at most `max_steps` times."""
    search = optax.scale_by_backtracking_linesearch(
        max_steps, decrease_factor=0.5, increase_factor=2.0, max_learning_rate=longest
    )

    def update(updates: Params, state: Any, params: Params, *, value_and_grad: Any, **_: Any) -> tuple[Params, Any]:
        value, grad = value_and_grad(params)
        return search.update(
            updates, state, params, value=value, grad=grad, value_fn=lambda params: value_and_grad(params)[0]
        )

    return optax.GradientTransformationExtraArgs(search.init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSearchConfig(OptimConfig):
    """Adam's direction, as far as the loss of the batch falls."""

    max_steps: PositiveInt = 10  # most halvings of a step
    longest: PositiveFloat = 0.1  # most that Adam's direction is multiplied by

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Adam's direction, downhill, scaled by the search. The rate and the schedule are not used."""
        adam = optax.scale_by_adam(self.beta1, self.beta2, self.eps)
        return optax.chain(adam, optax.scale(-1.0), search_line(self.max_steps, self.longest))

    def metrics(self, grads: Params, updates: Params, opt_state: Any) -> Metrics:
        """Return the length of the step, as a multiple of Adam's direction."""
        return {"length": opt_state[-1].learning_rate}


experiment = dataclasses.replace(base.adamw, name="zoo-line-search", optim=LineSearchConfig())

variants = {"baseline": base.adamw, "line search": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
