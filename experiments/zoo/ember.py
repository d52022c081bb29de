"""Ember: the token embedding's update is divided by one size for its row and one for its column, without momentum.

Question    Adam keeps two numbers for each element of a table, of which most rows are rare. Are two vectors enough?
Reference   github.com/KellerJordan/modded-nanogpt, pull request 346 (2026-07-24), and github.com/katop1234/ember: v = r c / mean(r)
            with r the running mean of a row's squared gradient and c that of a column's, over the rows that have a
            gradient in this step, both corrected for their start. No first moment, decay 0.999, and half of Adam's rate
            for the token embedding. 1384 steps with it and an earlier change of attention windows.
Change      The table of the input alone, 65 rows here against 50,304 there; the head keeps Adam there and here. Value embeddings,
            which have most of the rows there, are not in the baseline. Left out: the windows, the ramp of the value
            embeddings' rate, and what the two vectors save in memory and communication, which is most of the claim. Decay of weights and schedule
            are the baseline's.
Command     jaxgpt study experiments/zoo/ember.py
Expected    see ../laptop/forecasts.py.
Result      see ../laptop/forecasts.py. The study of eight seeds has not been run.
Verdict     see ../../docs/findings/forecasts.md.
"""

import dataclasses
from typing import NamedTuple

import base
import jax
import jax.numpy as jnp
import matrices
import optax

import jaxgpt
from jaxgpt import GPTConfig, OptimConfig
from jaxgpt.config.validate import PositiveFloat
from jaxgpt.optim import Decay


class TableState(NamedTuple):
    """The number of steps taken, and running means of squares: [V, 1] and [1, D] for a table [V, D]."""

    count: jax.Array
    rows: optax.Updates
    columns: optax.Updates


def scale_by_rows_and_columns(decay: float, eps: float) -> optax.GradientTransformation:
    """Divide the gradient of each table [V, D] by the root of the product of its row's and its column's mean square."""

    def init(params: optax.Params) -> TableState:
        rows = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), params)
        return TableState(jnp.zeros((), jnp.int32), rows, jax.tree.map(lambda x: jnp.zeros_like(x[:1]), params))

    def update(updates: optax.Updates, state: TableState, params: optax.Params | None = None):
        count = state.count + 1

        def of_columns(old: jax.Array, g: jax.Array) -> jax.Array:
            active = jnp.sum(jnp.any(g != 0, axis=1))
            return decay * old + (1.0 - decay) * jnp.sum(jnp.square(g), axis=0, keepdims=True) / jnp.maximum(active, 1)

        of_rows = lambda old, g: decay * old + (1.0 - decay) * jnp.mean(jnp.square(g), axis=1, keepdims=True)  # noqa: E731
        rows = jax.tree.map(of_rows, state.rows, updates)
        columns = jax.tree.map(of_columns, state.columns, updates)

        def divide(g: jax.Array, r: jax.Array, c: jax.Array) -> jax.Array:
            correction = 1.0 - decay**count
            mean = jnp.maximum(jnp.mean(r), jnp.finfo(r.dtype).tiny)
            return g / (jnp.sqrt(r * c / mean / correction) + eps)

        return jax.tree.map(divide, updates, rows, columns), TableState(count, rows, columns)

    return optax.GradientTransformation(init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmberConfig(OptimConfig):
    """Ember for the token embedding, and the optimiser of the other fields for the rest."""

    table_decay: Decay = 0.999  # decay of the mean squares of rows and columns
    table_rate: PositiveFloat = 0.5  # rate of the token embedding, as a share of `learning_rate`

    def make_optimizer(self, steps: int, *, model: GPTConfig) -> optax.GradientTransformation:
        """Return one clipping of all gradients, and then the two optimisers."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(OptimConfig)}
        rest = OptimConfig(**fields | {"grad_clip": None}).make_optimizer(steps, model=model)
        schedule = self.make_schedule(steps)
        table = optax.chain(
            scale_by_rows_and_columns(self.table_decay, self.eps),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(lambda step: self.table_rate * schedule(step)),
        )
        of = lambda path, _: "table" if getattr(path[0], "key", "") == "wte" else "rest"  # noqa: E731
        choose = lambda params: jax.tree.map_with_path(of, params)  # noqa: E731
        return optax.chain(matrices.clip(self), optax.partition({"table": table, "rest": rest}, choose))


experiment = dataclasses.replace(
    base.experiment, name="zoo-ember", optim=EmberConfig(**dataclasses.asdict(base.experiment.optim))
)

variants = {"baseline": base.experiment, "ember": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
