"""Gated DeltaNet: a recurrent state of fixed size, written by an error-correcting rule, in place of attention.

Question    Does a state that every token corrects learn as much as attention from the same tokens?
Reference   Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464: equation 10, in chunks in section 3.3. Hybrid: Qwen3-Next.
Change      Each head has a state S, first 0: S <- a S; S <- S + k (b (v - k S)); output q S. The token decides the decay
            a and the strength b. First a causal convolution of four tokens; q and k have length 1; output normed and gated.
Command     jaxgpt study experiments/zoo/gated_deltanet.py
Expected    A little behind attention at 64 characters of context, even with it if one layer attends, slower by the clock.
Result      At equal tokens gated DeltaNet -0.0165 ± 0.0054; one layer of four attends -0.0219 ± 0.0071, against 1.8287
            (0.0053). At 15.4 s gated DeltaNet +0.0945 ± 0.0287; one layer of four attends +0.0626 ± 0.0203, against
            1.8421 (0.0107). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Better at equal tokens, which was not expected, and worse by the clock.
"""

import dataclasses

import base
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import Count, Size
from jaxgpt.layers.block import Compute
from jaxgpt.layers.kernels.cached import is_decoding
from jaxgpt.layers.linear import Dense
from jaxgpt.layers.norm import RMSNorm


def gated_delta_rule(q_BTNH, k_BTNH, v_BTNF, log_decay_BTN, beta_BTN, is_first_BT, state_BNHF, *, chunk: int):
    """Return (out_BTNF, the state after the last token), in float32. The first token of a document finds S = 0.

    The corrections u of a chunk solve (I + lower(b k k' decay)) u = b (v - decay k S). F is the size of a value head.
    """
    T, size = q_BTNH.shape[1], min(chunk, q_BTNH.shape[1])

    def split(x):  # [B, T, N, ...] -> [chunks, B, N, size, ...]; padding has b = 0 and keeps the state
        x = jnp.pad(x, ((0, 0), (0, -T % size), *((0, 0) for _ in x.shape[2:])))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), (1, 3), (0, 2))

    def step(state_BNHF, inputs):
        q_BNTH, k_BNTH, v_BNTF, log_decay_BNT, beta_BNT, is_first_B1T = inputs
        total_BNT, begun_B1T = jnp.cumsum(log_decay_BNT, axis=-1), jnp.cumsum(is_first_B1T, axis=-1)
        same_B1TS = (begun_B1T[..., :, None] == begun_B1T[..., None, :]) & jnp.tri(size, dtype=bool)[None, None]
        apart_BNTS = jnp.minimum(total_BNT[..., :, None] - total_BNT[..., None, :], 0.0)
        decay_BNTS = jnp.where(same_B1TS, jnp.exp(apart_BNTS), 0.0)
        since_BNT1 = jnp.where(begun_B1T == 0, jnp.exp(total_BNT), 0.0)[..., None]  # from the old state to the token
        known_BNTF = beta_BNT[..., None] * (v_BNTF - since_BNT1 * (k_BNTH @ state_BNHF))
        system_BNTS = beta_BNT[..., None] * (k_BNTH @ k_BNTH.mT) * decay_BNTS
        u_BNTF = jax.scipy.linalg.solve_triangular(system_BNTS, known_BNTF, lower=True, unit_diagonal=True)
        out_BNTF = since_BNT1 * (q_BNTH @ state_BNHF) + ((q_BNTH @ k_BNTH.mT) * decay_BNTS) @ u_BNTF
        return since_BNT1[:, :, -1:] * state_BNHF + (decay_BNTS[:, :, -1, :, None] * k_BNTH).mT @ u_BNTF, out_BNTF

    inputs = tuple(map(split, (q_BTNH, k_BTNH, v_BTNF, log_decay_BTN, beta_BTN, is_first_BT[..., None])))
    state_BNHF, out = jax.lax.scan(step, state_BNHF, inputs)
    return jnp.moveaxis(out, (0, 3), (1, 2)).reshape(out.shape[1], -1, out.shape[2], out.shape[4])[:, :T], state_BNHF


def causal_conv(before_BWF, x_BTF, kernel_WF, positions_BT):
    """Return (the weighted sum of the last W tokens of the document, all inputs). before: the W - 1 inputs before x."""
    W, T, all_BSF = len(kernel_WF), x_BTF.shape[1], jnp.concatenate([before_BWF, x_BTF], axis=1)
    taps = (jnp.where((positions_BT >= W - 1 - w)[..., None], all_BSF[:, w : w + T], 0) for w in range(W))
    return sum(tap * kernel_WF[w].astype(x_BTF.dtype)[None, None] for w, tap in enumerate(taps)), all_BSF


