"""Model families on the Hugging Face Hub that `GPTConfig` can express, without layers of their own."""

from __future__ import annotations

from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.hf.family import (
    CAUSAL_DECODER,
    NO_WINDOW,
    ConfigRule,
    Family,
    aliases,
    always,
    choice,
    fields,
    find_differences,
    never,
    read_count,
    rope,
    weight_rules,
    windows,
)
from jaxgpt.model import GPTConfig

GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "gelu": "geglu"}
PLAIN = dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh") | {"gelu": "gelu", "relu": "relu"}
# The first config.json files of Gemma 1 have "gelu" but mean the tanh form: transformers issue 29402.
GEMMA = dict.fromkeys(("gelu_pytorch_tanh", "gelu", "gelu_new"), "geglu_tanh")

SIZES = fields(vocab_size="vocab_size", n_embd="hidden_size", n_layer="num_hidden_layers", n_head="num_attention_heads")

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    config_rules=(
        fields(vocab_size="vocab_size", n_embd="n_embd", n_layer="n_layer", n_head="n_head", mlp_dim=("n_inner", None)),
        fields(block_size=("n_positions", 1024), norm_eps=("layer_norm_epsilon", 1e-5)),
        fields(tie_embeddings=("tie_word_embeddings", True)),
        choice("activation", "activation_function", PLAIN, "gelu_new"),
        # They have three rates of dropout, and we have one. It only matters in training.
        ConfigRule(
            ("resid_pdrop",),
            lambda hf: {"dropout": hf.get("resid_pdrop", 0.1)},
            lambda config: dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        ),
        never(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        # If both names are present, transformers uses these.
        aliases(hidden_size="n_embd", num_hidden_layers="n_layer", num_attention_heads="n_head"),
        aliases(max_position_embeddings=("n_positions", 1024)),
        NO_WINDOW,
        CAUSAL_DECODER,
    ),
    weight_rules=weight_rules(
        {"wte": "transformer.wte", "wpe": "transformer.wpe", "lm_head": "lm_head", "ln_f": "transformer.ln_f"},
        "transformer.h.{}",
        {"ln_1": "ln_1", "ln_2": "ln_2", "attn/qkv": "attn.c_attn", "attn/c_proj": "attn.c_proj"}
        | {"mlp/c_fc": "mlp.c_fc", "mlp/c_proj": "mlp.c_proj"},
        matrices="same",
        fused="columns",
    ),
)

