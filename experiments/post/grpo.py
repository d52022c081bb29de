"""GRPO: a policy learns from the rewards of its own completions, each compared with others of the same prompt.

It is an objective and no page: `grpo_arithmetic.py` trains with it.

Reference   Shao et al. 2024, arXiv:2402.03300, equation 3. With the ratio r of a token's probability to that at which it
            was drawn, and the advantage A of its completion, the loss of a token is
            -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl (exp(d) - d - 1), d = log p_reference - log p.
            The last term is Schulman's estimator k3 of KL(policy || reference), which is never negative.
Means       "sequence" takes the mean over each completion's tokens, then over completions, as published. "token" takes
            the mean over all tokens, so that long completions are not favoured (DAPO, arXiv:2503.14476). "constant"
            divides the sum over tokens by completions times max_tokens (Dr. GRPO, arXiv:2503.20783).
Batch       Each completion with its prompt is a segment, and the mask is True where the target is a completion's token.
            extras are float32 and aligned with the targets: advantages_BT, old_logprobs_BT, and with kl > 0
            reference_logprobs_BT. Sums and counts are returned, so that the step divides by the number of completions,
            or of tokens, in the whole batch, however it is split.
Metrics     "ratio", "clipped" (share of tokens whose gradient the clip removes), "entropy" (nats) and "kl" are means over
            the same completions or tokens as the loss. So is "off_policy", 1 for a token whose log-probability is not the
            old one to the bit. `check_ratio` ends a run where it has to be 0, as `rollouts.py` knows, and is not.
Validation  has the loss of the next token on the data's own answers. The objective itself is no measure there: with
            advantages of mean zero it is 0 for any policy that has just drawn its completions.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from logprobs import apply_model, count_segment, need_extras, need_logits, pick_logprobs

from jaxgpt import ObjectiveConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, check_fields
from jaxgpt.loss import HeadLoss, add_sown
from jaxgpt.train import LossFn, Metrics, Params

LEAST_STD = 1e-4  # added to the deviation of a group's rewards, as in TRL


def advantages(rewards_PG: np.ndarray, scale: bool) -> np.ndarray:
    """Return each completion's reward minus the mean of its prompt's, float32 [P, G].

    scale: divide by the deviation of the prompt's rewards, that of a sample (n - 1), plus LEAST_STD. Raises `UserError`
    for a single completion per prompt, whose advantage would be 0.
    """
    rewards_PG = np.asarray(rewards_PG, np.float64)
    if (G := rewards_PG.shape[1]) < 2:
        raise UserError(f"{G} completion per prompt: its advantage is always 0, so draw at least 2 for each")
    above_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if scale:
        above_PG /= rewards_PG.std(axis=1, ddof=1, keepdims=True) + LEAST_STD
    return above_PG.astype(np.float32)


def check_ratio(line: Mapping[str, Any]) -> None:
    """Raise `UserError` for a line of metrics whose ratios have to be exactly 1 and are not: a callback of a run."""
    if line.get("exact", 0.0) and line["off_policy"] > 0.0:
        raise UserError(
            f"step {line['step']}: {line['off_policy']:.1%} of the tokens have another log-probability than when they were "
            "drawn (off_policy), and the ratio is not 1: score them by the function, shapes and dtype of the step"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOConfig(ObjectiveConfig):
    """The clipped policy gradient by advantages, with a penalty for leaving the reference."""

    clip_low: Fraction = 0.2  # ratios count down to 1 - clip_low where the advantage is negative
    clip_high: NonNegativeFloat = 0.2  # ratios count up to 1 + clip_high where the advantage is positive
    kl: NonNegativeFloat = 0.0  # weight of KL(policy || reference), in nats per token. 0 needs no reference
    normalise: Literal["sequence", "token", "constant"] = "token"  # what the sum over tokens is divided by
    max_tokens: PositiveInt = 256  # divisor of "constant": the most tokens of a completion
    temperature: PositiveFloat = 1.0  # divisor of the logits, with which completions are drawn: data.temperature

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    @property
    def extras(self) -> tuple[str, ...]:
        """The arrays that a batch has to bring, float32 [B, T]."""
        return ("advantages_BT", "old_logprobs_BT", *(["reference_logprobs_BT"] if self.kl else []))

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss. Arguments: see `jaxgpt.loss.make_loss`."""
        need_logits(head_loss, label_smoothing, "GRPO")
        plain = super().make_loss(model)

        def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
            if key is None:
                return plain(params, batch._replace(extras=None), None)
            need_extras(batch, self.extras, "GRPO")
            logits_BTV, sown = apply_model(model, params, batch, key)
            total, count, metrics = self.sum_loss(logits_BTV / self.temperature, batch)
            total, more = add_sown(total, count, sown)
            return total, count, metrics | more

        return loss

    def sum_loss(self, logits_BTV: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        """Return (the summed loss, the number of completions or tokens that it is divided by, sums of metrics)."""
        assert batch.extras is not None
        mask_BT = jnp.ones(batch.targets_BT.shape, bool) if batch.mask_BT is None else batch.mask_BT
        segments_BT = mask_BT.astype(jnp.int32) if batch.segments_BT is None else batch.segments_BT
        sizes_BT, completions = count_segment(mask_BT, segments_BT)
        if self.normalise == "token":
            count, weights_BT = mask_BT.sum(dtype=jnp.float32), jnp.ones_like(sizes_BT)
        else:
            count, weights_BT = completions, 1.0 / sizes_BT  # a mean over each completion
        is_constant = self.normalise == "constant"

        logprobs_BT = pick_logprobs(logits_BTV, batch.targets_BT)
        above_BT = jnp.where(mask_BT, batch.extras["advantages_BT"], 0.0)
        # Padding may hold any numbers, and the exponential of a large one has no gradient that a mask could remove.
        ratio_BT = jnp.exp(jnp.where(mask_BT, logprobs_BT - batch.extras["old_logprobs_BT"], 0.0))
        clipped_BT = jnp.clip(ratio_BT, 1.0 - self.clip_low, 1.0 + self.clip_high)
        loss_BT = -jnp.minimum(ratio_BT * above_BT, clipped_BT * above_BT)
        p_BTV = jax.nn.softmax(logits_BTV)
        entropy_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - jnp.sum(p_BTV * logits_BTV, axis=-1)
        is_clipped_BT = jnp.where(above_BT > 0, ratio_BT > 1.0 + self.clip_high, ratio_BT < 1.0 - self.clip_low)
        logged = {"ratio": ratio_BT, "clipped": is_clipped_BT & (above_BT != 0), "entropy": entropy_BT}
        logged["off_policy"] = logprobs_BT != batch.extras["old_logprobs_BT"]
        if self.kl:
            d_BT = jnp.where(mask_BT, batch.extras["reference_logprobs_BT"] - logprobs_BT, 0.0)
            logged["kl"] = jnp.exp(d_BT) - d_BT - 1.0
            loss_BT += self.kl * logged["kl"]
        metrics = {name: jnp.sum(weights_BT * x_BT, where=mask_BT) for name, x_BT in logged.items()}
        loss_BT *= 1.0 / self.max_tokens if is_constant else weights_BT
        return jnp.sum(loss_BT, where=mask_BT), count, metrics
