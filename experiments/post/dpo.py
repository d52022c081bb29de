"""Train by DPO: a model that gives a short answer as often as a wordy one learns from pairs which of them is wanted.

Question    Does the preference reach prompts that no pair had, and does the model still get its sums right?
Reference   DPO, Rafailov et al. 2023, arXiv:2305.18290, equation 7: with h the sum over an answer's tokens of
            log p - log p_reference, and m = h(chosen) - h(rejected), the loss of a pair is f(m) = -log sigmoid(beta m).
            label_smoothing e is the share of pairs that may be labelled the wrong way: (1 - e) f(m) + e f(-m)
            (conservative DPO, Mitchell 2023). IPO, Azar et al. 2023, arXiv:2310.12036, equation 17, has
            f(m) = (m - 1 / (2 beta))^2. normalise_length takes the mean over tokens for h, so that a long answer counts
            no more than a short one; TRL's "ipo" and "sigmoid_norm" do so.
Data        the 100 sums of two digits, "7 + 8?", answered by "15." and by "It is 15, I would say.". The first stage
            learns both answers to 90 of them, the second prefers the short one. Nothing sees the other 10 sums.
            `--data.path pairs.jsonl` takes pairs of your own, in the format of `preferences.py`.
Command     jaxgpt train experiments/post/dpo.py:sft --run-dir runs/post-sft
            python experiments/post/dpo.py
            jaxgpt sample runs/post-dpo --chat --prompt "7 + 8?"
Expected    short answers to nearly all prompts, the 10 held-out sums among them, and as many right as before.
Result      the validation loss falls from log 2 to 0.4627 in 40 steps, and every pair of the last batch is ranked right.
            Of 90 answers drawn at temperature 1 to sums in the pairs, 38 were short before and 87 after, and of 90 to
            the held-out sums 45 and 87. Right were 77 before and 66 after, and of the held-out 38 and 49. 44 s and
            24 s on two shared cores of an AMD EPYC (family 25, model 17, AVX-512), 2026-11-25.
Verdict     the preference reaches new prompts. The sums in the pairs suffer: DPO asks for short, not for right.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from logprobs import apply_model, need_extras, need_logits, pick_logprobs, sum_segments
from preferences import BothConfig, PreferencesConfig

import jaxgpt
from jaxgpt import Experiment, GPTConfig, ObjectiveConfig, OptimConfig, TrainConfig
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Interval, PositiveFloat, check_fields
from jaxgpt.loss import HeadLoss, add_sown
from jaxgpt.train import LossFn, Metrics, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(ObjectiveConfig):
    """The loss of pairs: that the chosen answer gains more probability over the reference than the rejected one."""

    unit = "loss per pair"

    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # function of the margin between two answers: DPO or IPO
    beta: PositiveFloat = 0.1  # how strongly the policy is held to the reference
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0  # share of pairs that may be labelled the wrong way
    normalise_length: bool = False  # take means over the tokens of an answer, not sums

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss: a sum over pairs, and their number. Validation has it too, if its rows are pairs."""
        need_logits(head_loss, label_smoothing, "DPO")
        plain = super().make_loss(model)

        def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
            if key is None and not batch.extras:  # other text, which `jaxgpt evaluate` may be given
                return plain(params, batch, None)
            need_extras(batch, ["reference_logprobs_BT"], "DPO")
            logits_BTV, sown = apply_model(model, params, batch, key)
            total, count, metrics = self.sum_loss(logits_BTV, batch)
            total, more = add_sown(total, count, sown)
            return total, count, metrics | more

        return loss

    def sum_loss(self, logits_BTV: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, Metrics]:
        """Return (the summed loss, the number of pairs, sums of metrics): segments 2 n - 1 and 2 n are a pair."""
        assert batch.extras is not None
        gain_BT = pick_logprobs(logits_BTV, batch.targets_BT) - batch.extras["reference_logprobs_BT"]
        gain_BS = sum_segments(jnp.where(batch.mask_BT, gain_BT, 0.0), batch.segments_BT)
        sizes_BS = sum_segments(batch.mask_BT.astype(jnp.float32), batch.segments_BT)
        if self.normalise_length:
            gain_BS /= jnp.maximum(sizes_BS, 1.0)
        pairs = batch.targets_BT.shape[1] // 2  # the most that a row can hold
        chosen_BN, rejected_BN = (gain_BS[:, first : 2 * pairs + 1 : 2] for first in (1, 2))
        is_pair_BN = (sizes_BS[:, 1 : 2 * pairs + 1 : 2] > 0) & (sizes_BS[:, 2 : 2 * pairs + 1 : 2] > 0)
        margin_BN = chosen_BN - rejected_BN
        loss_BN = (1.0 - self.label_smoothing) * self._loss(margin_BN)
        if self.label_smoothing:
            loss_BN += self.label_smoothing * self._loss(-margin_BN)
        logged = {"accuracy": margin_BN > 0, "margin": margin_BN, "chosen": chosen_BN, "rejected": rejected_BN}
        metrics = {name: jnp.sum(x_BN, where=is_pair_BN) for name, x_BN in logged.items()}
        count = is_pair_BN.sum(dtype=jnp.float32)
        return jnp.sum(loss_BN, where=is_pair_BN), count, metrics

    def _loss(self, margin_BN: jax.Array) -> jax.Array:
        if self.loss == "ipo":
            return jnp.square(margin_BN - 1.0 / (2.0 * self.beta))
        return jax.nn.softplus(-self.beta * margin_BN)


sft = Experiment(
    name="post-sft",
    model=GPTConfig(
        block_size=128,  # characters: a pair has up to 92
        n_layer=2,
        n_head=4,
        n_embd=64,
        bias=False,
        norm="rmsnorm",
        activation="swiglu",
        position="rope",
        qk_norm=True,
        residual_init="zero",
    ),
    data=BothConfig(),
    optim=OptimConfig(
        name="muon", learning_rate=3e-3, schedule="wsd", warmup_steps=20, decay_fraction=0.4, min_lr_ratio=0.0
    ),
    train=TrainConfig(steps=300, batch_size=8, eval_every=100, sample_tokens=0),
)

experiment = dataclasses.replace(
    sft,
    name="post-dpo",
    data=PreferencesConfig(),
    objective=DPOConfig(),
    optim=OptimConfig(learning_rate=3e-4, warmup_steps=5, weight_decay=0.0),
    train=dataclasses.replace(sft.train, steps=40, eval_every=10, init_from="runs/post-sft"),
)

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
