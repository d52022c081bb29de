"""Small models of each family as transformers makes them, with random weights large enough to matter."""

import zlib

import numpy as np

PROMPT = [7, 1, 60, 33, 5, 5, 18, 42]
NEW_TOKENS = 64

# Sizes that differ from each other, and contexts longer than any window.
BODY = dict(
    vocab_size=61,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    max_position_embeddings=96,
)
GPT2 = dict(vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=96)
NEOX = {key: value for key, value in BODY.items() if key != "num_key_value_heads"}
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LONG = dict(original_max_position_embeddings=6)
LONG["rope_scaling"] = dict(type="longrope", short_factor=[1.05, 1.1, 1.5], long_factor=[1.3, 2.5, 3.75])

# (model_type, what differs from the family's usual values)
SHAPES = {
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied-erf": ("gpt2", GPT2 | dict(tie_word_embeddings=False, n_inner=40, activation_function="gelu")),
    "llama": ("llama", BODY),
    "llama-3": ("llama", BODY | dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    "llama-linear": ("llama", BODY | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0))),
    "llama-biases": ("llama", BODY | dict(attention_bias=True, mlp_bias=True, head_dim=10, num_key_value_heads=1)),
    "mistral": ("mistral", BODY | dict(sliding_window=7)),
    "mistral-nemo": ("mistral", BODY | dict(sliding_window=None, head_dim=8)),
    "qwen2": ("qwen2", BODY | dict(tie_word_embeddings=True)),
    "qwen2-windows": ("qwen2", BODY | dict(use_sliding_window=True, sliding_window=9, max_window_layers=0)),
    "qwen3": ("qwen3", BODY | dict(head_dim=12)),
    "qwen3-biases": ("qwen3", BODY | dict(head_dim=6, attention_bias=True, num_key_value_heads=4)),
    "phi3": ("phi3", BODY | dict(sliding_window=9)),
    "phi3-longrope": ("phi3", BODY | LONG),
    "gemma": ("gemma", BODY | dict(head_dim=16, num_key_value_heads=1)),
    "gemma2": ("gemma2", BODY | dict(head_dim=8, num_hidden_layers=3, sliding_window=6, query_pre_attn_scalar=11)),
    "gemma3": (
        "gemma3_text",
        BODY
        | dict(head_dim=8, num_hidden_layers=4, sliding_window=5, query_pre_attn_scalar=12)
        | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"])
        | dict(
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            )
        ),
    ),
    "neox": ("gpt_neox", NEOX | dict(num_attention_heads=3)),  # 2 of 8 numbers of a head turn
    "neox-in-series": (
        "gpt_neox",
        NEOX
        | dict(use_parallel_residual=False, attention_bias=False)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.67)),
    ),
    "olmo2": ("olmo2", BODY),
    "olmo2-tied": ("olmo2", BODY | dict(tie_word_embeddings=True, num_key_value_heads=4)),
}


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of a tensor, by its name alone: matrices that keep a vector's length, about; norms and biases near where they start."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))  # whose numbers NumPy has promised never to change
    x = rng.standard_normal(shape).astype(np.float32)
    if len(shape) == 2:
        return x * np.float32(shape[-1] ** -0.5)
    return np.float32(name.endswith("weight")) + np.float32(0.2) * x


def make_peer(name: str, **more):
    """transformers' model of this name, in float32. more: of its configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, options = SHAPES[name]
    tokens = dict(bos_token_id=0, eos_token_id=0, pad_token_id=0)  # theirs are for larger vocabularies
    config = AutoConfig.for_model(kind, **(options | tokens | more), attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for tensor, parameter in named_parameters(model):
            parameter.copy_(torch.from_numpy(weights(tensor, tuple(parameter.shape))))
    return model


def named_parameters(model):
    """By the names that files have, which for GPT-NeoX transformers 5 translates."""
    neox = model.config.model_type == "gpt_neox"
    for name, parameter in model.named_parameters():
        yield ("embed_out.weight" if neox and name == "lm_head.weight" else name), parameter
