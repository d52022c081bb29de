"""The architecture."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxgpt.checks import LARGEST_COUNT, LARGEST_SIZE, above_zero, at_least, at_most, check_types, in_range
from jaxgpt.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The architecture. Names are the GPT-2 family's; a model family is a value of this, never a copy of a layer."""

    vocab_size: int | None = None  # tokens; None: the tokenizer's
    block_size: int = 1024  # tokens of context
    n_layer: int = 12  # blocks
    n_head: int = 12  # query heads per block
    # key/value heads, shared by n_head // n_kv_head queries each (GQA, arXiv:2305.13245); None: n_head
    n_kv_head: int | None = None
    n_embd: int = 768  # width of the residual stream
    # hidden width of the MLP; None: 4 n_embd, for swiglu 8/3 n_embd (the same parameter count)
    mlp_dim: int | None = None
    dropout: float = 0.0  # share dropped from embeddings, attention weights, attention output and MLP output
    bias: bool = True  # biases in linear layers and LayerNorm
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # arXiv:1607.06450, arXiv:1910.07467
    norm_position: Literal["pre", "post"] = "pre"  # pre: x + f(norm(x)); post: norm(x + f(x)), as in 2017
    norm_eps: float = 1e-5  # added to the variance
    # gelu is the erf form, gelu_tanh GPT-2's
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu"] = "gelu_tanh"
    position: Literal["learned", "sinusoidal", "rope", "none"] = "learned"  # how a token knows its place
    rope_theta: float = 10_000.0  # longest wavelength of rope is 2 pi rope_theta tokens (arXiv:2104.09864)
    qk_norm: bool = False  # RMSNorm over each query and key head before their product (arXiv:2302.05442)
    tie_embeddings: bool = True  # the output matrix is the token embedding
    scale_embeddings: bool = False  # multiply token embeddings by sqrt(n_embd), as in 2017
    logit_softcap: float | None = None  # c tanh(logits / c); None: no cap
    # projections into the residual stream: std 0.02 / sqrt(2 n_layer), or zero
    residual_init: Literal["scaled", "zero"] = "scaled"
    scan_layers: bool = False  # one compiled block run n_layer times: compile time flat in depth, stacked parameters
    # recompute in the backward pass: nothing; all but dense layers and attention kernels; all
    remat: Literal["none", "dots", "full"] = "none"

    def __post_init__(self) -> None:
        check_types(self)
        at_least(self, 1, "vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "mlp_dim")
        at_most(self, LARGEST_SIZE, "vocab_size", "block_size", "mlp_dim", "n_embd")
        at_most(self, LARGEST_COUNT, "n_layer", "n_head", "n_kv_head")
        in_range(self, "dropout", 0.0, 1.0)
        above_zero(self, "norm_eps", "rope_theta", "logit_softcap")
        if self.n_embd % self.n_head:
            below = self.n_embd // self.n_head * self.n_head
            near = " or ".join(str(n) for n in (below, below + self.n_head) if n)
            raise UserError(
                f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}: take n_embd={near}, or other heads"
            )
        if self.n_head % self.kv_heads:
            choices = [k for k in range(1, self.n_head + 1) if self.n_head % k == 0]
            raise UserError(
                f"n_head={self.n_head} is not divisible by n_kv_head={self.kv_heads}: take n_kv_head from {choices}"
            )
        if self.position == "rope" and self.head_size % 2:
            raise UserError(
                f"head size {self.head_size} (n_embd={self.n_embd} / n_head={self.n_head}) is odd: rope turns pairs, so it must be even"
            )
        if self.position == "sinusoidal" and self.n_embd % 2:
            raise UserError(
                f"n_embd={self.n_embd} is odd: sinusoidal positions are sine and cosine pairs, so it must be even"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def mlp_hidden(self) -> int:
        if self.mlp_dim is not None:
            return self.mlp_dim
        if self.activation != "swiglu":
            return 4 * self.n_embd
        return -(-8 * self.n_embd // 3 // 8) * 8  # up to a multiple of 8, which every accelerator's tiles like
