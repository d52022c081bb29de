"""Lion: the sign of an interpolated momentum is the update, so that each parameter moves equally far in each step.

Question    Does Lion, which keeps one average where AdamW keeps two, learn as much from the same tokens?
Reference   Chen et al. 2023, arXiv:2302.06675, algorithm 2: c = b1 m + (1 - b1) g, the update is sign(c) + decay times
            the parameter, and then m = b2 m + (1 - b2) g.
Change      All parameters are updated by Lion, whose sign rule is Optax's. Decay is on matrices and tables only, as in
            the baseline. Clipping stays. The authors take a learning rate 3 to 10 times smaller than AdamW's and a
            decay larger by the same factor. The parameters are the baseline's; the optimiser's state is half as large.
            The rate was chosen among 0.0005, 0.001, 0.002, 0.003 and 0.005, with a decay of 0.0004 / rate, by the
            validation loss of seed 0 after 200 steps: 2.3645, 2.2027, 2.1863, 2.1835, 2.2258. The baseline's was chosen
            from fewer, in the same way: 0.002, 0.004 and 0.008 give 2.1448, 2.1179 and 2.1158; the zoo keeps 0.004.
            (AMD EPYC, two cores, 2026-11-24.)
Command     jaxgpt study experiments/zoo/lion.py
Expected    Worse than AdamW by 0.03 or more: the paper's gains are at larger batches, and in a batch of 16 short
            sequences the sign of a gradient is mostly noise.
Result      At equal tokens +0.0932 ± 0.0081, against 1.9798 (0.0073). At 13.3 s +0.0892 ± 0.0135, against 1.9951
            (0.0113). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Worse, by three times what was expected. At 124M it did not beat Adam either.
"""

import dataclasses

import base
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import PositiveFloat
from jaxgpt.optim import scale_by_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class LionConfig(OptimConfig):
    """Lion for all parameters. beta1 weighs momentum against gradient in the update, beta2 is the momentum's decay."""

    learning_rate: PositiveFloat = 1e-4  # peak learning rate: how far each parameter moves in one step

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain of clipping, the sign rule, decay and the learning rate."""
        return optax.chain(
            matrices.clip(self),
            optax.scale_by_lion(b1=self.beta1, b2=self.beta2),
            scale_by_width(model.width_ratio, model.label_parameter),  # an update of fixed size, as Adam's is
            matrices.decay_matrices(self, model),
            optax.scale_by_learning_rate(self.make_schedule(steps)),
        )


experiment = dataclasses.replace(
    base.adamw,
    name="zoo-lion",
    optim=LionConfig(**dataclasses.asdict(base.adamw.optim) | {"learning_rate": 3e-3, "weight_decay": 0.133}),
)

variants = {"baseline": base.adamw, "lion": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
