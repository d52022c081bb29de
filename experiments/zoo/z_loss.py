"""z-loss: a pull on the logarithm of softmax's denominator towards zero, so that logits do not drift.

Question    Does the term, which is there to keep long runs in bfloat16 stable, cost anything in a short one, or help?
Reference   Chowdhery et al. 2022, arXiv:2204.02311 (PaLM), section 5: 1e-4 log^2 Z is added to the loss of each token,
            where Z is the sum of the exponentials of its logits.
Change      An objective of one's own: the next-token loss and the term, in training only. metrics.jsonl has "z_loss",
            the term in nats per target, and "log_z", the mean of log Z. The second variant has a hundred times PaLM's
            coefficient, to see what the term does if it is not negligible. Model, parameters and optimiser are the
            baseline's, and no rate was tuned for either.
Command     jaxgpt study experiments/zoo/z_loss.py
Expected    No difference at 1e-4: with 65 characters log Z starts at 4.2, and the term is 0.002 nats. At 1e-2 a loss of
            0.005.
Result      At equal tokens z-loss 1e-4 -0.0001 ± 0.0062; z-loss 1e-2 -0.0017 ± 0.0078, against 1.8287 (0.0053). At 15.5
            s z-loss 1e-4 -0.0070 ± 0.0126; z-loss 1e-2 -0.0095 ± 0.0168, against 1.8535 (0.0090). Eight seeds, one core
            of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No more than noise, as expected at 1e-4, and without the loss that was expected at 1e-2.
"""

import dataclasses
from typing import Any

import base
import jax
import jax.numpy as jnp
import logits
from flax import linen as nn

import jaxgpt
from jaxgpt import ObjectiveConfig
from jaxgpt.batch import Batch
from jaxgpt.config.validate import PositiveFloat, check_fields
from jaxgpt.train import LossFn


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZLossConfig(ObjectiveConfig):
    """The next token's loss and PaLM's auxiliary z-loss."""

    z_loss: PositiveFloat = 1e-4  # nats per target for each square of log Z

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)

    def make_loss(self, model: nn.Module, *, head_loss: Any = None, label_smoothing: float = 0.0) -> LossFn:
        """Return the loss, with the term in training."""
        logits.need_logits(head_loss, "z-loss")

        def term(logits_BTV: jax.Array, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
            added_BT = self.z_loss * jnp.square(log_z_BT)
            return added_BT, {"z_loss": added_BT, "log_z": log_z_BT}

        return logits.add_term(super().make_loss(model, label_smoothing=label_smoothing), term)


experiment = dataclasses.replace(base.experiment, name="zoo-z-loss", objective=ZLossConfig())

variants = {
    "baseline": base.experiment,
    "z-loss 1e-4": experiment,
    "z-loss 1e-2": dataclasses.replace(experiment, objective=ZLossConfig(z_loss=1e-2)),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
