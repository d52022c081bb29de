"""Dynamic tanh: an element-wise tanh(alpha x) in place of each norm of the residual stream.

Question    Are statistics needed at all, or is it enough that a norm tames large values?
Reference   Zhu et al. 2025, arXiv:2503.10622, equation 1; section 6 and appendix for language models.
Change      RMSNorm(x) becomes gamma tanh(alpha x) + beta with one learned alpha for each norm. After the embedding comes
            a learned factor, sqrt(D) at first, as the paper needs for language models: without a norm the stream would
            start at 0.02. The norms of queries and keys stay: the paper's models have none. The paper starts alpha at 1
            for a width of 1,024, and at less for wider ones. Nine alphas, nine betas and the factor: 586 parameters more.
Command     jaxgpt study experiments/zoo/dyt.py
Expected    Worse than RMSNorm by 0.02 or more at equal tokens, as nanochat found, and no faster: on a CPU the norms are a
            small part of a step.
Result      At equal tokens +0.0465 ± 0.0077, against 1.8287 (0.0053). At 15.5 s +0.0574 ± 0.0225, against 1.8467
            (0.0154). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Worse, by more than was expected. It carries over from 124M.
"""

import dataclasses
import math

import base
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import PositiveFloat
from jaxgpt.errors import UserError
from jaxgpt.layers.block import Compute


def dynamic_tanh(x_BTD: jax.Array, alpha: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Return gamma tanh(alpha x) + beta in x's dtype, computed in float32."""
    return (scale_D[None, None] * jnp.tanh(alpha * x_BTD.astype(jnp.float32)) + bias_D[None, None]).astype(x_BTD.dtype)


class DynamicTanh(nn.Module):
    """`dynamic_tanh` with its parameters, x_BTD -> x_BTD."""

    first_alpha: float
    first_scale: float = 1.0

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Squash each element."""
        D = x_BTD.shape[-1]
        alpha = self.param("alpha", nn.initializers.constant(self.first_alpha), ())
        scale_D = self.param("scale", nn.initializers.constant(self.first_scale), (D,))
        return dynamic_tanh(x_BTD, alpha, scale_D, self.param("bias", nn.initializers.zeros, (D,)))


class DyTGPT(jaxgpt.GPT):
    """A GPT with a learned factor after the embedding."""

    def setup(self) -> None:
        super().setup()
        init = nn.initializers.constant(math.sqrt(self.config.n_embd))
        self.embedding_scale = self.param("embedding_scale", init, ())

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array, train: bool = False) -> jax.Array:
        """Embed tokens at a size that tanh can tell apart."""
        return self.embedding_scale.astype(self.dtype) * super().embed(tokens_BT, positions_BT, train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DyTConfig(jaxgpt.GPTConfig):
    """A GPT without norms in its residual stream."""

    has_cache = True
    first_alpha: PositiveFloat = 1.0  # initial slope of each tanh

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_embeddings:
            raise UserError("scale_embeddings=True: the embedding has a learned factor already, so leave it False")

    def make_norm(self, *, first_scale: float = 1.0) -> nn.Module:
        return DynamicTanh(self.first_alpha, first_scale)

    def make_model(self, compute: Compute | None = None) -> DyTGPT:
        return DyTGPT(self, *(compute or Compute()))


experiment = dataclasses.replace(
    base.experiment, name="zoo-dyt", model=DyTConfig(**dataclasses.asdict(base.experiment.model))
)
variants = {"baseline": base.experiment, "dynamic tanh": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
