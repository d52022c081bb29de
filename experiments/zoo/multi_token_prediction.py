"""Multi-token prediction: in training, extra heads predict the tokens after the next.

Question    Does looking further ahead teach a small model more about the next token?
Reference   Gloeckle et al. 2024, arXiv:2404.19737, section 2; the weight of the extra losses is DeepSeek V3's,
            arXiv:2412.19437, section 2.2.
Change      Each extra head is a block on top of all others, whose output goes through the model's last norm and output
            matrix, and predicts the token after the next, the one after that, and so on. Their losses are added, times
            `weight`. Validation and sampling leave the heads out, so the model is the baseline with a head more in
            training: 49,312 parameters, and about a quarter of the time. In the paper the heads take blocks from the
            trunk. Left out: speculative decoding by the heads, and running them in turn to save the logits' memory.
Command     jaxgpt study experiments/zoo/multi_token_prediction.py
Expected    Worse by 0.01 or more at equal tokens: the paper finds that models below 1B parameters lose, nanochat too.
Result      At equal tokens -0.0027 ± 0.0034, against 1.8287 (0.0053). At 15.8 s +0.0699 ± 0.0200, against 1.8377
            (0.0121). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No more than noise at equal tokens, where a loss was expected, and worse by the clock: as at 124M.
"""

import dataclasses
from collections.abc import Callable

import base
import jax
import jax.numpy as jnp

import jaxgpt
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Count, NonNegativeFloat
from jaxgpt.errors import UserError
from jaxgpt.layers.block import Compute
from jaxgpt.loss import SOWN, add_sown, next_token_loss


def later_targets(batch: Batch, ahead: int) -> tuple[jax.Array, jax.Array]:
    """Return (the targets `ahead` tokens later, whether each counts: it is in the row and in the same document)."""
    T = batch.targets_BT.shape[1]
    mask_BT = jnp.broadcast_to(jnp.arange(T)[None] < T - ahead, batch.targets_BT.shape)
    if batch.mask_BT is not None:
        mask_BT &= jnp.roll(batch.mask_BT, -ahead, axis=1)
    if batch.segments_BT is not None:
        mask_BT &= jnp.roll(batch.segments_BT, -ahead, axis=1) == batch.segments_BT
    return jnp.roll(batch.targets_BT, -ahead, axis=1), mask_BT


class FutureGPT(jaxgpt.GPT):
    """A GPT with extra heads, whose hidden states are sown in the collection "future"."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.h_future = [c.make_block(c.n_layer + head, self.compute) for head in range(c.n_future)]

    def run_blocks(self, x_BTD: jax.Array, run_block: Callable[..., jax.Array], tokens_BT: jax.Array) -> jax.Array:
        """Run the blocks, and the heads if somebody asks for their states."""
        x_BTD = super().run_blocks(x_BTD, run_block, tokens_BT)
        if self.is_mutable_collection("future"):  # as it is when the parameters are made
            for block in self.h_future:
                self.sow("future", "states", self.norm_output(run_block(block, x_BTD)))
        return x_BTD


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureConfig(jaxgpt.GPTConfig):
    """A GPT with extra heads in training."""

    has_cache = True
    n_future: Count = 1  # extra heads: tokens after the next that are predicted

    def make_model(self, compute: Compute | None = None) -> FutureGPT:
        return FutureGPT(self, *(compute or Compute()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FutureObjective(jaxgpt.ObjectiveConfig):
    """The next token's loss, and in training that of the tokens after it."""

    weight: NonNegativeFloat = 0.3  # of each extra head's loss

    def make_loss(self, model, *, head_loss=None, label_smoothing: float = 0.0):
        if not isinstance(model, FutureGPT):
            raise UserError(f"FutureObjective needs a model with extra heads, FutureConfig, not {type(model).__name__}")
        plain = super().make_loss(model, head_loss=head_loss, label_smoothing=label_smoothing)

        def sum_nats(params, x_BTD, targets_BT, mask_BT):
            head = {name: params[name] for name in model.unembed_params}
            if head_loss is not None:
                function = lambda *args: head_loss(model, *args, smoothing=label_smoothing)  # noqa: E731
                return model.sharding.reduce_loss(function)(head, x_BTD, targets_BT, mask_BT)
            logits_BTV = model.apply({"params": head}, x_BTD, method="unembed")
            return next_token_loss(logits_BTV, targets_BT, mask_BT, smoothing=label_smoothing)

        def loss(params, batch: Batch, key):
            if key is None:
                return plain(params, batch, key)
            inputs = {"segments_BT": batch.segments_BT, "train": True, "rngs": {"dropout": key}} | (batch.extras or {})
            how = {"mutable": ("future", *SOWN), "method": "hidden_states"}
            x_BTD, sown = model.apply({"params": params}, batch.inputs_BT, **inputs, **how)
            nats, count = sum_nats(params, x_BTD, batch.targets_BT, batch.mask_BT)
            nats, metrics = add_sown(nats, count, sown)
            for ahead, x_BTD in enumerate(sown["future"]["states"], start=1):
                later, later_count = sum_nats(params, x_BTD, *later_targets(batch, ahead))
                metrics[f"future_{ahead + 1}"] = later * count / jnp.maximum(later_count, 1.0)
                nats += self.weight * metrics[f"future_{ahead + 1}"]
            return nats, count, metrics

        return loss


experiment = dataclasses.replace(
    base.experiment,
    name="zoo-multi-token-prediction",
    model=FutureConfig(**dataclasses.asdict(base.experiment.model)),
    objective=FutureObjective(),
)
variants = {"baseline": base.experiment, "two tokens": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
