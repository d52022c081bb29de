"""The ten families in GGUF: for each, the fields of its architecture in llama.cpp and the names of its tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.gguf.field_rules import (
    EQUAL_HEADS,
    FREQUENCIES,
    HEAD_SIZE,
    KV_HEADS,
    LAYER_NORM,
    LLAMA3,
    LOCAL_ROPE,
    NO_OTHER_BIAS,
    NO_WINDOW,
    OUTPUT,
    PARTIAL_ROPE,
    QKV_BIAS,
    RMS_NORM,
    ROPE,
    SAME_ROPE,
    SIZES,
    TIED_IF_ABSENT,
    TIED_WITH_COPY,
    gelu,
    query_scale,
    stored,
    windows,
)
from jaxgpt.hf.config_rules import always, optional, required
from jaxgpt.hf.family import Family, Layout, WeightRule, find_differences, linear, norm, qkv

# Norms of a layer: our name -> theirs.
PRE = {"ln_1": "attn_norm", "ln_2": "ffn_norm"}
AFTER = {"ln_1": "post_attention_norm", "ln_2": "post_ffw_norm"}
SANDWICH = {"ln_1": "attn_norm", "ln_1_out": "post_attention_norm", "ln_2": "ffn_norm", "ln_2_out": "post_ffw_norm"}


def weights(
    norms: dict[str, str] = PRE, *, fused: bool = False, rotated: Layout = "transposed"
) -> tuple[WeightRule, ...]:
    """Return the rules for the tensors, whose names are the same in all architectures.

    Args:
        norms: our names of a layer's norms -> theirs.
        fused: whether queries, keys and values share a tensor.
        rotated: layout of the projections to queries and keys.
    """
    rules = [
        WeightRule(("wte/embedding",), "token_embd.weight"),
        WeightRule(("wpe/embedding",), "position_embd.weight"),
        WeightRule(("lm_head/kernel",), OUTPUT, "transposed"),
        *norm("ln_f", "output_norm"),
    ]
    if fused:
        rules += qkv("blk.{}.attn_qkv", "rows")
    else:
        rules += linear("h_{}/attn/q", "blk.{}.attn_q", rotated)
        rules += linear("h_{}/attn/k", "blk.{}.attn_k", rotated)
        rules += linear("h_{}/attn/v", "blk.{}.attn_v")
    rules += linear("h_{}/attn/c_proj", "blk.{}.attn_output")
    for ours, theirs in {"c_gate": "ffn_gate", "c_fc": "ffn_up", "c_proj": "ffn_down"}.items():
        rules += linear(f"h_{{}}/mlp/{ours}", f"blk.{{}}.{theirs}")
    for ours, theirs in (norms | {"attn/q_norm": "attn_q_norm", "attn/k_norm": "attn_k_norm"}).items():
        rules += norm(f"h_{{}}/{ours}", f"blk.{{}}.{theirs}")
    return tuple(rules)


LLAMA_LIKE = (*SIZES, *ROPE, *RMS_NORM, KV_HEADS, QKV_BIAS)
GATED = always(activation="swiglu")
GEMMA_LIKE = (
    *LLAMA_LIKE,
    HEAD_SIZE,
    NO_OTHER_BIAS,
    gelu("geglu_tanh", "geglu", default="geglu_tanh"),
    always(norm_offset=True, scale_embeddings=True),
)

GPT2 = Family(
    model_type="gpt2",
    config_rules=(
        *SIZES,
        *LAYER_NORM,
        EQUAL_HEADS,
        TIED_IF_ABSENT,
        gelu("gelu_tanh", "gelu", default="gelu_tanh"),
    ),
    weight_rules=weights(fused=True),
)
LLAMA = Family(
    model_type="llama",
    config_rules=(
        *LLAMA_LIKE,
        LLAMA3,
        HEAD_SIZE,
        TIED_IF_ABSENT,
        GATED,
        stored("out_bias", "blk.0.attn_output.bias"),
        stored("bias", "blk.0.ffn_up.bias"),
    ),
    weight_rules=weights(rotated="pairs"),
    buffers=(FREQUENCIES,),
)
QWEN2 = Family(
    model_type="qwen2",
    config_rules=(*LLAMA_LIKE, TIED_IF_ABSENT, GATED, NO_OTHER_BIAS),
    weight_rules=weights(),
)
QWEN3 = Family(
    model_type="qwen3",
    config_rules=(*LLAMA_LIKE, HEAD_SIZE, TIED_IF_ABSENT, GATED, NO_OTHER_BIAS, always(qk_norm=True)),
    weight_rules=weights(),
)
GEMMA1 = Family(model_type="gemma", config_rules=GEMMA_LIKE, weight_rules=weights())
GEMMA2 = Family(
    model_type="gemma2",
    config_rules=(
        *GEMMA_LIKE,
        SAME_ROPE,
        windows(4096, every=2),
        query_scale(largest=46),
        optional("attention_softcap", "attn_logit_softcapping", 50.0),
        optional("logit_softcap", "final_logit_softcapping", 30.0),
        always(norm_position="sandwich"),
    ),
    weight_rules=weights(SANDWICH),
)
GEMMA3 = Family(
    model_type="gemma3",
    config_rules=(
        *GEMMA_LIKE,
        LOCAL_ROPE,
        windows(None, every=6),
        query_scale(largest=62),
        optional("logit_softcap", "final_logit_softcapping", None),
        TIED_IF_ABSENT,
        always(norm_position="sandwich", qk_norm=True),
    ),
    weight_rules=weights(SANDWICH),
)
GPT_NEOX = Family(
    model_type="gptneox",
    config_rules=(
        *SIZES,
        *PARTIAL_ROPE,
        *LAYER_NORM,
        EQUAL_HEADS,
        TIED_WITH_COPY,
        required(parallel_residual="use_parallel_residual"),
        gelu("gelu_tanh", "gelu", default="gelu"),
    ),
    weight_rules=weights(fused=True),
)
OLMO2 = Family(
    model_type="olmo2",
    config_rules=(
        *LLAMA_LIKE,
        NO_WINDOW,
        TIED_WITH_COPY,
        GATED,
        NO_OTHER_BIAS,
        always(norm_position="output", qk_norm=True, qk_norm_over="heads"),
    ),
    weight_rules=weights(AFTER),
)

# By the model_type of Hugging Face.
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA1,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "olmo2": OLMO2,
}
ARCHITECTURES = {family.model_type: family for family in FAMILIES.values()}  # by llama.cpp's name
FLOATS = ("epsilon", "freq_base", "freq_base_swa", "factor", "softcapping")  # endings of fields that are never integers


def write_fields(family: Family, config: GPTConfig) -> dict[str, Any]:
    """Return the fields of an architecture, without prefix; tensors that are a part of it are among them.

    Raises `UserError` if llama.cpp would compute another model.
    """
    values = {
        key: float(value) if key.endswith(FLOATS) else value
        for key, value in family.write(config).items()
        if value is not None
    }
    try:
        differs = find_differences(config, family.read(values))
    except UserError as e:
        raise UserError(f"the {family.model_type} of llama.cpp does not support this model: {e}") from None
    if differs and config.rope_local_theta is None and config.block_size <= (config.sliding_window or 0):
        return write_fields(family, dataclasses.replace(config, sliding_window=None, global_every=None))  # the same
    if differs:
        raise UserError(f"the {family.model_type} of llama.cpp does not support {', '.join(differs)}")
    return values
