"""NorMuon: Muon's orthogonal updates, with a size for each neuron from the running average of its squared updates.

Question    Newton-Schulz leaves the columns of an update with different norms, and one neuron learns faster than
            another: is it better to make them equal over time?
Reference   Li et al. 2025, arXiv:2510.05491, algorithm 1: v = beta2 v + (1 - beta2) mean(O^2) for each neuron, and O is
            divided by sqrt(v) + eps.
Change      Neurons are the columns of a kernel [inputs, outputs], the rows of the paper's matrices. After the division
            the update is scaled back to the norm that it had, as the authors' code does, so that Muon's learning rate
            keeps its meaning; the paper's line 10 scales to 0.2 sqrt(D F) instead. v starts at zero without a
            correction, which the scaling cancels. Momentum, Newton-Schulz and all that is not a matrix of a block are
            the baseline's. Parameters are the baseline's; the state has one more number for each neuron. The rates were
            compared by the validation loss of seed 0 after 200 steps (AMD EPYC, two cores, 2026-11-24):
            rate        0.005   0.007   0.01    0.014   0.02    0.04
            Muon        1.9739     -    1.9400  1.9456  1.9537  1.9867
            NorMuon     1.9792     -    1.9412  1.9434  1.9416  1.9793
            So both have 0.01, the rate of the zoo. After 400 steps seed 0 has 1.8273 with Muon, and 1.8105 with NorMuon.
Command     jaxgpt study experiments/zoo/normuon.py
Expected    Better than Muon by 0.01.
Result      At equal tokens -0.0114 ± 0.0049, against 1.8287 (0.0053). At 16.3 s -0.0105 ± 0.0128, against 1.8571
            (0.0251). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Better at equal tokens, by what was expected, as at 124M. At equal seconds no more than noise.
"""

import dataclasses
from typing import Literal, NamedTuple

import base
import jax
import jax.numpy as jnp
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig, UserError
from jaxgpt.config.validate import PositiveFloat
from jaxgpt.optim import Decay


class NeuronState(NamedTuple):
    """The running mean of the squared update of each neuron: an array [..., 1, F] for each matrix [..., D, F]."""

    mean_square: optax.Updates


def normalize_neurons(x_DF: jax.Array, v_1F: jax.Array, eps: float) -> jax.Array:
    """Divide each neuron's update by the root of its running mean square, and give the matrix its norm back."""
    norm = jnp.linalg.norm(x_DF, axis=(-2, -1), keepdims=True)
    x_DF = x_DF / (jnp.sqrt(v_1F) + eps)
    return x_DF * (norm / (jnp.linalg.norm(x_DF, axis=(-2, -1), keepdims=True) + eps))


def scale_by_neuron(beta2: float, eps: float) -> optax.GradientTransformation:
    """Scale the columns of orthogonal updates."""

    def init(params: optax.Params) -> NeuronState:
        return NeuronState(jax.tree.map(lambda x: jnp.zeros_like(x[..., :1, :]), params))

    def update(updates: optax.Updates, state: NeuronState, params: optax.Params | None = None):
        mean_square = jax.tree.map(
            lambda v, x: beta2 * v + (1.0 - beta2) * jnp.mean(jnp.square(x), axis=-2, keepdims=True),
            state.mean_square,
            updates,
        )
        updates = jax.tree.map(lambda x, v: normalize_neurons(x, v, eps), updates, mean_square)
        return updates, NeuronState(mean_square)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NorMuonConfig(OptimConfig):
    """NorMuon for the blocks' matrices, AdamW for the rest."""

    name: Literal["adamw", "muon"] = "muon"  # muon: what NorMuon changes
    neuron_decay: Decay = 0.95  # decay of the mean square of each neuron's update
    neuron_eps: PositiveFloat = 1e-10  # added to its root, which is near 0.1 in a matrix of width 64

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.name != "muon":
            raise UserError(f"name={self.name}: NorMuon changes Muon, take muon")

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return Muon with another direction: momentum, Newton-Schulz, neurons."""
        direction = optax.chain(
            optax.contrib.scale_by_muon(beta=self.momentum, weight_dimension_numbers=matrices.dimension_numbers),
            scale_by_neuron(self.neuron_decay, self.neuron_eps),
        )
        return matrices.muon_like(self, direction, steps, model)


experiment = dataclasses.replace(
    base.experiment,
    name="zoo-normuon",
    optim=NorMuonConfig(**dataclasses.asdict(base.experiment.optim)),
)

variants = {
    "baseline": base.experiment,
    "normuon": experiment,
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
