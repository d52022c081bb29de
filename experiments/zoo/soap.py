"""SOAP: Adam in the eigenbasis of Shampoo's covariances, which is refreshed by one QR step every few updates.

Question    Adam scales each element of a gradient by itself. Is it better in the basis in which the elements of a
            matrix's gradient are least correlated?
Reference   Vyas et al. 2024, arXiv:2409.11321, algorithm 3 (the step) and algorithm 4 (the basis: one iteration of
            subspace iteration and QR). As in the authors' code the first step updates nothing but the covariances,
            eigenvalues are sorted before QR, and the second moments move with them.
Change      All matrices and tables, each side with its own basis, unless it is longer than `max_side`: then that side
            is not rotated. Vectors are updated by Adam. Momentum is kept in the original basis and rotated in each
            step. Clipping, decay and schedule are AdamW's, whose place it takes; the base's Muon is the third variant.
            The model's parameters are the baseline's; the state has four more matrices for each matrix. Eigenvectors of
            equal eigenvalues are arbitrary, so that a rounding error becomes another run: on other devices losses agree
            to about 0.01, not to digits. The rate was chosen among 0.002, 0.004, 0.008 and 0.016 by the validation loss
            of seed 0 after 200 steps: 2.1526, 2.0131, 2.0186, 2.0200; AdamW's in the same way: 0.002, 0.004 and 0.008
            give 2.1448, 2.1179 and 2.1158. (AMD EPYC, two cores, 2026-11-24.)
Command     jaxgpt study experiments/zoo/soap.py
Expected    Better than AdamW by 0.05 or more, and close to Muon. A step takes longer: the bases take most of it.
Result      At equal tokens soap -0.1227 ± 0.0086; muon -0.1511 ± 0.0101, against 1.9798 (0.0073). At 13.4 s soap
            -0.0136 ± 0.0165; muon -0.0953 ± 0.0220, against 2.0005 (0.0131). Eight seeds, one core of an AMD EPYC
            (family 25, AVX-512), 2026-11-25.
Verdict     Better than AdamW at equal tokens, by more than was expected, and behind Muon. By the clock its steps take
            that back.
"""

import dataclasses
from typing import Any, NamedTuple

import base
import jax
import jax.numpy as jnp
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import Count, Size
from jaxgpt.optim import scale_by_width

Sides = dict[str, jax.Array]  # an array for each side of a matrix [D, F] that is rotated: "left" of D, "right" of F


class MatrixState(NamedTuple):
    """The state of one parameter [..., D, F]. Axes before the last two count matrices."""

    mean: jax.Array  # running mean of the gradient, in the original basis
    mean_square: jax.Array  # of the rotated gradient
    covariance: Sides  # running means of G G^T and of G^T G
    basis: Sides  # their eigenvectors, as columns, the largest eigenvalue first


def rotate(x_DF: jax.Array, basis: Sides, *, back: bool = False) -> jax.Array:
    """Return a matrix in the eigenbasis, or back from it."""
    if "left" in basis:
        x_DF = (basis["left"] if back else basis["left"].mT) @ x_DF
    if "right" in basis:
        x_DF = x_DF @ (basis["right"].mT if back else basis["right"])
    return x_DF


def refresh(covariance: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the next basis, and the order of the old one's vectors by eigenvalue, the largest first."""
    eigenvalues = jnp.sum(basis * (covariance @ basis), axis=-2)
    order = jnp.argsort(-eigenvalues, axis=-1)
    basis = jnp.take_along_axis(basis, order[..., None, :], axis=-1)
    return jnp.linalg.qr(covariance @ basis)[0], order


def update_matrix(
    grad: jax.Array, state: MatrixState, count: jax.Array, *, config: "SoapConfig"
) -> tuple[jax.Array, MatrixState]:
    """Return (the update before learning rate and decay, the next state). count: the steps taken."""
    b1, b2 = config.beta1, config.beta2
    is_first, number = count == 0, jnp.maximum(count, 1)
    rotated = rotate(grad, state.basis)
    mean = jnp.where(is_first, 0.0, b1 * state.mean + (1.0 - b1) * grad)
    mean_square = jnp.where(is_first, 0.0, b2 * state.mean_square + (1.0 - b2) * jnp.square(rotated))
    step = rotate(mean, state.basis) / (1.0 - b1**number)
    step /= jnp.sqrt(mean_square / (1.0 - b2**number)) + config.eps
    new = {"left": grad @ grad.mT, "right": grad.mT @ grad}
    covariance = {side: b2 * old + (1.0 - b2) * new[side] for side, old in state.covariance.items()}

    def start() -> tuple[Sides, jax.Array]:
        return {side: jnp.linalg.eigh(x)[1][..., ::-1] for side, x in covariance.items()}, mean_square

    def turn() -> tuple[Sides, jax.Array]:
        basis, moved = {}, mean_square
        for side, x in covariance.items():
            basis[side], order = refresh(x, state.basis[side])
            order = order[..., :, None] if side == "left" else order[..., None, :]
            moved = jnp.take_along_axis(moved, order, axis=-2 if side == "left" else -1)
        return basis, moved

    which = jnp.where(is_first, 0, jnp.where(count % config.refresh_every == 0, 1, 2))
    basis, moved = jax.lax.switch(which, [start, turn, lambda: (state.basis, mean_square)])
    return rotate(step, state.basis, back=True), MatrixState(mean, moved, covariance, basis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoapConfig(OptimConfig):
    """SOAP for matrices and tables, Adam for the rest."""

    refresh_every: Count = 10  # steps between two turns of the bases
    max_side: Size = 1024  # longest side that is rotated: its covariance and its basis have its square of elements

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain of clipping, SOAP or Adam, decay and the learning rate."""
        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.eps)
        soap = optax.GradientTransformation(self._init, self._update)
        return optax.chain(
            matrices.clip(self),
            optax.partition({"matrix": soap, "table": soap, "vector": adam}, matrices.choose(model)),
            scale_by_width(model.width_ratio, model.label_parameter),  # a rotation leaves Adam's size as it is
            matrices.decay_matrices(self, model),
            optax.scale_by_learning_rate(self.make_schedule(steps)),
        )

    def _init(self, params: optax.Params) -> tuple[jax.Array, Any]:
        def init(x: jax.Array) -> MatrixState:
            sides = {"left": x.shape[-2], "right": x.shape[-1]}
            eyes = {
                side: jnp.broadcast_to(jnp.eye(size), (*x.shape[:-2], size, size))
                for side, size in sides.items()
                if size <= self.max_side
            }
            return MatrixState(jnp.zeros_like(x), jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, eyes), eyes)

        return jnp.zeros((), jnp.int32), jax.tree.map(init, params)

    def _update(self, updates: optax.Updates, state: tuple[jax.Array, Any], params: optax.Params | None = None):
        count, states = state
        pairs = jax.tree.map(lambda grad, own: update_matrix(grad, own, count, config=self), updates, states)
        updates, states = (jax.tree.map(lambda _, pair, n=n: pair[n], updates, pairs) for n in range(2))
        return updates, (count + 1, states)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoapMatricesConfig(matrices.TwoRates, SoapConfig):
    """SOAP for the matrices of blocks at `muon_learning_rate`, AdamW for the rest at `learning_rate`."""


experiment = dataclasses.replace(
    base.adamw, name="zoo-soap", optim=SoapConfig(**dataclasses.asdict(base.adamw.optim) | {"learning_rate": 4e-3})
)

variants = {"baseline": base.adamw, "soap": experiment, "muon": base.experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
