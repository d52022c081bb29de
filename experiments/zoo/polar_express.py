"""The Polar Express: Muon with the best polynomial for each iteration, instead of one for all of them.

Question    Five iterations of Newton-Schulz leave singular values between 0.7 and 1.2. Does Muon learn more with values
            nearer to 1, or as much with fewer iterations?
Reference   Amsel et al. 2025, arXiv:2505.16932: theorem 4.1 (greedy is optimal), algorithm 3 (the polynomial), section
            4.4 (safety factor and cushion), appendix G (the values of both), algorithm 1 (the coefficients, which a
            test compares with those computed here).
Change      p(x) = a x + b x^3 + c x^5 is applied to singular values that are in [low, high]: of all such polynomials it
            stays nearest to 1. Its values lie in a smaller interval, for which the next one is computed. Optax's Muon
            takes the list. All else is the baseline's, parameters and state too. Left out: bfloat16, for which the
            paper adds 0.01 to the norm that a matrix is divided by. The rates were compared by the validation loss of
            seed 0 after 200 steps (AMD EPYC, two cores, 2026-11-24):
            rate        0.005   0.007   0.01    0.014   0.02    0.04
            Muon        1.9739     -    1.9400  1.9456  1.9537  1.9867
            this page      -    1.9405  1.9422  1.9568  1.9533  1.9976
            So both have 0.01, the rate of the zoo. Times compare programs as well: Optax runs a list of polynomials as a loop, and a single one unrolled,
            which is slower here (9.0 ms a step of the optimiser against 6.1 ms, the same machine, others running on
            it).
Command     jaxgpt study experiments/zoo/polar_express.py
Expected    No difference in loss at equal rates from five iterations, and little from three, which take less time.
Result      At equal tokens polar express +0.0043 ± 0.0083; 3 iterations -0.0013 ± 0.0071, against 1.8287 (0.0053). At
            14.1 s polar express -0.0172 ± 0.0169; 3 iterations -0.0349 ± 0.0167, against 1.8694 (0.0100). Eight seeds,
            one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No difference at equal tokens, as expected and as at 124M. By the clock better, since its iterations take
            less time.
"""

import dataclasses
import math
from typing import Annotated, Literal

import base
import matrices
import numpy as np
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig, UserError
from jaxgpt.config.validate import Interval

SAFETY = 1.01  # singular values may exceed their bound by this factor, by rounding
CUSHION = (
    0.02407327424182761  # smallest low / high that a polynomial is made for, or it would take values near high to 0
)


def best_quintic(low: float, high: float) -> np.ndarray:
    """Return (a, b, c) of the odd polynomial of degree 5 that is nearest to 1 on [low, high].

    Its error has one size and changing signs at four points: both ends and two between. For given points it is the
    solution of a linear system, and the two between are where its derivative is 0: each gives the other, in turn.
    """
    if low / high > 1.0 - 5e-6:  # the limit of a single point, where the system is singular
        return np.array([15 / 8, -10 / 8, 3 / 8]) / high ** np.array([1, 3, 5])
    points, error = np.array([low, (3 * low + high) / 4, (low + 3 * high) / 4, high]), math.inf
    while True:
        signs = np.array([[1.0], [-1.0], [1.0], [-1.0]])
        a, b, c, found = np.linalg.solve(np.hstack([points[:, None] ** [1, 3, 5], signs]), np.ones(4))
        if abs(found - error) < 1e-15:
            return np.array([a, b, c])
        root = math.sqrt(9 * b * b - 20 * a * c)
        points[1:3] = np.sqrt([(-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)])
        error = found


def polar_express(iterations: int, low: float = 1e-3) -> tuple[tuple[float, ...], ...]:
    """Return (a, b, c) of each iteration for matrices with singular values from low to 1."""
    coefficients, high = [], 1.0
    powers = np.array([1, 3, 5])
    for number in range(iterations):
        quintic = best_quintic(max(low, CUSHION * high), high)
        # With a cushion the ends are no longer equally far from 1: centre them.
        quintic *= 2.0 / (quintic @ low**powers + quintic @ high**powers)
        low = float(quintic @ low**powers)
        high = 2.0 - low
        safety = SAFETY**powers if number < 7 else 1.0  # then values are so near to 1 that it would only shrink them
        coefficients.append(tuple((quintic / safety).tolist()))
    return tuple(coefficients)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolarExpressConfig(OptimConfig):
    """Muon by the Polar Express for the blocks' matrices, AdamW for the rest."""

    name: Literal["adamw", "muon"] = "muon"  # muon: what the page changes
    iterations: Annotated[int, Interval(ge=1, le=20)] = 5  # polynomials that are applied in turn
    smallest: Annotated[float, Interval(gt=0, lt=1)] = 1e-3  # singular value / Frobenius norm that shall become 1

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.name != "muon":
            raise UserError(f"name={self.name}: the Polar Express is a part of Muon, take muon")

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Muon with these polynomials."""
        direction = optax.contrib.scale_by_muon(
            ns_coeffs=polar_express(self.iterations, self.smallest),
            ns_steps=self.iterations,
            beta=self.momentum,
            weight_dimension_numbers=matrices.dimension_numbers,
        )
        return matrices.muon_like(self, direction, steps, model)


experiment = dataclasses.replace(
    base.experiment,
    name="zoo-polar-express",
    optim=PolarExpressConfig(**dataclasses.asdict(base.experiment.optim)),
)

variants = {
    "baseline": base.experiment,
    "polar express": experiment,
    "3 iterations": dataclasses.replace(experiment, optim=dataclasses.replace(experiment.optim, iterations=3)),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
