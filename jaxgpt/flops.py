"""Counts from first principles: parameters, FLOPs, and the peaks of known devices."""

import jax

from jaxgpt.config import GPTConfig

# Peak dense bfloat16 FLOP/s of one device, by what JAX calls it. From the vendors' data sheets (without
# sparsity). A device that is not here has no peak, and its MFU is null: unknown, not wrong.
PEAK_BF16_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}


def count_parameters(params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


def train_flops_per_token(config: GPTConfig, n_params: int) -> float:
    """Forward and backward: 6 per weight in a matrix product, and 12 L D T for attention's two products.

    Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B. Looked-up embeddings multiply nothing, unless
    they are the output matrix as well. The causal half that kernels skip is counted, as is usual.
    """
    looked_up = config.block_size * config.n_embd if config.position == "learned" else 0
    if not config.tie_embeddings and config.vocab_size is not None:
        looked_up += config.vocab_size * config.n_embd
    return 6.0 * (n_params - looked_up) + 12.0 * config.n_layer * config.n_embd * config.block_size


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a device, or None if it is not known. The longest matching name counts."""
    matches = [name for name in PEAK_BF16_FLOPS if device_kind.startswith(name)]
    return PEAK_BF16_FLOPS[max(matches, key=len)] if matches else None
