"""Distillation: a small model learns from the probabilities of a larger one, and from the text.

Question    Does a student learn more from the same tokens if a teacher says how probable each next character was?
Reference   Hinton, Vinyals and Dean 2015, arXiv:1503.02531, section 2: the loss is (1 - weight) cross-entropy + weight
            temperature^2 KL(teacher || student), both softened by the temperature. The square keeps the gradients'
            size.
Change      An objective of one's own. The teacher is a run directory, loaded when the loss is made; its parameters are
            constants of the compiled step, in which it runs without dropout. It must have the student's vocabulary, by
            the same tokenizer, and at least its context. metrics.jsonl has "kl", nats per target at that temperature.
            Validation has the plain loss. Student, parameters and optimiser are the baseline's; no rate was tuned for
            either. The time of the teacher's training is not the student's, its forward passes are.
Command     jaxgpt train experiments/zoo/distillation.py:teacher --run-dir runs/zoo-teacher
            jaxgpt study experiments/zoo/distillation.py
Expected    Better by 0.02: the teacher, with nine times the parameters and three times the steps, has a validation loss
            of 1.6042 after its training (seed 0, two cores of an AMD EPYC, 2026-11-24), where the baseline has 1.8383.
            At equal seconds worse, since its forward passes take longer than the student's whole step.
Result      At equal tokens -0.0677 ± 0.0111, against 1.8287 (0.0053). At 15.6 s +0.1394 ± 0.0183, against 1.8472
            (0.0149). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Better at equal tokens, by three times what was expected, and worse by the clock, as expected.
"""

import dataclasses
from typing import Any

import base
import jax
import jax.numpy as jnp
import logits
import numpy as np
from flax import linen as nn

import jaxgpt
from jaxgpt import ObjectiveConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Fraction, PositiveFloat, check_fields
from jaxgpt.train import LossFn


def softened_kl(teacher_BTV: jax.Array, student_BTV: jax.Array, temperature: float) -> jax.Array:
    """Return KL(teacher || student) of each token's logits divided by the temperature, in nats [B, T]."""
    log_p_BTV = jax.nn.log_softmax(teacher_BTV / temperature)
    log_q_BTV = jax.nn.log_softmax(student_BTV / temperature)
    return jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV), axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillationConfig(ObjectiveConfig):
    """The loss of the next token, mixed with the divergence from a teacher."""

    teacher: str = "runs/zoo-teacher"  # the run directory of the teacher
    weight: Fraction = 0.5  # share of the divergence; the rest is the cross-entropy
    temperature: PositiveFloat = 2.0  # of both models in the divergence

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    def make_loss(self, model: nn.Module, *, head_loss: Any = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss, mixed in training."""
        logits.need_logits(head_loss, "distillation")
        teacher, params = self._load_teacher(model.config)  # type: ignore[attr-defined]

        def term(logits_BTV: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            said_BTV = teacher.apply({"params": params}, batch.inputs_BT, segments_BT=batch.segments_BT)
            kl_BT = softened_kl(said_BTV, logits_BTV, self.temperature)
            log_p_BTV = jax.nn.log_softmax(logits_BTV)
            targets_BT = jnp.maximum(batch.targets_BT, 0)  # one that does not count may be negative
            nats_BT = -jnp.take_along_axis(log_p_BTV, targets_BT[..., None], axis=-1)[..., 0]
            return self.weight * (self.temperature**2 * kl_BT - nats_BT), {"kl": kl_BT}

        return logits.add_term(super().make_loss(model, label_smoothing=label_smoothing), term)

    def _load_teacher(self, student: jaxgpt.GPTConfig) -> tuple[jaxgpt.GPT, dict]:
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
        return run.model, jax.tree.map(np.asarray, run.params)


teacher = dataclasses.replace(
    base.experiment,
    name="zoo-teacher",
    model=dataclasses.replace(base.experiment.model, n_embd=192, n_head=6),
    train=dataclasses.replace(base.experiment.train, steps=1200),
)

experiment = dataclasses.replace(base.experiment, name="zoo-distillation", objective=DistillationConfig())

variants = {"baseline": base.experiment, "distillation": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