# Norms of a layer in families with Llama's names of tensors: our name -> theirs.
PRE = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
OUTPUT = {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
SANDWICH = {
    "ln_1": "input_layernorm",
    "ln_1_out": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "ln_2_out": "post_feedforward_layernorm",
}


MATRICES = {"attn/q": "self_attn.q_proj", "attn/k": "self_attn.k_proj", "attn/v": "self_attn.v_proj"}
MATRICES |= {"mlp/c_gate": "mlp.gate_proj", "mlp/c_fc": "mlp.up_proj"}
JOINED = {"attn/qkv": "self_attn.qkv_proj", "mlp/gate_up": "mlp.gate_up_proj"}


def llama_like(
    model_type: str,
    *config_rules: ConfigRule,
    norms: dict[str, str] = PRE,
    matrices: dict[str, str] = MATRICES,
    tied: bool = False,
    eps: float = 1e-6,
    context: int = 2048,
    head_dim: int | None = None,
) -> Family:
    """Return a family with Llama's names for tensors and sizes. The arguments after `matrices` are for absent keys."""
    usual = (
        SIZES,
        fields(n_kv_head=("num_key_value_heads", None), head_dim=("head_dim", head_dim), mlp_dim="intermediate_size"),
        fields(block_size=("max_position_embeddings", context), norm_eps=("rms_norm_eps", eps)),
        fields(tie_embeddings=("tie_word_embeddings", tied)),
        always(norm="rmsnorm", bias=False),
        CAUSAL_DECODER,
    )
    return Family(
        model_type=model_type,
        architecture=f"{model_type.removesuffix('_text').capitalize()}ForCausalLM",
        prefix="model.",
        config_rules=(*usual, *config_rules),
        weight_rules=weight_rules(
            {"wte": "model.embed_tokens", "lm_head": "lm_head", "ln_f": "model.norm"},
            "model.layers.{}",
            {"attn/c_proj": "self_attn.o_proj", "mlp/c_proj": "mlp.down_proj"}
            | {"attn/q_norm": "self_attn.q_norm", "attn/k_norm": "self_attn.k_norm"}
            | matrices
            | norms,
        ),
    )


ATTENTION_BIAS = fields(out_bias=("attention_bias", False), qkv_bias=("attention_bias", False))
SILU = choice("activation", "hidden_act", GATED, "silu")
QWEN_WINDOWS = windows(
    lambda i, hf: i >= read_count(hf, "max_window_layers", 28), "max_window_layers", switch="use_sliding_window"
)
GEMMAS = (ATTENTION_BIAS, always(norm_offset=True, scale_embeddings=True))
GEMMAS_2 = (
    *GEMMAS,
    choice("activation", "hidden_activation", GATED, "gelu_pytorch_tanh"),
    aliases(hidden_act=("hidden_activation", "gelu_pytorch_tanh")),
    always(norm_position="sandwich"),
    ConfigRule(
        ("query_pre_attn_scalar",),
        lambda hf: {"query_scale": hf.get("query_pre_attn_scalar", 256)},
        # transformers 5 accepts integers only, even for 256.0.
        lambda config: {"query_pre_attn_scalar": int(s) if (s := config.query_scale or 0.0).is_integer() else s},
    ),
)

LLAMA = llama_like("llama", rope(), SILU, ATTENTION_BIAS, fields(bias=("mlp_bias", False)), NO_WINDOW)
MISTRAL = llama_like(
    "mistral", rope(), SILU, fields(sliding_window=("sliding_window", 4096)), never(layer_types=None), context=131_072
)
QWEN2 = llama_like("qwen2", rope(), SILU, always(qkv_bias=True, out_bias=False), QWEN_WINDOWS, context=32_768)
QWEN3 = llama_like(
    "qwen3", rope(), SILU, ATTENTION_BIAS, always(qk_norm=True), QWEN_WINDOWS, context=32_768, head_dim=128
)
PHI3 = llama_like(
    "phi3",
    rope(fraction="partial_rotary_factor"),
    SILU,
    always(qkv_bias=False, out_bias=False),
    fields(sliding_window=("sliding_window", None), dropout=("resid_pdrop", 0.0)),
    never(layer_types=None),
    matrices=JOINED,
    eps=1e-5,
    context=4096,
)
GEMMA1 = llama_like(
    "gemma",
    *GEMMAS,
    rope(),
    choice("activation", "hidden_act", GEMMA, "gelu_pytorch_tanh"),
    choice("activation", "hidden_activation", GEMMA, "gelu_pytorch_tanh"),
    NO_WINDOW,
    tied=True,
    context=8192,
    head_dim=256,
)
GEMMA2 = llama_like(
    "gemma2",
    *GEMMAS_2,
    rope(),
    fields(logit_softcap=("final_logit_softcapping", 30.0), attention_softcap=("attn_logit_softcapping", 50.0)),
    windows(lambda layer, hf: layer % 2 == 0),
    norms=SANDWICH,
    tied=True,
    context=8192,
    head_dim=256,
)
GEMMA3 = llama_like(
    "gemma3_text",
    *GEMMAS_2,
    rope(usual=1_000_000.0, local="rope_local_base_freq"),
    fields(logit_softcap=("final_logit_softcapping", None)),
    never(attn_logit_softcapping=None),  # transformers has the key but ignores it
    always(qk_norm=True),
    windows(
        lambda layer, hf: bool((layer + 1) % max(1, read_count(hf, "sliding_window_pattern", 6))),
        "sliding_window_pattern",
    ),
    norms=SANDWICH,
    tied=True,
    context=131_072,
    head_dim=256,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    config_rules=(
        SIZES,
        fields(mlp_dim="intermediate_size", block_size=("max_position_embeddings", 2048)),
        fields(norm_eps=("layer_norm_eps", 1e-5), tie_embeddings=("tie_word_embeddings", False)),
        fields(parallel_residual=("use_parallel_residual", True)),
        choice("activation", "hidden_act", PLAIN, "gelu"),
        rope("rotary_emb_base", fraction="rotary_pct"),
        fields(out_bias=("attention_bias", True), qkv_bias=("attention_bias", True)),
        # The head size follows from the width, whatever `head_dim` is: the check of the shapes refuses another.
        ConfigRule(("head_dim",), lambda hf: {"head_dim": hf.get("head_dim")}),
        NO_WINDOW,
        CAUSAL_DECODER,
    ),
    weight_rules=weight_rules(
        {"wte": "gpt_neox.embed_in", "lm_head": "embed_out", "ln_f": "gpt_neox.final_layer_norm"},
        "gpt_neox.layers.{}",
        {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
        | {"attn/qkv": "attention.query_key_value", "attn/c_proj": "attention.dense"}
        | {"mlp/c_fc": "mlp.dense_h_to_4h", "mlp/c_proj": "mlp.dense_4h_to_h"},
        fused="heads",
    ),
)
OLMO2 = llama_like(
    "olmo2",
    rope(),
    SILU,
    ATTENTION_BIAS,
    always(norm_position="output", qk_norm=True, qk_norm_over="heads"),
    NO_WINDOW,
    norms=OUTPUT,
    eps=1e-5,
)

# If several families can express an architecture, the first is written, which most programs can read.
FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, GEMMA1, GEMMA2, GEMMA3, GPT_NEOX, OLMO2)
}


def get_family(hf: Json) -> Family:
    """Return the family of a config.json. Raises `UserError` if it is unknown or the weights are quantised."""
    kind = str(hf.get("model_type"))
    if kind not in FAMILIES:
        raise UserError(f"model_type={short(kind)} is not supported: jaxgpt reads {', '.join(FAMILIES)}")
    if hf.get("quantization_config"):
        raise UserError("its weights are quantised (quantization_config): give a copy that is not")
    return FAMILIES[kind]


def find_family(config: GPTConfig, wanted: str | None = None) -> Family:
    """Return a family that can express this architecture, `wanted` if it can. Raises `UserError` if none can."""
    missing = []
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != wanted):
        try:
            lacks = find_differences(config, family.read(family.write(config)))
        except UserError:  # too different to compare field by field
            continue
        if not lacks:
            return family
        missing.append((len(lacks), f"{family.model_type}, does not support {', '.join(lacks)}"))
    raise UserError(f"no family on the Hub has this architecture. The nearest, {min(missing)[1]}")
