"""Counts from first principles: parameters and FLOPs."""

from typing import Any

import jax

from jaxgpt.config import GPTConfig


def count_parameters(params: Any) -> int:
    """Count the elements of all arrays of a tree."""
    return sum(x.size for x in jax.tree.leaves(params))


def train_flops_per_token(config: GPTConfig, n_params: int, in_adapters: int = 0) -> float:
    """Return the FLOPs of both passes: 6 per weight in a matrix product, 12 L N H T for attention's two products.

    Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B. Looked-up embeddings multiply nothing, unless
    they are the output matrix as well. The causal half that kernels skip is counted, as is usual. in_adapters:
    parameters of adapters, if they alone are trained: the others then have no gradient, which is 2 of the 6.
    """
    looked_up = config.block_size * config.n_embd if config.position == "learned" else 0
    if not config.tie_embeddings and config.vocab_size is not None:
        looked_up += config.vocab_size * config.n_embd
    each = 4.0 if in_adapters else 6.0
    return each * (n_params - looked_up) + 6.0 * in_adapters + 6.0 * attention_flops(config)


def attention_flops(config: GPTConfig) -> float:
    """Return those of one of attention's products over all layers, per token, the masked half included: 2 L N H T.

    A layer with a sliding window has that for T. With an encoder, whose text counts as long as the other, its layers
    and the decoder's second attention come on top; all is counted per token that is written.
    """
    read = sum(min(config.window(layer) or config.block_size, config.block_size) for layer in range(config.n_layer))
    if config.n_encoder_layer:
        read += (config.n_encoder_layer + config.n_layer) * config.block_size
    head_dim = config.explicit().head_dim
    assert head_dim
    return 2.0 * config.n_head * head_dim * read
