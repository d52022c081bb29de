"""The families of models on the Hugging Face Hub that are configurations of our GPT.

A family is two tables, one for config.json and one for the tensors, each used in both directions, so that what is
exported is what would be imported. Our layers have what each of them needs; none has a layer of its own.
"""

from __future__ import annotations

import difflib
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import (
    Aspect,
    alias,
    always,
    attention_bias,
    causal_decoder,
    gpt2_dropout,
    head_of_width,
    meaning,
    named,
    never,
    no_window,
    same,
    whole,
    window_everywhere,
    windows,
)
from jaxgpt.hf.family import Family
from jaxgpt.hf.rotations import rope, rope_by_layer
from jaxgpt.hf.weight_rules import Row, conv1d, fused, linear, norm


def _layers(theirs: str, norms: dict[str, str]) -> tuple[Row, ...]:
    """Llama's tensors, and those of all who took its names; theirs: of a layer. norms: ours -> theirs."""
    layer = f"{theirs}.{{}}"
    rows = [Row(("wte/embedding",), "model.embed_tokens.weight"), Row(("lm_head",), "lm_head.weight", "transposed")]
    rows += norm("ln_f", "model.norm")
    for ours, name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "c_proj": "o_proj"}.items():
        rows += linear(f"h_{{}}/attn/{ours}", f"{layer}.self_attn.{name}")
    for name in ("q_norm", "k_norm"):
        rows += norm(f"h_{{}}/attn/{name}", f"{layer}.self_attn.{name}")
    for ours, name in {"c_gate": "gate_proj", "c_fc": "up_proj", "c_proj": "down_proj"}.items():
        rows += linear(f"h_{{}}/mlp/{ours}", f"{layer}.mlp.{name}")
    for ours, name in norms.items():
        rows += norm(f"h_{{}}/{ours}", f"{layer}.{name}")
    return tuple(rows)


PRE = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
OUTPUT = {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
SANDWICH = {
    "ln_1": "input_layernorm",
    "ln_1_out": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "ln_2_out": "post_feedforward_layernorm",
}

GATED = {"silu": "swiglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh", "gelu": "geglu"}
PLAIN = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
# Gemma 1's first config.json files say "gelu" and mean the tanh form: transformers issue 29402.
GEMMA = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh", "gelu_new": "geglu_tanh"}


def _body(
    *, tied: bool = False, eps: float = 1e-6, context: int = 2048, head_dim: int | None = None
) -> tuple[Aspect, ...]:
    """What every family since Llama says in the same words; the values: theirs, where a config.json is silent."""
    return (
        same("vocab_size"),
        same("n_embd", "hidden_size"),
        same("n_layer", "num_hidden_layers"),
        same("n_head", "num_attention_heads"),
        same("n_kv_head", "num_key_value_heads", None),
        same("head_dim", default=head_dim),
        same("mlp_dim", "intermediate_size"),
        same("block_size", "max_position_embeddings", context),
        same("norm_eps", "rms_norm_eps", eps),
        same("tie_embeddings", "tie_word_embeddings", tied),
        always(norm="rmsnorm", bias=False),
        causal_decoder(),
    )


_ROPE_AND_GATE = (rope(), named("activation", "hidden_act", GATED, "silu"))

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    aspects=(
        same("vocab_size"),
        same("n_embd"),
        same("n_layer"),
        same("n_head"),
        same("mlp_dim", "n_inner", None),
        same("block_size", "n_positions", 1024),
        same("norm_eps", "layer_norm_epsilon", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", True),
        named("activation", "activation_function", PLAIN, "gelu_new"),
        gpt2_dropout(),
        never(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False),
        # transformers lets these win.
        alias("hidden_size", "n_embd"),
        alias("num_hidden_layers", "n_layer"),
        alias("num_attention_heads", "n_head"),
        alias("max_position_embeddings", "n_positions", 1024),
        no_window(),
        causal_decoder(),
    ),
    rows=(
        Row(("wte/embedding",), "transformer.wte.weight"),
        Row(("wpe/embedding",), "transformer.wpe.weight"),
        Row(("lm_head",), "lm_head.weight", "transposed"),
        *norm("ln_f", "transformer.ln_f"),
        *norm("h_{}/ln_1", "transformer.h.{}.ln_1"),
        *norm("h_{}/ln_2", "transformer.h.{}.ln_2"),
        *fused("transformer.h.{}.attn.c_attn", "columns"),
        *conv1d("h_{}/attn/c_proj", "transformer.h.{}.attn.c_proj"),
        *conv1d("h_{}/mlp/c_fc", "transformer.h.{}.mlp.c_fc"),
        *conv1d("h_{}/mlp/c_proj", "transformer.h.{}.mlp.c_proj"),
    ),
    masks=(".attn.bias", ".attn.masked_bias"),
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    aspects=(
        *_body(),
        *_ROPE_AND_GATE,
        attention_bias(),
        same("bias", "mlp_bias", False),
        no_window(),
    ),
    rows=_layers("model.layers", PRE),
    masks=(".rotary_emb.inv_freq",),
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    base="model.",
    aspects=(
        *_body(context=131_072),
        *_ROPE_AND_GATE,
        window_everywhere(),
    ),
    rows=LLAMA.rows,
    masks=LLAMA.masks,
)


def _qwen_window(hf: dict[str, Any]) -> int | None:
    return hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None


_QWEN_WINDOWS = windows(
    lambda layer, hf: _qwen_window(hf) is not None and layer >= whole(hf, "max_window_layers", 28),
    keys=("use_sliding_window", "max_window_layers"),
    size=_qwen_window,
    use_sliding_window=lambda config: config.sliding_window is not None,
    max_window_layers=lambda config: config.n_layer if config.sliding_window is None else 0,
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    base="model.",
    aspects=(
        *_body(context=32_768),
        *_ROPE_AND_GATE,
        always(qkv_bias=True, out_bias=False),
        _QWEN_WINDOWS,
    ),
    rows=LLAMA.rows,
    masks=LLAMA.masks,
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    base="model.",
    aspects=(
        *_body(context=32_768, head_dim=128),
        *_ROPE_AND_GATE,
        attention_bias(),
        always(qk_norm=True),
        _QWEN_WINDOWS,
    ),
    rows=LLAMA.rows,
)

_GEMMA = (attention_bias(), always(norm_offset=True, scale_embeddings=True))

GEMMA1 = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    base="model.",
    aspects=(
        *_body(tied=True, context=8192, head_dim=256),
        *_GEMMA,
        rope(),
        named("activation", "hidden_act", GEMMA, "gelu_pytorch_tanh"),
        named("activation", "hidden_activation", GEMMA, "gelu_pytorch_tanh"),
        no_window(),
    ),
    rows=LLAMA.rows,
)


