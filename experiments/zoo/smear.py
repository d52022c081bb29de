"""Smear: each token's embedding takes in a gated share of the previous token's.

Question    A head that attends to the previous token is one of the first things that a model learns. Is it worth having
            from the start, for a few parameters?
Reference   modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt, "smear" in train_gpt.py since September 2025.
Change      The embedding x_t becomes x_t + scale sigmoid(w x_t[:12]) x_(t-1), with one learned scale, 0 at first, and a
            gate w that reads the first 12 elements. The first token of a document has no previous one. Both are 13
            parameters more than the baseline's. modded-nanogpt norms the embedding first, which is left out.
            It keeps the embeddings of earlier tokens in the collection "cache", so that sampling is cached.
Command     jaxgpt study experiments/zoo/smear.py
Expected    Better by about 0.01 to 0.02 at equal tokens, at no visible cost in time.
Result      At equal tokens -0.0024 ± 0.0058, against 1.8287 (0.0053). At 15.6 s +0.0246 ± 0.0582, against 1.8471
            (0.0124). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No more than noise, where 0.01 to 0.02 was expected, and as nanochat found.
"""

import dataclasses

import base
import cached
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import Size
from jaxgpt.layers.block import Compute
from jaxgpt.layers.linear import Dense


def add_previous(x_BTD: jax.Array, before_B1D: jax.Array, share_BT1: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Return x_t + share_t x_(t-1), except where a document begins. before: the x of the token before the first."""
    previous_BTD = jnp.concatenate([before_B1D, x_BTD[:, :-1]], axis=1)
    return x_BTD + jnp.where(positions_BT[..., None] > 0, share_BT1 * previous_BTD, 0)


class Smear(nn.Module):
    """x_BTD -> x_BTD, with a gated share of the token before."""

    gate_width: int
    dtype: jax.typing.DTypeLike = jnp.float32

    def setup(self) -> None:
        self.gate = Dense(1, use_bias=False, kernel_init=nn.initializers.zeros, dtype=self.dtype)
        self.scale = self.param("scale", nn.initializers.zeros, ())

    def __call__(self, x_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Smear the next tokens of each row."""
        positions_BT = jnp.broadcast_to(positions_BT, x_BTD.shape[:2])
        before_B1D = jnp.zeros_like(x_BTD[:, :1])
        if (kept := cached.remember(self, positions_BT, x_BTD)) is not None:
            before_B1D = jnp.take_along_axis(kept[0], positions_BT[:, :1, None] - 1, axis=1)
        share_BT1 = self.scale.astype(self.dtype) * nn.sigmoid(self.gate(x_BTD[..., : self.gate_width]))
        return add_previous(x_BTD, before_B1D, share_BT1, positions_BT)


class SmearGPT(jaxgpt.GPT):
    """A GPT with smeared embeddings."""

    def setup(self) -> None:
        super().setup()
        self.smear = Smear(min(self.config.gate_width, self.config.n_embd), self.dtype)

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array, train: bool = False) -> jax.Array:
        """Embed tokens, then smear."""
        return self.sharding.constrain(self.smear(super().embed(tokens_BT, positions_BT, train), positions_BT))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmearConfig(jaxgpt.GPTConfig):
    """A GPT whose embeddings are smeared."""

    has_cache = True
    gate_width: Size = 12  # elements of the embedding that the gate reads, from the first on; at most all

    def make_model(self, compute: Compute | None = None) -> SmearGPT:
        return SmearGPT(self, *(compute or Compute()))


experiment = dataclasses.replace(
    base.experiment, name="zoo-smear", model=SmearConfig(**dataclasses.asdict(base.experiment.model))
)
variants = {"baseline": base.experiment, "smear": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
