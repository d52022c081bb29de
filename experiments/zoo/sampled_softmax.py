"""Sampled softmax: in training the denominator has the row's own targets and a random share of the other tokens.

Question    A softmax over fewer tokens is cheaper where there are 50,304 of them. What does a step lose by it?
Reference   github.com/KellerJordan/modded-nanogpt, pull request 360 (2026-08-31), and its report at commit fd1b14a: over the first
            93% of the run the softmax is over all targets of the batch and a sweep of others, 10,240 in all at first,
            14,336 later and then 24,576, without a correction; validation has all tokens. By its ablations it saves
            8.8 of 39.9 seconds and costs 0.0024 nats. Correction: Bengio and Senecal 2003, Jean et al. 2015,
            arXiv:1412.2007.
Change      An objective of one's own. The targets of a batch here are nearly all 65 characters, so that a row's own targets
            take their place, and each other character is a candidate with the probability 10,240 / 50,304 = 0.2, drawn
            anew for each row. An objective is not told the step, so that the share is constant and there is no last part
            with all tokens. In its place the candidates that were drawn count 1 / 0.2 times in the denominator, which
            makes it right on average; the variant "biased" leaves that out, as 360 does. All logits are computed, so that
            nothing is saved here.
Command     jaxgpt study experiments/zoo/sampled_softmax.py
Expected    see ../laptop/forecasts.py.
Result      see ../laptop/forecasts.py. The study of eight seeds has not been run.
Verdict     see ../../docs/findings/forecasts.md.
"""

import dataclasses
from typing import Annotated, Any

import base
import jax
import jax.numpy as jnp
import logits
from flax import linen as nn

import jaxgpt
from jaxgpt import ObjectiveConfig
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Interval, check_fields
from jaxgpt.train import LossFn, Metrics, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSoftmaxConfig(ObjectiveConfig):
    """The next token's loss, in training over a sample of the tokens."""

    share: Annotated[float, Interval(gt=0, le=1)] = 0.2  # probability of a candidate that is no target of its row
    is_corrected: bool = True  # whether the drawn candidates count 1 / share times

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    def make_loss(self, model: nn.Module, *, head_loss: Any = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss, sampled in training."""
        logits.need_logits(head_loss, "a sampled softmax")
        plain = super().make_loss(model, label_smoothing=label_smoothing)

        def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
            def term(logits_BTV: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
                B, _, V = logits_BTV.shape
                is_target_BV = jnp.any(jax.nn.one_hot(batch.targets_BT, V, dtype=bool), axis=1)
                is_drawn_BV = jax.random.bernoulli(jax.random.fold_in(key, 1), self.share, (B, V))
                drawn = -jnp.log(self.share) if self.is_corrected else 0.0
                added_BV = jnp.where(is_target_BV, 0.0, jnp.where(is_drawn_BV, drawn, -jnp.inf))
                log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
                sampled_BT = jax.nn.logsumexp(logits_BTV + added_BV[:, None], axis=-1)
                candidates_BT = jnp.broadcast_to((is_target_BV | is_drawn_BV).mean(-1)[:, None], log_z_BT.shape)
                return sampled_BT - log_z_BT, {"candidates": candidates_BT}

            return logits.add_term(plain, term)(params, batch, key)

        return loss


experiment = dataclasses.replace(base.experiment, name="zoo-sampled-softmax", objective=SampledSoftmaxConfig())

variants = {
    "baseline": base.experiment,
    "biased": dataclasses.replace(experiment, objective=SampledSoftmaxConfig(is_corrected=False)),
    "sampled": experiment,
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
