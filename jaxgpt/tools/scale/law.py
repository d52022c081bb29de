"""Fit the loss over parameters and tokens, with intervals by bootstrap.

Hoffmann et al. 2022 (arXiv:2203.15556), approach 3: L(N, D) = E + A / N^alpha + B / D^beta, with the least sum of Huber
losses of log L. Besiroglu et al. 2024 (arXiv:2404.10102) found that the published constants came from a mean instead of
the sum, which ended the search early. Here Levenberg-Marquardt, which solves all starts and all resamples at once in
NumPy, reaches the minimum that L-BFGS reaches.

Letters of this file: R problems (starts or resamples), P points, K terms of the law. The unknowns [R, 5] are the logs of the
terms at the mean of the points, alpha and beta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

DELTA = 1e-3  # of log L, where the Huber loss turns from square to absolute
RESAMPLES = 200
LEAST_POINTS = 6  # one more than the unknowns
# Of the unknowns: a term of less than e^-12 nats is as good as none, and a resample may leave an exponent undetermined.
LEAST, MOST = [-12.0, -12.0, -12.0, 0.01, 0.01], [12.0, 12.0, 12.0, 3.0, 3.0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A trained run: its parameters (all of them, as Hoffmann et al. count), training tokens, FLOPs, and final loss."""

    parameters: int
    tokens: int
    flops: float
    loss: float  # validation, in nats per token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """Loss in nats per token by parameters N and tokens D: E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model with this many parameters after this many tokens."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    @property
    def parameters_exponent(self) -> float:
        """Return a of the compute-optimal N ~ C^a; the tokens grow as C^(1 - a)."""
        return self.beta / (self.alpha + self.beta)


def fit_law(points: Sequence[Point]) -> Law:
    """Return the law with the least loss over all starts. points: at least `LEAST_POINTS`, over several N and D."""
    n_P, d_P, y_P = _centre(points)
    alpha_R, beta_R = (x.ravel() for x in np.meshgrid(*[np.linspace(0.1, 1.2, 6)] * 2))
    ones_RP = np.ones((len(alpha_R), len(y_P)))
    # For given exponents the law is linear in a, b and E.
    terms_RPK = np.stack([np.exp(-alpha_R[:, None] * n_P), np.exp(-beta_R[:, None] * d_P), ones_RP], -1)
    scaled_RPK = terms_RPK / np.exp(y_P)[:, None]
    factors_RK = np.stack([np.linalg.lstsq(x_PK, np.ones(len(y_P)), rcond=None)[0] for x_PK in scaled_RPK])
    logs_RK = np.log(np.maximum(factors_RK, 1e-2))
    starts = np.concatenate([logs_RK, alpha_R[:, None], beta_R[:, None]], -1)
    found, losses_R = _minimise(starts, n_P, d_P, y_P, ones_RP, iterations=150)
    return _to_law(found[np.argmin(losses_R)], points)


def resample_laws(points: Sequence[Point], law: Law, *, count: int = RESAMPLES, seed: int = 0) -> list[Law]:
    """Return the laws of resamples of the runs, drawn with replacement, each fitted from the given law on."""
    n_P, d_P, y_P = _centre(points)
    drawn = np.random.default_rng(seed).integers(len(points), size=(count, len(points)))
    weights_RP = np.stack([np.bincount(row, minlength=len(points)) for row in drawn]).astype(float)
    mean_n, mean_d = _means(points)
    a, b = np.log(law.A) - law.alpha * mean_n, np.log(law.B) - law.beta * mean_d
    starts = np.tile([a, b, np.log(law.E), law.alpha, law.beta], (count, 1))
    found, _ = _minimise(starts, n_P, d_P, y_P, weights_RP, iterations=60)
    return [_to_law(unknowns, points) for unknowns in found]


def relative_errors(points: Sequence[Point], law: Law) -> list[float]:
    """Return (measured - fitted) / fitted of each point."""
    return [p.loss / law.loss(p.parameters, p.tokens) - 1 for p in points]


def noise(points: Sequence[Point], law: Law) -> float:
    """Return the relative standard deviation of a run from the law, with the degrees of freedom that are left."""
    errors = np.array(relative_errors(points, law))
    return float(np.sqrt((errors**2).sum() / (len(points) - 5)))


