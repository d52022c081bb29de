"""Value embeddings: in every other layer, attention's values take in an embedding of the token, through a gate.

Question    Do values that know their token spare the blocks from carrying it through the residual stream?
Reference   Zhou et al. 2024, arXiv:2410.17897, "value residual"; as embeddings in modded-nanogpt since December 2024,
            https://github.com/KellerJordan/modded-nanogpt; with gates in nanochat, https://github.com/karpathy/nanochat.
Change      Every second layer, counted from the last, has a table of tokens. The values v of a head become v + g e, where
            e is the token's row and g = 2 sigmoid(w x[:32]) reads what the layer reads; g is 1 at first. With 65
            characters that is 4,160 parameters a table and 128 a gate: 8,576 more in four layers, 4%.
            A token's values depend on itself alone, so that decoding caches them as they are.
Command     jaxgpt study experiments/zoo/value_embeddings.py
Expected    Better by 0.01 to 0.03 at equal tokens: nanochat's log says that models love them.
Result      At equal tokens -0.0024 ± 0.0034, against 1.8287 (0.0053). At 15.9 s +0.0201 ± 0.0274, against 1.8534
            (0.0269). Eight seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     No more than noise: at equal tokens the gain is 0.006 at most. That at 124M does not carry over.
"""

import dataclasses
from collections.abc import Callable

import base
import jax
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import Count, Size
from jaxgpt.errors import UserError
from jaxgpt.layers import Attention, Block
from jaxgpt.layers.block import Compute
from jaxgpt.layers.linear import Dense, Embedding


def add_gated(v_BTKH: jax.Array, embedded_BTKH: jax.Array, gate_BTK: jax.Array) -> jax.Array:
    """Return the values with their token's embedding, times 2 sigmoid(gate) for each head."""
    return v_BTKH + 2.0 * nn.sigmoid(gate_BTK)[..., None] * embedded_BTKH.astype(v_BTKH.dtype)


class ValueAttention(Attention):
    """Attention whose values take in an embedding."""

    gate_width: int = 32

    def setup(self) -> None:
        super().setup()
        n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.gate = Dense(n_kv_head, use_bias=False, kernel_init=nn.initializers.zeros, dtype=self.dtype)

    def __call__(self, x_BTD, positions_BT=None, *, values_BTF=None, segments_BT=None, train: bool = False):
        """Attend. values_BTF: the embedding of each token, for all key/value heads side by side."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, positions_BT)
        v_BTKH = add_gated(v_BTKH, self.split_heads(values_BTF), self.gate(x_BTD[..., : self.gate_width]))
        documents = {"positions_BT": positions_BT, "segments_BT": segments_BT}
        out_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH, **documents, train=train)
        return self.merge_heads(out_BTNH, train)


class ValueBlock(Block):
    """A block that hands its attention an embedding for the values."""

    def __call__(self, x_BTD, positions_BT=None, *, values_BTF=None, segments_BT=None, train: bool = False):
        """Return the residual stream after both branches."""
        more = {"segments_BT": segments_BT, "train": train, "values_BTF": values_BTF}
        x_BTD = self.middle(x_BTD + self.attn(self.ln_1(x_BTD), positions_BT, **more))
        return self.compute.sharding.constrain(x_BTD + self.mlp(self.ln_2(x_BTD), train=train))


class ValueGPT(jaxgpt.GPT):
    """A GPT with tables of tokens for the values of some layers."""

    def setup(self) -> None:
        super().setup()
        c = self.config.explicit()
        self.value = [
            Embedding(c.vocab_size, c.n_kv_head * c.head_dim) for layer in range(c.n_layer) if c.has_table(layer)
        ]

    def run_blocks(self, x_BTD: jax.Array, run_block: Callable[..., jax.Array], tokens_BT: jax.Array) -> jax.Array:
        """Run the blocks in turn, those with a table with the rows of the tokens."""
        tables = iter(self.value)
        for layer, block in enumerate(self.h):
            more = {"values_BTF": next(tables)(tokens_BT)} if self.config.has_table(layer) else {}
            x_BTD = run_block(block, x_BTD, **more)
        return x_BTD


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueConfig(jaxgpt.GPTConfig):
    """A GPT with value embeddings."""

    has_cache = True
    table_every: Count = 2  # every n-th layer has a table of tokens for its values, counted from the last layer
    gate_width: Size = 32  # elements that the gate reads, from the first on; at most all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scan_layers or self.norm_position != "pre" or self.parallel_residual:
            got = f"scan_layers={self.scan_layers}, norm_position={self.norm_position}, parallel_residual={self.parallel_residual}"
            raise UserError(
                f"{got}: value embeddings need separate layers, norms before them, and no parallel branches"
            )

    def has_table(self, layer: int) -> bool:
        """Return whether a layer has a table for its values."""
        return (self.n_layer - 1 - layer) % self.table_every == 0

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        attention = super().make_attention(layer, compute)
        if not self.has_table(layer):
            return attention
        fields = {
            f.name: getattr(attention, f.name)
            for f in dataclasses.fields(attention)
            if f.name not in ("parent", "name")
        }
        return ValueAttention(**fields, gate_width=self.gate_width)

    def make_block(self, layer: int, compute: Compute) -> nn.Module:
        return ValueBlock(self, layer, compute) if self.has_table(layer) else super().make_block(layer, compute)

    def make_model(self, compute: Compute | None = None) -> ValueGPT:
        return ValueGPT(self, *(compute or Compute()))


experiment = dataclasses.replace(
    base.experiment, name="zoo-value-embeddings", model=ValueConfig(**dataclasses.asdict(base.experiment.model))
)
variants = {"baseline": base.experiment, "value embeddings": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
