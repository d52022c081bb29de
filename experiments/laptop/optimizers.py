"""Train with an optimiser that the zoo does not have: SGD with momentum, Adafactor, Shampoo or Prodigy.

Question    none of its own: `run.py` compares them with eight of the zoo and of jaxgpt.
Reference   SGD with Nesterov's momentum: Sutskever et al. 2013. Adafactor: Shazeer and Stern 2018, arXiv:1804.04235,
            algorithm 4 with momentum where beta1 is above 0. Shampoo: Gupta et al. 2018, arXiv:1802.09568, with running
            means and the size of Adam's update for each matrix, as Shi et al. 2023, arXiv:2309.06497. Prodigy: Mishchenko
            and Defazio 2023, arXiv:2306.06101.
Change      Clipping, schedule and weight decay are the baseline's, and SGD and Prodigy have no decay, which their
            learning rate near 1 would multiply. All but Shampoo's matrices are Optax's. muP: the update of Adam's size
            takes `scale_by_width`. SGD's takes table 3 of arXiv:2203.03466: tables and vectors times width / base width.
Command     jaxgpt train experiments/laptop/optimizers.py --data.path shakespeare.txt      # Shampoo
Expected    see run.py.
Result      see run.py.
Verdict     see run.py.
"""

import dataclasses
from typing import Any, NamedTuple

import base
import jax
import jax.numpy as jnp
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import Count, PositiveFloat, Size
from jaxgpt.optim import label_parameters, scale_by_width