def _gemma2(context: int) -> tuple[Aspect, ...]:
    """Return what Gemma 3 says as Gemma 2 does."""
    return (
        *_body(tied=True, context=context, head_dim=256),
        *_GEMMA,
        named("activation", "hidden_activation", GATED, "gelu_pytorch_tanh"),
        alias("hidden_act", "hidden_activation", "gelu_pytorch_tanh"),
        always(norm_position="sandwich"),
        same("query_scale", "query_pre_attn_scalar", 256),
    )


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    base="model.",
    aspects=(
        *_gemma2(8192),
        rope(),
        same("logit_softcap", "final_logit_softcapping", 30.0),
        same("attention_softcap", "attn_logit_softcapping", 50.0),
        windows(lambda layer, hf: layer % 2 == 0),
    ),
    rows=_layers("model.layers", SANDWICH),
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    base="model.",
    aspects=(
        *_gemma2(131_072),
        rope_by_layer(),
        same("logit_softcap", "final_logit_softcapping", None),
        never(attn_logit_softcapping=None),  # which transformers has, and does not look at
        always(qk_norm=True),
        windows(
            lambda layer, hf: bool((layer + 1) % max(1, whole(hf, "sliding_window_pattern", 6))),
            keys=("sliding_window_pattern",),
        ),
    ),
    rows=GEMMA2.rows,
)

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    base="gpt_neox.",
    aspects=(
        same("vocab_size"),
        same("n_embd", "hidden_size"),
        same("n_layer", "num_hidden_layers"),
        same("n_head", "num_attention_heads"),
        same("mlp_dim", "intermediate_size"),
        same("block_size", "max_position_embeddings", 2048),
        same("norm_eps", "layer_norm_eps", 1e-5),
        same("tie_embeddings", "tie_word_embeddings", False),
        same("parallel_residual", "use_parallel_residual", True),
        named("activation", "hidden_act", {"gelu": "gelu"} | PLAIN, "gelu"),
        rope("rotary_emb_base", "rotary_pct"),
        attention_bias(default=True),
        head_of_width(),
        no_window(),
        causal_decoder(),
    ),
    rows=(
        Row(("wte/embedding",), "gpt_neox.embed_in.weight"),
        Row(("lm_head",), "embed_out.weight", "transposed"),
        *norm("ln_f", "gpt_neox.final_layer_norm"),
        *norm("h_{}/ln_1", "gpt_neox.layers.{}.input_layernorm"),
        *norm("h_{}/ln_2", "gpt_neox.layers.{}.post_attention_layernorm"),
        *fused("gpt_neox.layers.{}.attention.query_key_value", "heads"),
        *linear("h_{}/attn/c_proj", "gpt_neox.layers.{}.attention.dense"),
        *linear("h_{}/mlp/c_fc", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        *linear("h_{}/mlp/c_proj", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
    ),
    masks=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    base="model.",
    aspects=(
        *_body(eps=1e-5),
        *_ROPE_AND_GATE,
        attention_bias(),
        always(norm_position="output", qk_norm=True, qk_norm_over="heads"),
        no_window(),
    ),
    rows=_layers("model.layers", OUTPUT),
)

# Where several can express an architecture, the first is written: the one that most programs read.
FAMILIES = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA1, GEMMA2, GEMMA3, GPT_NEOX, OLMO2)
}


def family_of(hf: dict[str, Any]) -> Family:
    """Of a config.json. Raises `UserError` where none of ours is it."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = difflib.get_close_matches(kind, FAMILIES, n=1) if isinstance(kind, str) else []
        near = f" (near: {close[0]})" if close else ""
        raise UserError(f"model_type={short(kind)} is unknown{near}: known are {', '.join(FAMILIES)}")
    if hf.get("quantization_config") is not None:
        raise UserError("its weights are quantised (quantization_config): import those that are not")
    return FAMILIES[kind]


def family_for(config: GPTConfig, wanted: str | None = None) -> Family:
    """The family that has a model of this architecture: the one `wanted`, if it has. Raises `UserError` if none does."""
    mine, missing = meaning(config), {}
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != wanted):
        try:
            there = meaning(family.read(family.write(config)))
        except UserError:  # it is far from that family
            continue
        differs = [name for name in mine.keys() | there.keys() if mine.get(name) != there.get(name)]
        if not differs:
            return family
        missing[family.model_type] = sorted(f"{name}={getattr(config, name, mine.get(name))}" for name in differs)
    nearest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no family on the Hub has a model like this one. The nearest, {nearest}, cannot be {', '.join(missing[nearest])}"
    )
