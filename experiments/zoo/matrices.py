"""What the zoo's optimisers share: a rule for matrices of blocks, and jaxgpt's AdamW for all else.

It is no page: `normuon.py`, `polar_express.py` and `soap.py` import it.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.optim import label_parameters, relative_schedule


def clip(config: OptimConfig) -> optax.GradientTransformation:
    """Return the clipping of gradients that the configuration asks for."""
    return optax.identity() if config.grad_clip is None else optax.clip_by_global_norm(config.grad_clip)


def choose(model: GPTConfig) -> Callable[[optax.Params], dict]:
    """Return a function of parameters that labels each "matrix", "table" or "vector", for `optax.partition`."""
    return lambda params: label_parameters(params, model.label_parameter)


def decay_matrices(config: OptimConfig, model: GPTConfig) -> optax.GradientTransformation:
    """Return weight decay of what jaxgpt decays: matrices and tables."""
    is_decayed = lambda params: jax.tree.map(lambda label: label != "vector", choose(model)(params))  # noqa: E731
    return optax.add_decayed_weights(config.weight_decay, is_decayed)


def muon_like(
    config: OptimConfig, direction: optax.GradientTransformation, steps: int, model: GPTConfig
) -> optax.GradientTransformation:
    """Return jaxgpt's Muon with another rule for the direction of a matrix's update, given its gradient.

    What follows the direction is Muon's: the factor for the matrix's shape, weight decay, and the learning rate.
    """
    relative = relative_schedule(config, steps)
    matrices = optax.chain(
        direction,
        optax.stateless(lambda updates, _: jax.tree.map(scale_by_shape, updates)),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(lambda step: config.muon_learning_rate * relative(step)),
    )
    return with_adamw(config, matrices, steps, model)


def with_adamw(
    config: OptimConfig, matrices: optax.GradientTransformation, steps: int, model: GPTConfig
) -> optax.GradientTransformation:
    """Return clipping over all gradients, then an update of the matrices, and jaxgpt's AdamW for the rest."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(OptimConfig)}
    adamw = OptimConfig(**fields | {"name": "adamw", "grad_clip": None}).make_optimizer(steps, model=model)
    return optax.chain(
        clip(config), optax.partition({"matrix": matrices, "table": adamw, "vector": adamw}, choose(model))
    )


class TwoRates:
    """Keep another optimiser for the matrices, at `muon_learning_rate`, and leave the rest to AdamW at `learning_rate`.

    Muon does so by itself. A class that inherits this first, and then the optimiser's, is that optimiser in Muon's place.
    """

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the two parts after one clipping."""
        ours = dataclasses.replace(self, grad_clip=None, learning_rate=self.muon_learning_rate)
        return with_adamw(self, super(TwoRates, ours).make_optimizer(steps, model=model), steps, model)


def scale_by_shape(x_DF: jax.Array) -> jax.Array:
    """Multiply a matrix of D inputs and F outputs by sqrt(max(1, F / D)), as Muon's author does."""
    D, F = x_DF.shape[-2:]
    return jnp.sqrt(max(1.0, F / D)) * x_DF


def dimension_numbers(updates: optax.Updates) -> optax.Params:
    """Tell Optax's Muon that the last two axes are the matrix: axes before them count matrices, such as layers."""
    numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return jax.tree.map(lambda _: numbers, updates)
