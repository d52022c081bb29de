"""N-gram embeddings: each token's embedding is joined by one of the pair, or more, of tokens that it ends.

Question    A table of bigrams is a language model that costs a gather. Does it help a Transformer of the same time?
Reference   modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt, "bigram hash embedding" of 2026-01-19;
            Roy et al. 2022, arXiv:2207.06366, "N-Grammer"; https://github.com/deepseek-ai/Engram has them in later layers.
Change      For each order from 2 to `max_order` a table of its own, from zeros, whose row is added to the embedding. The
            row is the n-gram's number in base V where all of them fit into `most_rows`, else a hash that the collisions
            share. At 65 characters the 4,225 bigrams are exact: 270,400 parameters beside the baseline's 205,632, which
            cost no products; the trigrams' table has 16,384 rows. Documents begin without n-grams. modded-nanogpt adds
            its rows before every layer, with learned factors; here they are added once.
            It keeps the earlier tokens in the collection "cache", so that sampling is cached.
Command     jaxgpt study experiments/zoo/ngram_embeddings.py
Expected    Bigrams better by 0.03 or more at equal tokens, trigrams by as much again; a few percent slower by the clock.
Result      At equal tokens bigrams -0.0405 ± 0.0064; bigrams and trigrams -0.0964 ± 0.0093, against 1.8287 (0.0053). At
            15.4 s bigrams -0.0425 ± 0.0134; bigrams and trigrams -0.0851 ± 0.0213, against 1.8599 (0.0199). Eight
            seeds, one core of an AMD EPYC (family 25, AVX-512), 2026-11-25.
Verdict     Better by tokens and by the clock, as expected. At 124M only the bigrams helped, and by less the larger the
            model was.
"""

import dataclasses
from typing import Annotated

import base
import cached
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt.config.validate import Interval, Size
from jaxgpt.layers.block import Compute
from jaxgpt.layers.linear import Embedding


def ngram_rows(tokens_BS: jax.Array, order: int, vocab_size: int, most_rows: int) -> jax.Array:
    """Return the row of the n-gram that ends at each token, from token `order` on: its number, or a hash of it."""
    T, index_BT = tokens_BS.shape[1] - order + 1, jnp.zeros((len(tokens_BS), 1), jnp.uint32)
    tokens_BS = tokens_BS.astype(jnp.uint32)
    if vocab_size**order <= most_rows:
        for first in range(order):
            index_BT = index_BT * jnp.uint32(vocab_size) + tokens_BS[:, first : first + T]
        return index_BT.astype(jnp.int32)
    for first in range(order):  # FNV-1a of whole tokens, then a shift, since its low bits depend on low bits only
        index_BT = (index_BT ^ (tokens_BS[:, first : first + T] + 1)) * jnp.uint32(16777619)
    index_BT = (index_BT ^ (index_BT >> 15)) * jnp.uint32(0x2C1B3C6D)
    return ((index_BT ^ (index_BT >> 12)) % jnp.uint32(most_rows)).astype(jnp.int32)


class NGrams(nn.Module):
    """tokens_BT -> x_BTD, the sum of the embeddings of the n-grams that end at each token."""

    width: int  # D
    vocab_size: int  # V
    max_order: int
    most_rows: int

    def setup(self) -> None:
        sizes = [min(self.vocab_size**order, self.most_rows) for order in range(2, self.max_order + 1)]
        self.tables = [Embedding(rows, self.width, nn.initializers.zeros) for rows in sizes]

    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Embed the n-grams that end at the next tokens of each row."""
        positions_BT = jnp.broadcast_to(positions_BT, tokens_BT.shape)
        before_BS = jnp.zeros((len(tokens_BT), self.max_order - 1), jnp.int32)
        if (kept := cached.remember(self, positions_BT, tokens_BT)) is not None:
            columns_BS = positions_BT[:, :1] - jnp.arange(self.max_order - 1, 0, -1)[None]
            before_BS = jnp.take_along_axis(kept[0], jnp.maximum(columns_BS, 0), axis=1)
        seen_BS = jnp.concatenate([before_BS, tokens_BT], axis=1)
        x_BTD = jnp.zeros((*tokens_BT.shape, self.width))
        for order, table in enumerate(self.tables, start=2):
            rows_BT = ngram_rows(seen_BS[:, self.max_order - order :], order, self.vocab_size, self.most_rows)
            x_BTD = x_BTD + jnp.where(positions_BT[..., None] >= order - 1, table(rows_BT), 0.0)
        return x_BTD


class NGramGPT(jaxgpt.GPT):
    """A GPT that also embeds n-grams."""

    def setup(self) -> None:
        super().setup()
        c = self.config
        self.ngrams = NGrams(c.n_embd, c.vocab_size, c.max_order, c.most_rows)

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array, train: bool = False) -> jax.Array:
        """Embed tokens and n-grams."""
        x_BTD = self.ngrams(tokens_BT, positions_BT).astype(self.dtype)
        return self.sharding.constrain(super().embed(tokens_BT, positions_BT, train) + x_BTD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NGramConfig(jaxgpt.GPTConfig):
    """A GPT that also embeds n-grams."""

    has_cache = True
    max_order: Annotated[int, Interval(ge=2, le=8)] = 2  # tokens of the longest n-gram; each from 2 on has a table
    most_rows: Size = 16384  # rows of a table; n-grams that are more than these share rows by a hash

    def make_model(self, compute: Compute | None = None) -> NGramGPT:
        return NGramGPT(self, *(compute or Compute()))


model = NGramConfig(**dataclasses.asdict(base.experiment.model))
experiment = dataclasses.replace(base.experiment, name="zoo-ngram-embeddings", model=model)
trigrams = dataclasses.replace(experiment, model=dataclasses.replace(model, max_order=3))
variants = {"baseline": base.experiment, "bigrams": experiment, "bigrams and trigrams": trigrams}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