def chain(
    config: OptimConfig, steps: int, model: GPTConfig, direction: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return clipping, a direction of Adam's size, muP's factor, decay of what jaxgpt decays, and the learning rate."""
    labels = lambda params: label_parameters(params, model.label_parameter)  # noqa: E731
    return optax.chain(
        optax.identity() if config.grad_clip is None else optax.clip_by_global_norm(config.grad_clip),
        direction,
        scale_by_width(model.width_ratio, model.label_parameter),
        optax.add_decayed_weights(
            config.weight_decay, lambda params: jax.tree.map(lambda label: label != "vector", labels(params))
        ),
        optax.scale_by_learning_rate(config.make_schedule(steps)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGDConfig(OptimConfig):
    """SGD with Nesterov's momentum. momentum: its decay rate."""

    weight_decay: float = 0.0

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain. muP's factor is 1 for matrices, and width / base width for all else but the last norm."""
        ratio = model.width_ratio

        def scale(path, x: jax.Array, label: str) -> jax.Array:
            return x * ratio if getattr(path[0], "key", "") == "ln_f" else x if label == "matrix" else x / ratio

        return optax.chain(
            optax.identity() if self.grad_clip is None else optax.clip_by_global_norm(self.grad_clip),
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(
                lambda updates, _: jax.tree.map_with_path(
                    scale, updates, label_parameters(updates, model.label_parameter)
                )
            ),
            optax.scale_by_learning_rate(self.make_schedule(steps)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdafactorConfig(OptimConfig):
    """Adafactor without scaling by the parameter. beta1: decay rate of the momentum, 0 for none."""

    decay_power: PositiveFloat = 0.8  # the second moment's decay rate after t steps is 1 - t^-power
    min_side: Size = 32  # matrices whose second largest side is shorter keep all second moments

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain of factored second moments, clipping of each update's root mean square at 1, and momentum."""
        direction = optax.chain(
            optax.scale_by_factored_rms(decay_rate=self.decay_power, min_dim_size_to_factor=self.min_side),
            optax.clip_by_block_rms(1.0),
            optax.ema(self.beta1, debias=False) if self.beta1 else optax.identity(),
        )
        return chain(self, steps, model, direction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProdigyConfig(OptimConfig):
    """Prodigy. learning_rate: a factor of the rate that it finds."""

    weight_decay: float = 0.0

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain. The update is Adam's times the rate, so that muP's factor is Adam's."""
        return optax.chain(
            optax.identity() if self.grad_clip is None else optax.clip_by_global_norm(self.grad_clip),
            optax.contrib.prodigy(
                self.make_schedule(steps), betas=(self.beta1, self.beta2), eps=self.eps, safeguard_warmup=True
            ),
            scale_by_width(model.width_ratio, model.label_parameter),
        )


class MatrixState(NamedTuple):
    """The state of one parameter [..., D, F]. Sides are "left" of D and "right" of F, if they are short enough."""

    mean: jax.Array  # running mean of the gradient
    mean_square: jax.Array  # running mean of its square
    covariance: dict[str, jax.Array]  # by side: running mean of G G^T, of G^T G
    root: dict[str, jax.Array]  # by side: its inverse root


def inverse_root(covariance: jax.Array, power: float, eps: float) -> jax.Array:
    """Return a symmetric matrix [..., N, N] to the power -`power`. eps: least eigenvalue, as a share of the largest."""
    values, vectors = jnp.linalg.eigh(covariance)
    values = jnp.maximum(values, eps * values[..., -1:]) + jnp.finfo(values.dtype).tiny
    return (vectors * values[..., None, :] ** -power) @ vectors.mT


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShampooConfig(OptimConfig):
    """Shampoo for matrices and tables, with the size of Adam's update for each, and Adam for the rest."""

    root_every: Count = 5  # steps between two computations of the inverse roots
    root_eps: PositiveFloat = 1e-6  # least eigenvalue, as a share of the largest one
    max_side: Size = 1024  # longest side with a covariance, which has its square of elements

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return the chain."""
        adam = optax.scale_by_adam(b1=self.beta1, b2=self.beta2, eps=self.eps)
        shampoo = optax.GradientTransformation(self._init, self._update)
        choose = lambda params: label_parameters(params, model.label_parameter)  # noqa: E731
        parts = {"matrix": shampoo, "table": shampoo, "vector": adam}
        return chain(self, steps, model, optax.partition(parts, choose))

    def _init(self, params: optax.Params) -> tuple[jax.Array, Any]:
        def init(x: jax.Array) -> MatrixState:
            sides = {"left": x.shape[-2], "right": x.shape[-1]}
            eyes = {
                side: jnp.broadcast_to(jnp.eye(n), (*x.shape[:-2], n, n))
                for side, n in sides.items()
                if n <= self.max_side
            }
            return MatrixState(jnp.zeros_like(x), jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, eyes), eyes)

        return jnp.zeros((), jnp.int32), jax.tree.map(init, params)

    def _update(self, updates: optax.Updates, state: tuple[jax.Array, Any], params: optax.Params | None = None):
        count, states = state

        def update(grad: jax.Array, old: MatrixState) -> tuple[jax.Array, MatrixState]:
            b1, b2, number = self.beta1, self.beta2, count + 1
            mean, mean_square = b1 * old.mean + (1 - b1) * grad, b2 * old.mean_square + (1 - b2) * jnp.square(grad)
            new = {"left": grad @ grad.mT, "right": grad.mT @ grad}
            covariance = {side: b2 * x + (1 - b2) * new[side] for side, x in old.covariance.items()}
            power = 0.5 / max(1, len(covariance))
            root = jax.lax.cond(
                count % self.root_every == 0,
                lambda: {side: inverse_root(x, power, self.root_eps) for side, x in covariance.items()},
                lambda: old.root,
            )
            adam = mean / (1 - b1**number) / (jnp.sqrt(mean_square / (1 - b2**number)) + self.eps)
            step = root["left"] @ mean if "left" in root else mean
            step = step @ root["right"] if "right" in root else step
            norm = lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)  # noqa: E731
            step *= norm(adam) / jnp.maximum(norm(step), jnp.finfo(step.dtype).tiny)
            return step, MatrixState(mean, mean_square, covariance, root)

        pairs = jax.tree.map(update, updates, states)
        updates, states = (jax.tree.map(lambda _, pair, n=n: pair[n], updates, pairs) for n in range(2))
        return updates, (count + 1, states)


def _with(kind: type[OptimConfig], **fields: Any) -> jaxgpt.Experiment:
    given = {f.name: getattr(base.adamw.optim, f.name) for f in dataclasses.fields(OptimConfig)}
    if kind in (SGDConfig, ProdigyConfig):
        given["weight_decay"] = 0.0
    return dataclasses.replace(base.adamw, name="laptop-shampoo", optim=kind(**given | fields))


variants = {
    "sgd": _with(SGDConfig, learning_rate=0.5, momentum=0.9),
    "adafactor": _with(AdafactorConfig),
    "shampoo": _with(ShampooConfig, beta2=0.95),
    "prodigy": _with(ProdigyConfig, learning_rate=1.0),
}
experiment = variants["shampoo"]

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
