"""Model families on the Hugging Face Hub that `GPTConfig` can express, without layers of their own."""

from __future__ import annotations

import difflib
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import (
    CAUSAL_DECODER,
    SIZES,
    ConfigRule,
    alias,
    always,
    attention_bias,
    choice,
    llama_config,
    never,
    no_window,
    optional,
    read_count,
    required,
    window_everywhere,
    windows,
)
from jaxgpt.hf.family import OUTPUT, SANDWICH, Family, WeightRule, find_differences, linear, llama_like, norm, qkv
from jaxgpt.hf.rotations import rope, rope_by_layer

GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "gelu": "geglu"}
PLAIN = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh") | {"gelu": "gelu", "relu": "relu"}
# The first config.json files of Gemma 1 have "gelu" but mean the tanh form: transformers issue 29402.
GEMMA = dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new"), "geglu_tanh")

INV_FREQ = ".rotary_emb.inv_freq"  # a buffer


_ROPE_AND_GATE = (rope(), choice("activation", "hidden_act", GATED, "silu"))

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    config_rules=(
        required(vocab_size="vocab_size", n_embd="n_embd", n_layer="n_layer", n_head="n_head"),
        optional("mlp_dim", "n_inner", None),
        optional("block_size", "n_positions", 1024),
        optional("norm_eps", "layer_norm_epsilon", 1e-5),
        optional("tie_embeddings", "tie_word_embeddings", True),
        choice("activation", "activation_function", PLAIN, "gelu_new"),
        # They have three rates of dropout, we have one; it only matters in training.
        ConfigRule(
            ("resid_pdrop",),
            lambda hf: {"dropout": hf.get("resid_pdrop", 0.1)},
            lambda config: dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        ),
        never(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        # If both names are present, transformers uses these.
        alias("hidden_size", "n_embd"),
        alias("num_hidden_layers", "n_layer"),
        alias("num_attention_heads", "n_head"),
        alias("max_position_embeddings", "n_positions", 1024),
        no_window(),
        CAUSAL_DECODER,
    ),
    weight_rules=(
        WeightRule(("wte/embedding",), "transformer.wte.weight"),
        WeightRule(("wpe/embedding",), "transformer.wpe.weight"),
        WeightRule(("lm_head/kernel",), "lm_head.weight", "transposed"),
        *norm("ln_f", "transformer.ln_f"),
        *norm("h_{}/ln_1", "transformer.h.{}.ln_1"),
        *norm("h_{}/ln_2", "transformer.h.{}.ln_2"),
        *qkv("transformer.h.{}.attn.c_attn", "columns"),
        *linear("h_{}/attn/c_proj", "transformer.h.{}.attn.c_proj", "same"),
        *linear("h_{}/mlp/c_fc", "transformer.h.{}.mlp.c_fc", "same"),
        *linear("h_{}/mlp/c_proj", "transformer.h.{}.mlp.c_proj", "same"),
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

LLAMA = llama_like(
    "llama",
    "LlamaForCausalLM",
    *llama_config(),
    *_ROPE_AND_GATE,
    attention_bias(),
    optional("bias", "mlp_bias", False),
    no_window(),
    buffers=(INV_FREQ,),
)

MISTRAL = llama_like(
    "mistral",
    "MistralForCausalLM",
    *llama_config(context=131_072),
    *_ROPE_AND_GATE,
    window_everywhere(),
    buffers=(INV_FREQ,),
)


def _qwen_window(hf: dict[str, Any]) -> int | None:
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None


_QWEN_WINDOWS = windows(
    lambda layer, hf: _qwen_window(hf) is not None and layer >= read_count(hf, "max_window_layers", 28),
    keys=("use_sliding_window", "max_window_layers"),
    size=_qwen_window,
    use_sliding_window=lambda config: config.sliding_window is not None,
    max_window_layers=lambda config: config.n_layer if config.sliding_window is None else 0,
)

QWEN2 = llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    *llama_config(context=32_768),
    *_ROPE_AND_GATE,
    always(qkv_bias=True, out_bias=False),
    _QWEN_WINDOWS,
    buffers=(INV_FREQ,),
)

QWEN3 = llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    *llama_config(context=32_768, head_dim=128),
    *_ROPE_AND_GATE,
    attention_bias(),
    always(qk_norm=True),
    _QWEN_WINDOWS,
)

_GEMMA = (attention_bias(), always(norm_offset=True, scale_embeddings=True))

GEMMA1 = llama_like(
    "gemma",
    "GemmaForCausalLM",
    *llama_config(tied=True, context=8192, head_dim=256),
    *_GEMMA,
    rope(),
    choice("activation", "hidden_act", GEMMA, "gelu_pytorch_tanh"),
    choice("activation", "hidden_activation", GEMMA, "gelu_pytorch_tanh"),
    no_window(),
)


