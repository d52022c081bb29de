"""Fast-slow decay: the rate of Muon falls steeply to a fifth in the first half, and then slowly to zero.

Question    Is a high rate for a short time, with a long slow tail, better than a plateau and one straight decay?
Reference   github.com/KellerJordan/modded-nanogpt, pull request 351 (2026-08-10): of 3125 steps, 100 warm up to 0.030 and 100
            stay there. Until step 1750 the rate is 0.030 - 0.024 p^0.6 with p the share of this phase, and then it falls
            in a straight line from 0.006 to zero. Against 3150 steps by the schedule of pull request 345.
Change      The phases are shares of all steps (0.032, 0.064, 0.56), and the rates shares of a peak. The peak is 5/3 of Muon's
            own rate, as 0.030 is 5/3 of 0.018, the rate of the accepted result 37 with a straight decay. Only matrices have
            the schedule, and AdamW keeps its own, as there. Left out: the sphere of MuonH, on which a matrix keeps its
            norm (the zero-initialised projections here have none). The baseline is a plateau and a straight decay over
            the second half, and not the power of 0.4 that 351 is measured against.
Command     jaxgpt study experiments/zoo/fast_slow_decay.py
Expected    see ../laptop/forecasts.py.
Result      see ../laptop/forecasts.py. The study of eight seeds has not been run.
Verdict     see ../../docs/findings/forecasts.md.
"""

import dataclasses
from typing import Annotated, Literal

import base
import jax
import jax.numpy as jnp
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig, UserError
from jaxgpt.config.validate import Interval, PositiveFloat
from jaxgpt.optim import scale_by_shape

Share = Annotated[float, Interval(ge=0, le=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FastSlowConfig(OptimConfig):
    """Muon with a schedule of four phases for the blocks' matrices, AdamW with its own for the rest."""

    name: Literal["adamw", "muon"] = "muon"  # muon: what the page changes
    peak: PositiveFloat = 5 / 3  # highest rate of a matrix, as a multiple of `muon_learning_rate`
    floor: Share = 0.2  # rate at the end of the fast decay, as a share of the peak
    warmup_end: Share = 0.032  # ends of the first three phases, as shares of the steps
    plateau_end: Share = 0.064
    fast_end: Share = 0.56
    fast_power: PositiveFloat = 0.6  # below 1: steep first

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.name != "muon":
            raise UserError(f"name={self.name}: the schedule is for Muon, take muon")
        if not 0 < self.warmup_end <= self.plateau_end < self.fast_end < 1:
            raise UserError("the phases need 0 < warmup_end <= plateau_end < fast_end < 1")

    def rate(self, step: jax.Array, steps: int) -> jax.Array:
        """Return the rate of the matrices after `step` of `steps` steps, relative to `muon_learning_rate`."""
        time = step / steps
        warm = (step + 1) / (self.warmup_end * steps)
        fast = jnp.clip((time - self.plateau_end) / (self.fast_end - self.plateau_end), 0.0, 1.0)
        falling = 1.0 - (1.0 - self.floor) * fast**self.fast_power
        slow = self.floor * (1.0 - time) / (1.0 - self.fast_end)
        return self.peak * jnp.where(time < self.fast_end, jnp.minimum(warm, falling), jnp.maximum(slow, 0.0))

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Muon with this schedule, and AdamW."""
        of_matrices = optax.chain(
            optax.contrib.scale_by_muon(beta=self.momentum, weight_dimension_numbers=matrices.dimension_numbers),
            optax.stateless(lambda updates, _: scale_by_shape(updates)),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(lambda step: self.muon_learning_rate * self.rate(step, steps)),
        )
        return matrices.with_adamw(self, of_matrices, steps, model)


experiment = dataclasses.replace(
    base.experiment, name="zoo-fast-slow-decay", optim=FastSlowConfig(**dataclasses.asdict(base.experiment.optim))
)

variants = {"baseline": base.experiment, "fast-slow decay": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