class GatedDeltaNet(nn.Module):
    """x_BTD -> x_BTD by the gated delta rule: K key heads of size H, N value heads of size F."""

    config: "GatedDeltaNetConfig"
    dtype: jax.typing.DTypeLike = jnp.float32

    def setup(self) -> None:
        c, N = self.config, self.config.n_value_head
        keys, values = c.n_key_head * c.key_size, N * c.value_size
        how = {"use_bias": False, "kernel_init": c.make_kernel_init(), "dtype": self.dtype}
        self.q, self.k, self.v, self.gate = (Dense(size, **how) for size in (keys, keys, values, values))
        self.beta, self.decay = Dense(N, **how), Dense(N, **how)
        self.c_proj = Dense(c.n_embd, **how | {"kernel_init": c.make_residual_init()})
        self.conv = self.param("conv", nn.initializers.normal(c.conv_size**-0.5), (c.conv_size, 2 * keys + values))
        # The first decays of the heads are spread from exp(-0.001) to exp(-1.6), as those of Mamba-2 are.
        self.log_rate = self.param("log_rate", lambda _: jnp.log(jnp.linspace(1.0, 16.0, N)))
        self.decay_bias = self.param("decay_bias", lambda _: jnp.log(jnp.expm1(jnp.geomspace(0.001, 0.1, N))))
        self.norm, self.drop = RMSNorm(c.norm_eps), nn.Dropout(c.dropout)

    def __call__(self, x_BTD, positions_BT, *, segments_BT=None, train: bool = False):
        """Mix the tokens of each document. Position 0 begins one, so that segments are only needed for padding, 0.

        The collection "cache" has the last inputs of the convolution, and S in 32 bits, since it sums.
        """
        (B, T), c, N = x_BTD.shape[:2], self.config, self.config.n_value_head
        positions_BT = jnp.broadcast_to(positions_BT, (B, T))
        valid_BT = jnp.ones((B, T), bool) if segments_BT is None else segments_BT > 0
        before = jnp.zeros((B, c.conv_size - 1, self.conv.shape[1]), self.dtype)
        before_BWF = self.get_variable("cache", "conv", before)
        state_BNHF = self.get_variable("cache", "state", jnp.zeros((B, N, c.key_size, c.value_size)))
        qkv_BTF = jnp.concatenate([self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)], axis=-1)
        mixed_BTF, inputs_BSF = causal_conv(before_BWF, qkv_BTF, self.conv, positions_BT)
        qk_BTF, v_BTF = jnp.split(nn.silu(mixed_BTF).astype(jnp.float32), [2 * c.n_key_head * c.key_size], axis=-1)
        qk_BTKH = qk_BTF.reshape(B, T, 2 * c.n_key_head, -1)
        qk_BTKH *= jax.lax.rsqrt(jnp.sum(jnp.square(qk_BTKH), axis=-1, keepdims=True) + 1e-6)
        q_BTNH, k_BTNH = jnp.split(jnp.repeat(qk_BTKH, c.n_value_head // c.n_key_head, axis=2), 2, axis=2)
        step_BTN = nn.softplus(self.decay(x_BTD).astype(jnp.float32) + self.decay_bias[None, None])
        log_decay_BTN = jnp.where(valid_BT[..., None], -jnp.exp(self.log_rate)[None, None] * step_BTN, 0.0)
        beta_BTN = jnp.where(valid_BT[..., None], nn.sigmoid(self.beta(x_BTD).astype(jnp.float32)), 0.0)
        v_BTNF, is_first_BT = v_BTF.reshape(B, T, c.n_value_head, -1), valid_BT & (positions_BT == 0)
        inputs = q_BTNH * c.key_size**-0.5, k_BTNH, v_BTNF, log_decay_BTN, beta_BTN, is_first_BT, state_BNHF
        out_BTNF, state_BNHF = gated_delta_rule(*inputs, chunk=c.chunk)
        out_BTNF = self.norm(out_BTNF) * nn.silu(self.gate(x_BTD).astype(jnp.float32).reshape(v_BTNF.shape))
        last_BW1 = (valid_BT.sum(axis=1)[:, None] + jnp.arange(c.conv_size - 1)[None])[..., None]
        if is_decoding(self):
            self.put_variable("cache", "conv", jnp.take_along_axis(inputs_BSF, last_BW1, axis=1))
            self.put_variable("cache", "state", state_BNHF)
        x_BTD = self.c_proj(out_BTNF.reshape(B, T, -1).astype(self.dtype))
        return self.drop(x_BTD, deterministic=not train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(jaxgpt.GPTConfig):
    """A GPT whose blocks have a recurrent state, except for every n-th, which attends."""

    has_cache = True
    attend_every: Count | None = None  # every n-th layer attends; None: no layer does
    n_key_head: Count = 2  # heads of queries and keys in a recurrent layer
    n_value_head: Count = 2  # heads of values in a recurrent layer, a multiple of n_key_head
    key_size: Size = 16  # elements of a key head; the state of each value head has key_size x value_size numbers
    value_size: Size = 32  # elements of a value head
    conv_size: Count = 4  # tokens that the convolution reads
    chunk: Size = 32  # tokens whose corrections are solved together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_value_head % self.n_key_head or (self.scan_layers and self.attend_every):
            got = f"n_value_head={self.n_value_head}, n_key_head={self.n_key_head}, attend_every={self.attend_every}"
            raise jaxgpt.UserError(f"{got}: n_key_head must divide n_value_head, scan_layers is without attend_every")

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        attends = self.attend_every is not None and (layer + 1) % self.attend_every == 0
        return super().make_attention(layer, compute) if attends else GatedDeltaNet(self, compute.dtype)

    def label_parameter(self, path: tuple[str, ...], shape: tuple[int, ...]):
        return "vector" if path[-1] == "conv" else super().label_parameter(path, shape)  # no matrix: no Muon


model = GatedDeltaNetConfig(**dataclasses.asdict(base.experiment.model))
experiment = dataclasses.replace(base.experiment, name="zoo-gated-deltanet", model=model)
hybrid = dataclasses.replace(experiment, model=dataclasses.replace(model, attend_every=4))
variants = {"baseline": base.experiment, "gated DeltaNet": experiment, "one layer of four attends": hybrid}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