def _write_query_scale(config: GPTConfig) -> dict[str, Any]:
    assert config.query_scale is not None
    whole = config.query_scale.is_integer()  # transformers 5 accepts no other type, even for 256.0
    return {"query_pre_attn_scalar": int(config.query_scale) if whole else config.query_scale}


_QUERY_SCALE = ConfigRule(
    ("query_pre_attn_scalar",),
    lambda hf: {"query_scale": hf.get("query_pre_attn_scalar", 256)},
    _write_query_scale,
)


def _gemma2(context: int) -> tuple[ConfigRule, ...]:
    """Return the rules that Gemma 2 and 3 share."""
    return (
        *llama_config(tied=True, context=context, head_dim=256),
        *_GEMMA,
        choice("activation", "hidden_activation", GATED, "gelu_pytorch_tanh"),
        alias("hidden_act", "hidden_activation", "gelu_pytorch_tanh"),
        always(norm_position="sandwich"),
        _QUERY_SCALE,
    )


GEMMA2 = llama_like(
    "gemma2",
    "Gemma2ForCausalLM",
    *_gemma2(8192),
    rope(),
    optional("logit_softcap", "final_logit_softcapping", 30.0),
    optional("attention_softcap", "attn_logit_softcapping", 50.0),
    windows(lambda layer, hf: layer % 2 == 0),
    norms=SANDWICH,
)

GEMMA3 = llama_like(
    "gemma3_text",
    "Gemma3ForCausalLM",
    *_gemma2(131_072),
    rope_by_layer(),
    optional("logit_softcap", "final_logit_softcapping", None),
    never(attn_logit_softcapping=None),  # transformers has the key but ignores it
    always(qk_norm=True),
    windows(
        lambda layer, hf: bool((layer + 1) % max(1, read_count(hf, "sliding_window_pattern", 6))),
        keys=("sliding_window_pattern",),
    ),
    norms=SANDWICH,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    config_rules=(
        SIZES,
        required(mlp_dim="intermediate_size"),
        optional("block_size", "max_position_embeddings", 2048),
        optional("norm_eps", "layer_norm_eps", 1e-5),
        optional("tie_embeddings", "tie_word_embeddings", False),
        optional("parallel_residual", "use_parallel_residual", True),
        choice("activation", "hidden_act", {"gelu": "gelu"} | PLAIN, "gelu"),
        rope("rotary_emb_base", "rotary_pct"),
        attention_bias(default=True),
        # The head size follows from the width, whatever `head_dim` is: the check of the shapes refuses another.
        ConfigRule(("head_dim",), lambda hf: {"head_dim": hf.get("head_dim")}),
        no_window(),
        CAUSAL_DECODER,
    ),
    weight_rules=(
        WeightRule(("wte/embedding",), "gpt_neox.embed_in.weight"),
        WeightRule(("lm_head/kernel",), "embed_out.weight", "transposed"),
        *norm("ln_f", "gpt_neox.final_layer_norm"),
        *norm("h_{}/ln_1", "gpt_neox.layers.{}.input_layernorm"),
        *norm("h_{}/ln_2", "gpt_neox.layers.{}.post_attention_layernorm"),
        *qkv("gpt_neox.layers.{}.attention.query_key_value", "heads"),
        *linear("h_{}/attn/c_proj", "gpt_neox.layers.{}.attention.dense"),
        *linear("h_{}/mlp/c_fc", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        *linear("h_{}/mlp/c_proj", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    ),
    buffers=(".attention.bias", ".attention.masked_bias", INV_FREQ),
)

OLMO2 = llama_like(
    "olmo2",
    "Olmo2ForCausalLM",
    *llama_config(eps=1e-5),
    *_ROPE_AND_GATE,
    attention_bias(),
    always(norm_position="output", qk_norm=True, qk_norm_over="heads"),
    no_window(),
    norms=OUTPUT,
)

# If several families can express an architecture, the first is written, which most programs can read.
FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA1, GEMMA2, GEMMA3, GPT_NEOX, OLMO2)
}


def get_family(hf: dict[str, Any]) -> Family:
    """Return the family of a config.json. Raises `UserError` if it is unknown or the weights are quantised."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = difflib.get_close_matches(kind, FAMILIES, n=1) if isinstance(kind, str) else []
        near = f" (did you mean {close[0]}?)" if close else ""
        raise UserError(f"model_type={short(kind)} is unknown{near}: needs one of {', '.join(FAMILIES)}")
    if hf.get("quantization_config") is not None:
        raise UserError("its weights are quantised (quantization_config): give a copy that is not")
    return FAMILIES[kind]


def find_family(config: GPTConfig, wanted: str | None = None) -> Family:
    """Return a family that can express this architecture, `wanted` if it can. Raises `UserError` if none can."""
    missing = {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != wanted):
        try:
            missing[family.model_type] = find_differences(config, family.read(family.write(config)))
        except UserError:  # too different to compare field by field
            continue
        if not missing[family.model_type]:
            return family
    nearest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no family on the Hub has this architecture. The nearest, {nearest}, does not support "
        + ", ".join(missing[nearest])
    )