def predict(
    points: Sequence[Point], law: Law, laws: Sequence[Law], parameters: int, tokens: int, *, confidence: float
) -> tuple[float, float, float]:
    """Return the predicted loss of a run, and its interval: the spread of the resampled laws and that of a run."""
    spread = np.random.default_rng(1).normal(0.0, noise(points, law), len(laws))
    losses = np.array([x.loss(parameters, tokens) for x in laws]) * np.exp(spread)
    low, high = interval(losses, confidence)
    return law.loss(parameters, tokens), low, high


def interval(samples: Sequence[float] | np.ndarray, confidence: float) -> tuple[float, float]:
    """Return the quantiles that leave (1 - confidence) / 2 on either side."""
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def _means(points: Sequence[Point]) -> tuple[float, float]:
    return float(np.mean(np.log([p.parameters for p in points]))), float(np.mean(np.log([p.tokens for p in points])))


def _centre(points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log N and log D around their means, on which a and alpha depend less on each other, and log L."""
    mean_n, mean_d = _means(points)
    n_P = np.log([p.parameters for p in points]) - mean_n
    d_P = np.log([p.tokens for p in points]) - mean_d
    return n_P, d_P, np.log([p.loss for p in points])


def _to_law(unknowns: np.ndarray, points: Sequence[Point]) -> Law:
    a, b, e, alpha, beta = map(float, unknowns)
    mean_n, mean_d = _means(points)
    A, B = float(np.exp(a + alpha * mean_n)), float(np.exp(b + beta * mean_d))
    return Law(E=float(np.exp(e)), A=A, alpha=alpha, B=B, beta=beta)


def _log_losses(unknowns: np.ndarray, n_P: np.ndarray, d_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fitted log losses [R, P], and their gradients [R, P, 5]."""
    a, b, e, alpha, beta = (unknowns[:, i, None] for i in range(5))
    terms = np.stack(np.broadcast_arrays(a - alpha * n_P, b - beta * d_P, e), -1)
    most = terms.max(-1, keepdims=True)
    shares = np.exp(terms - most)
    total = shares.sum(-1, keepdims=True)
    shares /= total
    moved = np.stack([-shares[..., 0] * n_P, -shares[..., 1] * d_P], -1)
    return (most + np.log(total))[..., 0], np.concatenate([shares, moved], -1)


def _huber(errors: np.ndarray) -> np.ndarray:
    size = np.abs(errors)
    return np.where(size <= DELTA, 0.5 * size**2, DELTA * (size - 0.5 * DELTA))


def _minimise(
    unknowns: np.ndarray, n_P: np.ndarray, d_P: np.ndarray, y_P: np.ndarray, weights_RP: np.ndarray, *, iterations: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the unknowns [R, 5] with the least weighted sum of Huber losses, and these sums.

    The Huber loss is a square with weights that depend on the errors, which are renewed in each iteration.
    """
    unknowns, damping = unknowns.copy(), np.full(len(unknowns), 1e-2)
    fitted, gradients = _log_losses(unknowns, n_P, d_P)
    errors = fitted - y_P
    losses = (weights_RP * _huber(errors)).sum(-1)
    for _ in range(iterations):
        weighted = gradients * (weights_RP / np.maximum(1, np.abs(errors) / DELTA))[..., None]
        curvature = np.swapaxes(weighted, 1, 2) @ gradients
        slope = (weighted * errors[..., None]).sum(1)
        diagonal = np.einsum("rii->ri", curvature) + 1e-9  # else a term that vanishes makes it singular
        curvature = curvature + np.eye(5) * (damping[:, None] * diagonal)[:, None]
        tried = np.clip(unknowns - np.linalg.solve(curvature, slope[..., None])[..., 0], LEAST, MOST)
        fitted, steeper = _log_losses(tried, n_P, d_P)
        sums = (weights_RP * _huber(fitted - y_P)).sum(-1)
        better = sums <= losses
        unknowns[better], losses[better] = tried[better], sums[better]
        errors[better], gradients[better] = (fitted - y_P)[better], steeper[better]
        damping = np.clip(np.where(better, damping / 3, damping * 4), 1e-12, 1e6)
    return unknowns, losses
