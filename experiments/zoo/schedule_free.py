"""Schedule-free AdamW: gradients at a point between a fast iterate and its average, and no learning rate decay.

Question    Does an average of the iterates, which needs no length of the run in advance, reach what AdamW reaches with
            a learning rate that decays to zero?
Reference   Defazio et al. 2024, arXiv:2405.15682, algorithm 1. The iterate z takes Adam's steps without momentum. The
            average x of the z is the model. Gradients are taken at y = (1 - beta1) z + beta1 x. The weight of z in the
            average is proportional to the square of the largest learning rate so far.
Change      The wrapper is Optax's, around RMSProp with bias correction and decay at y on matrices and tables. The
            parameters of the training step are y; `eval_params` returns x, which is validated, saved and sampled. The
            learning rate is warmed up as the baseline's and then constant. The model's parameters are the baseline's,
            and so is the size of the state: z takes the place of Adam's first moment. The rate was chosen among 0.002,
            0.004, 0.008 and 0.016 by the validation loss of seed 0 after 200 steps: 2.1460, 2.0870, 2.1027, 2.1285;
            then beta1 among 0.8, 0.9 and 0.95: 2.1019, 2.0870, 2.0986. The baseline's rate was chosen from fewer, in
            the same way: 0.002, 0.004 and 0.008 give 2.1448, 2.1179 and 2.1158; the zoo keeps 0.004. (AMD EPYC, two
            cores, 2026-11-24.)
Command     jaxgpt study experiments/zoo/schedule_free.py
Expected    Equal to AdamW with decay to within 0.01, and far better than AdamW with a constant rate.
Result      At equal tokens schedule-free -0.0242 ± 0.0101; constant rate +0.0549 ± 0.0108, against 1.9798 (0.0073). At
            13.1 s schedule-free -0.0294 ± 0.0108; constant rate +0.0435 ± 0.0113, against 1.9960 (0.0100). Eight seeds,
            one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Better than decay, which was not expected and is not so at 124M. A constant rate without the average is far
            worse.
"""

import dataclasses
from typing import Any, Literal

import base
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig, UserError
from jaxgpt.optim import scale_by_width
from jaxgpt.train import Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleFreeConfig(OptimConfig):
    """Schedule-free AdamW for all parameters. beta1 weighs the average against the fast iterate."""

    schedule: Literal["cosine", "wsd", "inverse_sqrt", "constant"] = "constant"  # after warm-up: constant, no other

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.schedule != "constant" or not self.beta1:
            raise UserError(
                f"schedule={self.schedule}, beta1={self.beta1}: schedule-free needs constant, and beta1 more than 0"
            )

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Optax's wrapper around Adam without momentum."""
        schedule = self.make_schedule(steps)
        adam = optax.chain(
            matrices.clip(self),
            optax.scale_by_rms(decay=self.beta2, eps=self.eps, eps_in_sqrt=False, bias_correction=True),
            scale_by_width(model.width_ratio, model.label_parameter),
            matrices.decay_matrices(self, model),
            optax.scale_by_learning_rate(schedule),
        )
        # The wrapper counts its steps from 1, the schedule from 0.
        return optax.contrib.schedule_free(adam, lambda count: schedule(count - 1), b1=self.beta1)

    def eval_params(self, opt_state: Any, params: Params) -> Params:
        """Return the average x of the iterates."""
        return optax.contrib.schedule_free_eval_params(opt_state, params)


experiment = dataclasses.replace(
    base.adamw,
    name="zoo-schedule-free",
    optim=ScheduleFreeConfig(**dataclasses.asdict(base.adamw.optim) | {"schedule": "constant", "learning_rate": 4e-3}),
)

variants = {
    "baseline": base.adamw,
    "schedule-free": experiment,
    "constant rate": dataclasses.replace(base.adamw, optim=dataclasses.replace(base.adamw.optim, schedule="constant")),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
