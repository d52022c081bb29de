"""Count parameters and FLOPs from first principles."""

import jax

from jaxgpt.config import GPTConfig
from jaxgpt.train import Params


def count_parameters(params: Params) -> int:
    """Count the elements of all arrays in a tree."""
    return sum(x.size for x in jax.tree.leaves(params))


def train_flops_per_token(config: GPTConfig, n_params: int, in_adapters: int = 0) -> float:
    """Return the FLOPs per token of both passes: 6 per weight in matrix products, 12 L N H T for attention's products.

    Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B. Embedding lookups count as 0, but a tied table counts as
    the output matrix. The masked half of attention, which kernels skip, counts too, as is usual.

    Args:
        config: the model.
        n_params: number of the model's parameters, without adapters.
        in_adapters: number of parameters in adapters, if only these are trained: the others need no gradient, which is
            2 of their 6 FLOPs.
    """
    looked_up = config.block_size * config.n_embd if config.position == "learned" else 0
    if not config.tie_embeddings and config.vocab_size is not None:
        looked_up += config.vocab_size * config.n_embd
    each = 4.0 if in_adapters else 6.0
    return each * (n_params - looked_up) + 6.0 * in_adapters + 6.0 * attention_flops(config)


def attention_flops(config: GPTConfig) -> float:
    """Return the FLOPs per token of one of attention's two products over all layers, masked half included: 2 L N H T.

    In a layer with a sliding window, T is its size. With an encoder, the encoder's layers and cross-attention are
    added, as if the source were as long as the target; the count is per target token.
    """
    read = sum(min(config.window(layer) or config.block_size, config.block_size) for layer in range(config.n_layer))
    if config.n_encoder_layer:
        read += (config.n_encoder_layer + config.n_layer) * config.block_size
    head_dim = config.explicit().head_dim
    assert head_dim
    return 2.0 * config.n_head * head_dim * read
