"""Several updates for each rollout: within one step, so that nothing has to survive between steps.

It is no page: an option of `grpo_arithmetic.py`.

Reference   Shao et al. 2024, arXiv:2402.03300, algorithm 1: `updates` updates on the same completions, whose ratios
            leave 1 after the first, so that the clip matters.
Change      Each update takes the whole batch. As they are one step of the run, every checkpoint lies between two
            rollouts: a resumed run, a replay and an audit need no stored rows. "loss", "grad_norm" and the objective's
            metrics are those of the first update. The learning rate follows its schedule over all updates.
"""

import dataclasses
from typing import Any

import jax
import optax

from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import PositiveInt


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdatesConfig(OptimConfig):
    """Several updates of the parameters on each batch, as published for GRPO."""

    updates: PositiveInt = 1  # updates of the parameters in a step

    @property
    def whole(self) -> OptimConfig:
        """The configuration of the optimizer, whose steps are the updates."""
        return dataclasses.replace(self, updates=1, horizons=tuple(self.updates * step for step in self.horizons))

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the transformation whose update is the sum of `updates` ones."""
        if self.updates == 1:
            return super().make_optimizer(steps, model=model)
        plain = self.whole.make_optimizer(self.updates * steps, model=model)

        def update(grads: Any, state: Any, params: Any = None, *, value_and_grad: Any, **_: Any) -> tuple[Any, Any]:
            def one(carry: tuple[Any, Any, Any], _: None) -> tuple[tuple[Any, Any, Any], None]:
                grads, state, now = carry
                change, state = plain.update(grads, state, now)
                now = optax.apply_updates(now, change)
                return (value_and_grad(now)[1], state, now), None

            (grads, state, now), _ = jax.lax.scan(one, (grads, state, params), length=self.updates - 1)
            change, state = plain.update(grads, state, now)
            return jax.tree.map(lambda now, change, before: now + change - before, now, change, params), state

        return optax.GradientTransformationExtraArgs(plain.init, update)

    def make_schedule(self, steps: int) -> optax.Schedule:
        """Return the learning rate of the first update of each step."""
        if self.updates == 1:
            return super().make_schedule(steps)
        schedule = self.whole.make_schedule(self.updates * steps)
        return lambda step: schedule(self.updates * step)
