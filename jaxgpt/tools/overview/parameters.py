"""Count the parameters of a model by arithmetic: jax, which would trace it, takes half a second to import."""

from __future__ import annotations

from jaxgpt.config import GPTConfig


def count_parameters(config: GPTConfig) -> int:
    """Return the number of parameters of a model, without adapters. Needs `config.vocab_size`."""
    c = config.explicit()
    assert c.vocab_size and c.mlp_dim and c.head_dim and c.n_kv_head
    norm = c.n_embd * (2 if c.norm == "layernorm" and c.bias else 1)
    norms = 2 if c.norm_position == "sandwich" else 1  # of each branch
    last_norm = 0 if c.norm_position == "post" else norm
    queries, keys = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    attention = _dense(c.n_embd, queries, c.qkv_bias) + 2 * _dense(c.n_embd, keys, c.qkv_bias)
    attention += _dense(queries, c.n_embd, c.out_bias)
    if c.qk_norm:
        attention += queries + keys if c.qk_norm_over == "heads" else 2 * c.head_dim
    mlp = (2 if c.gated else 1) * _dense(c.n_embd, c.mlp_dim, c.bias) + _dense(c.mlp_dim, c.n_embd, c.bias)
    block = attention + mlp + 2 * norms * norm
    count = c.vocab_size * c.n_embd + c.n_layer * block + last_norm
    if c.n_encoder_layer:
        count += c.n_encoder_layer * block + last_norm + c.n_layer * (attention + norms * norm)
    if c.position == "learned":
        count += c.block_size * c.n_embd
    return count if c.tie_embeddings else count + c.vocab_size * c.n_embd


def _dense(inputs: int, outputs: int, bias: bool | None) -> int:
    """Return the parameters of a dense layer."""
    return inputs * outputs + (outputs if bias else 0)
