"""Multi-head latent attention: keys and values of all heads are made from one small vector, and only this vector is cached.

Question    How much does a model lose when each token leaves a latent of 16 numbers and a rotated key of 8 in the cache,
            where the baseline leaves 128 numbers per layer?
Reference   DeepSeek-AI 2024, arXiv:2405.04434, section 2.1: equations 9 to 13 (latents) and 14 to 19 (decoupled rotation).
Change      c = norm(W x) has C = kv_rank numbers. A head's key is W_k c next to a rotated key of R = rope_dim numbers that
            all heads share; its value is W_v c. With `q_rank` queries have a latent, too. `decode` keeps c and the rotated
            key only: it multiplies queries by W_k and weighted latents by W_v. Keys cannot be normed then; a variant
            without that norm tells both changes apart. 5% fewer parameters. Left out: biases, grouped heads, fused kernels.
Command     jaxgpt study experiments/zoo/mla.py
Expected    0.01 to 0.03 worse than the baseline, half of it for the missing norm.
Result      At equal tokens no norm of keys +0.0478 ± 0.0071; mla +0.0910 ± 0.0116, against 1.8287 (0.0053). At 14.9 s
            no norm of keys +0.0277 ± 0.0067; mla +0.0825 ± 0.0217, against 1.8624 (0.0170). Eight seeds, one core of an
            AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Worse, by three times what was expected, and the missing norm is half of it, as expected.
"""

import dataclasses
import functools

import base
import cached
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt import GPTConfig, UserError
from jaxgpt.config.validate import PositiveFloat, Size
from jaxgpt.layers.block import Compute
from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.layers.linear import Dense
from jaxgpt.layers.position import rope


