"""Distil a large model into a small one, which learns from its probabilities and from the text.

Question    Does a student learn more from the same tokens if a teacher says how probable each next character was?
Reference   Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2: the loss is (1 - weight) cross-entropy + weight
            temperature^2 KL(teacher || student), both softened by the temperature. The square keeps the gradients'
            size. Reverse, KL(student || teacher): MiniLLM, Gu et al. 2023, arXiv:2306.08543, and GKD, Agarwal et al.
            2023, arXiv:2306.13649, which takes it on the student's own completions.
Change      An objective of one's own. The teacher is a run directory, loaded when the loss is made; its parameters are
            constants of the compiled step, in which it runs without dropout. It must have the student's vocabulary, by
            the same tokenizer, and at least its context. With top_k the divergence is that of k + 1 outcomes: the
            teacher's k most probable tokens, and all others as one. Renormalised over the k alone it would not mind
            what the student spends on the others. The divergence is taken where the mask is True, so that rows of
            completions work as rows of text do. metrics.jsonl has "kl", nats per target at that temperature.
            Validation has the plain loss. Student, parameters and optimiser are those of `experiments/zoo/base.py`; no
            rate was tuned for either. The time of the teacher's training is not the student's, its forward passes are.
Command     jaxgpt train experiments/post/distillation.py:teacher --run-dir runs/teacher
            jaxgpt study experiments/post/distillation.py
Expected    Better by 0.02: the teacher, with nine times the parameters and three times the steps, has a validation loss
            of 1.6042 after its training (seed 0, two cores of an AMD EPYC, 2026-11-24), where the baseline has 1.8383.
            At equal seconds worse, since its forward passes take longer than the student's whole step.
Result      At equal tokens -0.0677 ± 0.0111, against 1.8287 (0.0053). At 15.6 s +0.1394 ± 0.0183, against 1.8472
            (0.0149). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25, forward, over all tokens.
Verdict     Better at equal tokens, by three times what was expected, and worse by the clock, as expected.
"""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from logprobs import apply_model, need_logits

import jaxgpt
from jaxgpt import DataConfig, Experiment, GPTConfig, ObjectiveConfig, OptimConfig, TrainConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Interval, PositiveFloat, PositiveInt, check_fields
from jaxgpt.loss import HeadLoss, add_sown, next_token_loss
from jaxgpt.train import LossFn, Metrics, Params


def divergence(first_BTV: jax.Array, second_BTV: jax.Array) -> jax.Array:
    """Return KL(first || second) of log-probabilities, in nats [B, T]."""
    return jnp.sum(jnp.exp(first_BTV) * (first_BTV - second_BTV), axis=-1)


def merge_rest(logprobs_BTV: jax.Array, kept_BTK: jax.Array) -> jax.Array:
    """Return the log-probabilities of the kept tokens, and of all others together, [B, T, K + 1]."""
    own_BTK = jnp.take_along_axis(logprobs_BTV, kept_BTK, axis=-1)
    # A sum over the others, not 1 minus that over the kept, of which rounding would leave nothing.
    others_BTV = jnp.put_along_axis(logprobs_BTV, kept_BTK, -jnp.inf, axis=-1, inplace=False)
    return jnp.concatenate([own_BTK, jax.nn.logsumexp(others_BTV, axis=-1, keepdims=True)], axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(ObjectiveConfig):
    """The loss of the next token, mixed with the divergence from a teacher."""

    teacher: str = "runs/teacher"  # the run directory of the teacher
    weight: Annotated[float, Interval(ge=0, le=1)] = 0.5  # share of the divergence. The cross-entropy has the rest
    temperature: PositiveFloat = 2.0  # divisor of the logits of both models in the divergence
    direction: Literal["forward", "reverse"] = "forward"  # KL(teacher || student), or KL(student || teacher)
    top_k: PositiveInt | None = None  # the most likely tokens of the teacher that are told apart. None means all

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    def make_loss(self, model: nn.Module, *, head_loss: HeadLoss | None = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss, mixed in training."""
        need_logits(head_loss, 0.0, "distillation")
        teacher, known = self._load_teacher(model.config)  # type: ignore[attr-defined]
        plain = super().make_loss(model)

        def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, jax.Array, Metrics]:
            if key is None:
                return plain(params, batch._replace(extras=None), None)
            logits_BTV, sown = apply_model(model, params, batch, key)
            said_BTV, _ = apply_model(teacher, known, batch, None)
            nats, count = next_token_loss(logits_BTV, batch.targets_BT, batch.mask_BT, smoothing=label_smoothing)
            kl_BT = self.compare(said_BTV, logits_BTV)
            kl = jnp.sum(kl_BT, where=True if batch.mask_BT is None else batch.mask_BT)
            total, more = add_sown((1.0 - self.weight) * nats + self.weight * self.temperature**2 * kl, count, sown)
            return total, count, {"kl": kl} | more

        return loss

    def compare(self, teacher_BTV: jax.Array, student_BTV: jax.Array) -> jax.Array:
        """Return the divergence of two models' logits at the temperature, in nats [B, T]."""
        both = [jax.nn.log_softmax(logits_BTV / self.temperature) for logits_BTV in (teacher_BTV, student_BTV)]
        if self.top_k is not None:
            kept_BTK = jax.lax.top_k(teacher_BTV, self.top_k)[1]
            both = [merge_rest(logprobs_BTV, kept_BTK) for logprobs_BTV in both]
        return divergence(*(both if self.direction == "forward" else both[::-1]))

    def _load_teacher(self, student: GPTConfig) -> tuple[nn.Module, Any]:
        """Return the teacher and its parameters, in the host's memory: they belong to no device."""
        try:
            run = jaxgpt.load(self.teacher, setup=False)
        except UserError as e:
            raise UserError(f"objective.teacher: {e}") from None
        config = run.model.config
        if config.vocab_size != student.vocab_size or config.block_size < student.block_size:
            raise UserError(
                f"the teacher {self.teacher} has {config.vocab_size} tokens and a context of {config.block_size}, the "
                f"student {student.vocab_size} and {student.block_size}: train it on the same data, with that context"
            )
        if self.top_k is not None and self.top_k >= (V := config.vocab_size or 0):
            raise UserError(f"objective.top_k={self.top_k}: needs less than the {V} tokens of the vocabulary, or None")
        return run.model, jax.tree.map(np.asarray, run.params)


baseline = Experiment(
    name="baseline",
    model=GPTConfig(
        block_size=64,
        n_layer=4,
        n_head=4,
        n_embd=64,
        bias=False,
        norm="rmsnorm",
        activation="relu2",
        position="rope",
        rope_theta=1000.0,
        qk_norm=True,
        residual_init="zero",
        tie_embeddings=False,
    ),
    data=DataConfig(corpus="shakespeare"),
    optim=OptimConfig(
        name="muon", learning_rate=1e-2, muon_learning_rate=0.01, schedule="wsd", decay_fraction=0.5, min_lr_ratio=0.0
    ),
    train=TrainConfig(steps=400, batch_size=16, log_every=20, eval_every=100, eval_tokens=32768, sample_prompt="\n"),
)

teacher = dataclasses.replace(
    baseline,
    name="teacher",
    model=dataclasses.replace(baseline.model, n_embd=192, n_head=6),
    train=dataclasses.replace(baseline.train, steps=1200),
)

experiment = dataclasses.replace(baseline, name="distillation", objective=DistillationConfig())

variants = {"baseline": baseline, "distillation": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
