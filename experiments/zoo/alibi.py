"""ALiBi: a bias on the attention scores that falls linearly with distance, instead of positions.

Question    Does a model without embedded or rotated positions learn as much from the same tokens if each head prefers
            near tokens by a slope of its own?
Reference   Press, Smith and Lewis 2021, arXiv:2108.12409, section 3: the bias -m (t - s) is added to the score of query
            t and key s, with m a geometric sequence over the heads that starts at 2^(-8/N) and has that ratio.
Change      Rotations are off. The bias is a product: softmax ignores the term -m t, which all keys of a query share, and
            m s is the product of one more element of the query, m, with one more element of the key, s. So any kernel of
            attention can compute it, and the cache of keys holds it. Two elements, not one: s is the sum of a multiple
            of 256 and a rest, both exact in bfloat16. There is nothing to learn; the parameters are the baseline's.
            Left out: the authors' other sequence of slopes where N is not a power of two, and fused kernels, which
            need other head sizes.
Command     jaxgpt study experiments/zoo/alibi.py
Expected    No better than rotary positions within the training context, perhaps 0.01 to 0.02 worse: the paper's gain is
            on contexts longer than those of training, and in speed against sines.
Result      At equal tokens alibi +0.0796 ± 0.0049; no positions +0.2838 ± 0.0166, against 1.8287 (0.0053). At 14.7 s
            alibi +0.0737 ± 0.0179; no positions +0.2708 ± 0.0131, against 1.8641 (0.0147). Eight seeds, one core of an
            AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Worse, by four times what was expected, and far better than no positions at all.
"""

import dataclasses
from typing import Literal

import base
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt import GPTConfig, UserError
from jaxgpt.layers import Attention
from jaxgpt.layers.block import Compute
from jaxgpt.layers.kernels.plain import plain_attention


def alibi_slopes(n_head: int) -> jax.Array:
    """Return the slope of each head, slopes_N: 2^(-8/N), 2^(-16/N), ... 2^-8."""
    return 2.0 ** (-8.0 * jnp.arange(1, n_head + 1) / n_head)


def extend_queries(q_BTNH: jax.Array, scale: float) -> jax.Array:
    """Append to each query the factors of its keys' two elements, so that q k scale gains m s."""
    slopes_N = alibi_slopes(q_BTNH.shape[2]) / scale
    more_N2 = jnp.stack([256.0 * slopes_N, slopes_N], axis=-1)
    more_BTN2 = jnp.broadcast_to(more_N2[None, None], (*q_BTNH.shape[:3], 2))
    return jnp.concatenate([q_BTNH, more_BTN2.astype(q_BTNH.dtype)], axis=-1)


def extend_keys(k_BTKH: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Append to each key its position, as multiples of 256 and a rest."""
    more_BT12 = jnp.stack([positions_BT // 256, positions_BT % 256], axis=-1)[:, :, None]
    more_BTK2 = jnp.broadcast_to(more_BT12, (*k_BTKH.shape[:3], 2))
    return jnp.concatenate([k_BTKH, more_BTK2.astype(k_BTKH.dtype)], axis=-1)


class ALiBi(Attention):
    """jaxgpt's attention, whose queries and keys have two more elements."""

    def project(self, x_BTD: jax.Array, positions_BT: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return (q_BTNH, k_BTKH, v_BTKH): H of queries and keys is the head size + 2."""
        if positions_BT is None:
            positions_BT = jnp.arange(x_BTD.shape[1])[None]
        q_BTNH, k_BTKH, v_BTKH = super().project(x_BTD, positions_BT)
        assert self.scale
        return extend_queries(q_BTNH, self.scale), extend_keys(k_BTKH, positions_BT), v_BTKH


@dataclasses.dataclass(frozen=True, kw_only=True)
class ALiBiConfig(GPTConfig):
    """A GPT that knows positions by ALiBi alone."""

    position: Literal["learned", "sinusoidal", "rope", "none"] = "none"  # of the embedding and of rotations: none
    has_cache = True

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.position != "none" or self.attention_softcap is not None:
            raise UserError(
                f"position={self.position}, attention_softcap={self.attention_softcap}: ALiBi takes the place of positions, "
                "and a cap would bend its bias; take position=none and no cap"
            )

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        """Return attention with ALiBi, by the plain kernel."""
        plain = super().make_attention(layer, compute._replace(attention_fn=plain_attention))
        fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(Attention)}
        return ALiBi(**{name: value for name, value in fields.items() if name not in ("name", "parent")})


experiment = dataclasses.replace(
    base.experiment,
    name="zoo-alibi",
    model=ALiBiConfig(**dataclasses.asdict(base.experiment.model) | {"position": "none"}),
)

variants = {
    "baseline": base.experiment,
    "alibi": experiment,
    "no positions": dataclasses.replace(
        base.experiment, model=dataclasses.replace(base.experiment.model, position="none")
    ),
}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