class MLA(nn.Module):
    """Latent attention, x_BTD -> x_BTD: N heads of H numbers without and R with rotation, values of W, latents of C."""

    config: "MLAConfig"
    compute: Compute

    def setup(self) -> None:
        """Create the projections and the norms of the latents."""
        c, dtype = self.config.explicit(), self.compute.dtype
        dense = functools.partial(Dense, use_bias=False, kernel_init=c.make_kernel_init(), dtype=dtype)
        if c.q_rank is not None:
            self.q_down, self.q_norm = dense(c.q_rank), c.make_norm()
        self.q = dense(c.n_head * (c.head_dim + c.rope_dim))
        self.kv_down, self.kv_norm = dense(c.kv_rank + c.rope_dim), c.make_norm()
        # Not a `Dense`: decoding multiplies by parts of it, from both sides.
        up_CF = self.param("kv_up", c.make_kernel_init(), (c.kv_rank, c.n_head * (c.head_dim + c.value_dim)))
        up_CNX = up_CF.astype(dtype).reshape(c.kv_rank, c.n_head, -1)
        self.k_CNH, self.v_CNW = up_CNX[..., : c.head_dim], up_CNX[..., c.head_dim :]
        self.c_proj = dense(c.n_embd, use_bias=bool(c.out_bias), kernel_init=c.make_residual_init())
        self.drop = nn.Dropout(c.dropout)
        self.rotation = c.make_rope(None)._replace(size=c.rope_dim)
        self.scale = c.score_scale * (c.head_dim + c.rope_dim) ** -0.5

    def queries(self, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return each head's query, the part without and the rotated part with a position: (q_BTNH, q_BTNR)."""
        c = self.config.explicit()
        q_BTF = self.q(x_BTD if c.q_rank is None else self.q_norm(self.q_down(x_BTD)))
        q_BTNH, q_BTNR = jnp.split(q_BTF.reshape(*x_BTD.shape[:2], c.n_head, -1), [c.head_dim], axis=-1)
        return q_BTNH, rope(q_BTNR, positions_BT, self.rotation)

    def latents(self, x_BTD: jax.Array, positions_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return what is cached of each token: its latent and the key with its position, (c_BTC, k_BTR)."""
        c_BTC, k_BTR = jnp.split(self.kv_down(x_BTD), [self.config.kv_rank], axis=-1)
        return self.kv_norm(c_BTC), rope(k_BTR[:, :, None], positions_BT, self.rotation)[:, :, 0]

    def merge(self, out_BTNW: jax.Array, train: bool = False) -> jax.Array:
        """Merge the heads' outputs and project them to x_BTD."""
        return self.drop(self.c_proj(out_BTNW.reshape(*out_BTNW.shape[:2], -1)), deterministic=not train)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        segments_BT: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array:
        """Make keys and values of all tokens, and attend by the plain kernel; or attend to the latents in the cache."""
        positions_BT = jnp.arange(x_BTD.shape[1])[None] if positions_BT is None else positions_BT
        (q_BTNH, q_BTNR), (c_BTC, k_BTR) = self.queries(x_BTD, positions_BT), self.latents(x_BTD, positions_BT)
        if (kept := cached.remember(self, positions_BT, c_BTC, k_BTR)) is not None:
            return self.merge(self.attend_to_latents(q_BTNH, q_BTNR, *kept, positions_BT))
        k_BTNH, v_BTNW = (jnp.einsum("BTC,CNX->BTNX", c_BTC, kernel) for kernel in (self.k_CNH, self.v_CNW))
        k_BTNR = jnp.broadcast_to(k_BTR[:, :, None], q_BTNR.shape)
        q, k = (jnp.concatenate(parts, axis=-1) for parts in ((q_BTNH, q_BTNR), (k_BTNH, k_BTNR)))
        scores = Scores(self.scale, dropout=self.config.dropout)
        key = self.make_rng("dropout") if train and self.config.dropout else None
        return self.merge(plain_attention(q, k, v_BTNW, scores, segments_BT=segments_BT, key=key), train)

    def attend_to_latents(
        self, q_BTNH: jax.Array, q_BTNR: jax.Array, c_BSC: jax.Array, k_BSR: jax.Array, positions_BT: jax.Array
    ) -> jax.Array:
        """Attend the next T tokens to the latents in the cache, out_BTNW."""
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        q_BTNC = jnp.einsum("BTNH,CNH->BTNC", q_BTNH, self.k_CNH)  # W_k absorbed into the query
        scores_BNTS = product("BTNC,BSC->BNTS", q_BTNC, c_BSC) + product("BTNR,BSR->BNTS", q_BTNR, k_BSR)
        weights_BNTS = cached.causal_softmax(scores_BNTS * self.scale, positions_BT).astype(c_BSC.dtype)
        out_BTNC = jnp.einsum("BNTS,BSC->BTNC", weights_BNTS, c_BSC)
        return jnp.einsum("BTNC,CNW->BTNW", out_BTNC, self.v_CNW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig(GPTConfig):
    """A GPT with latent attention. head_dim is the size of a head's part without a position."""

    has_cache = True
    kv_rank: Size = 16  # numbers in the latent of keys and values
    q_rank: Size | None = None  # numbers in the latent of queries; None: none, queries are made from the stream
    rope_dim: Size = 8  # rotated numbers of a head's query and key, with one key for all heads: even
    value_dim: Size = 16  # numbers of a head's value
    score_scale: PositiveFloat = 1.0  # factor of the scores, next to 1 / sqrt(head_dim + rope_dim)

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        heads = self.n_kv_head not in (None, self.n_head)
        if self.position != "rope" or self.qk_norm or self.sliding_window or self.attention_softcap or heads:
            raise UserError(
                f"position={self.position}, qk_norm={self.qk_norm}, n_kv_head={self.n_kv_head}: latent attention needs rope, "
                "and has no qk_norm, n_kv_head, sliding_window or attention_softcap"
            )
        if self.rope_dim % 2:
            raise UserError(f"rope_dim={self.rope_dim} is odd: rope rotates pairs, so it must be even")

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        """Return latent attention."""
        return MLA(self, compute)


plain = dataclasses.replace(base.experiment.model, qk_norm=False)
experiment = dataclasses.replace(base.experiment, name="zoo-mla", model=MLAConfig(**dataclasses.asdict(plain)))

no_norm = dataclasses.replace(base.experiment, model=plain)
variants = {"baseline": base.experiment, "no norm of keys": no_norm, "mla": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
