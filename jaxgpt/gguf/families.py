"""The ten families in GGUF: for each, the fields of its architecture in llama.cpp and the names of its tensors.

Rules convert between the fields and `GPTConfig` in both directions. `read` gives the model that llama.cpp computes, with its
defaults. Fields are named without the prefix of their architecture. Those that begin with "jaxgpt." are ours, which
llama.cpp ignores. Tensors that show a part of the configuration count as fields.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import LARGEST_SIZE, check_count
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import SCALINGS, ConfigRule, Json, always, choice, fields
from jaxgpt.hf.family import Family, Layout, find_differences, weight_rules

OUTPUT, FREQUENCIES = "output.weight", "rope_freqs.weight"
LARGEST_DEPTH = 512  # layers: llama.cpp's LLAMA_MAX_LAYERS
FLOATS = ("epsilon", "freq_base", "freq_base_swa", "factor", "softcapping")  # endings of fields that are never integers


def _count(values: Json, key: str, most: int = LARGEST_SIZE) -> int:
    return check_count(key, values.get(key), 1, most)


def _head_size(values: Json) -> int:
    return _count(values, "embedding_length") // _count(values, "attention.head_count")


def _stored(ours: str, tensor: str) -> ConfigRule:
    """Return the rule for a field that is true if there is a tensor."""
    return ConfigRule(
        (tensor,), lambda v: {ours: tensor in v}, lambda config: {tensor: True} if getattr(config, ours) else {}
    )


SIZES = (
    fields(vocab_size="vocab_size", block_size="context_length", n_embd="embedding_length", n_layer="block_count"),
    fields(n_head="attention.head_count", mlp_dim="feed_forward_length"),
    ConfigRule(("block_count",), lambda v: {"n_layer": _count(v, "block_count", LARGEST_DEPTH)}),
)
TIED_IF_ABSENT = ConfigRule(
    (OUTPUT,),
    lambda v: {"tie_embeddings": OUTPUT not in v},
    lambda config: {} if config.tie_embeddings else {OUTPUT: True},
)
TIED_WITH_COPY = fields(tie_embeddings=("jaxgpt.tie_embeddings", False))  # where llama.cpp needs the output matrix
LAYER_NORM = (fields(norm_eps="attention.layer_norm_epsilon"), always(norm="layernorm"))
HEAD_SIZE = ConfigRule(
    ("attention.key_length",),
    lambda v: {"head_dim": _count(v, "attention.key_length")},
    lambda config: dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim),
)
NO_OTHER_BIAS = always(bias=False, out_bias=False)


def _read_rotation(values: Json) -> Json:
    factor = values.get("rope.scaling.factor")
    scaling = {} if factor is None else {"rope_scaling": "linear", "rope_factor": factor}
    return {"position": "rope", "rope_theta": values.get("rope.freq_base", 10_000.0)} | scaling


def _write_rotation(config: GPTConfig) -> Json:
    rotated = int((config.head_dim or 0) * config.rope_fraction)
    rotation = {"rope.freq_base": config.rope_theta, "rope.dimension_count": rotated}
    if config.rope_scaling == "linear":
        rotation |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    return rotation


ROTATION = ConfigRule(("rope.freq_base", "rope.scaling.factor"), _read_rotation, _write_rotation)
FRACTION = ConfigRule(
    ("rope.dimension_count",), lambda v: {"rope_fraction": _count(v, "rope.dimension_count") / max(_head_size(v), 1)}
)

LLAMA3_FIELDS = fields(**{name: f"jaxgpt.{name}" for name in SCALINGS["llama3"].values()})


def _write_llama3(config: GPTConfig) -> Json:
    """Return our fields of llama3 scaling, and what llama.cpp divides the angle of each pair by, which is a tensor."""
    if config.rope_scaling != "llama3":
        return {}
    rope = config.make_rope(None)
    assert rope is not None
    divisors = np.asarray(rope._replace(scaling="none").frequencies() / rope.frequencies())
    return LLAMA3_FIELDS.write(config) | {FREQUENCIES: divisors}


LLAMA3 = ConfigRule(
    LLAMA3_FIELDS.keys,
    lambda v: {"rope_scaling": "llama3"} | LLAMA3_FIELDS.read(v) if FREQUENCIES in v else {},
    _write_llama3,
)


def _gelu(computed: str, approximated: str, default: str) -> ConfigRule:
    """Return the rule for GELU, of which llama.cpp has the tanh form only. default: the activation without our field.

    GELU by erf is at most 4.7e-4 away from it; ggml's table in float16 is up to 2e-3 away.
    """
    rule = choice("activation", "jaxgpt.activation", {name: name for name in (computed, approximated)}, default)
    return rule._replace(write=lambda config: {} if config.activation == default else rule.write(config))


def _windows(size: int | None, every: int) -> ConfigRule:
    """Return the rule for layers with a sliding window, but for every n-th. The arguments are for absent fields."""
    keys = "attention.sliding_window", "attention.sliding_window_pattern"

    def read(values: Json) -> Json:
        window = values.get(keys[0], size) or None
        return {"sliding_window": window} | ({"global_every": values.get(keys[1], every) or None} if window else {})

    def write(config: GPTConfig) -> Json:
        if config.window(0) is None:  # then no layer has one
            return {}
        return {keys[0]: config.sliding_window, keys[1]: config.global_every or 0}

    return ConfigRule(keys, read, write)


def _query_scale(largest: int) -> ConfigRule:
    """Return the rule for the scale of scores: the head size, and n_embd / n_head in Gemma's model of 27B.

    largest: layers of that model, by which llama.cpp knows it.
    """
    return ConfigRule(
        ("block_count",), lambda v: {"query_scale": _head_size(v)} if v.get("block_count") == largest else {}
    )


# Norms of a layer: our name -> theirs.
PRE = {"ln_1": "attn_norm", "ln_2": "ffn_norm"}
AFTER = {"ln_1": "post_attention_norm", "ln_2": "post_ffw_norm"}
SANDWICH = {"ln_1": "attn_norm", "ln_1_out": "post_attention_norm", "ln_2": "ffn_norm", "ln_2_out": "post_ffw_norm"}


def _family(
    name: str,
    *config_rules: ConfigRule,
    norms: dict[str, str] = PRE,
    has_fused_qkv: bool = False,
    rotated: Layout = "rows",
) -> Family:
    """Return a family. norms: our names of a layer's norms -> theirs. rotated: layout of queries and keys."""
    qkv = {"attn/qkv": "attn_qkv"} if has_fused_qkv else {f"attn/{x}": f"attn_{x}" for x in "qkv"}
    rules = weight_rules(
        {"wte": "token_embd", "wpe": "position_embd", "lm_head": "output", "ln_f": "output_norm"},
        "blk.{}",
        qkv
        | {"attn/c_proj": "attn_output", "mlp/c_gate": "ffn_gate", "mlp/c_fc": "ffn_up", "mlp/c_proj": "ffn_down"}
        | norms
        | {"attn/q_norm": "attn_q_norm", "attn/k_norm": "attn_k_norm"},
        rotated=rotated,
    )
    return Family(model_type=name, config_rules=(*SIZES, *config_rules), weight_rules=rules)


LLAMA_LIKE = (
    ROTATION,
    fields(norm_eps="attention.layer_norm_rms_epsilon", n_kv_head=("attention.head_count_kv", None)),
    always(norm="rmsnorm", activation="swiglu"),
    _stored("qkv_bias", "blk.0.attn_q.bias"),
)
GEMMA_LIKE = (
    *LLAMA_LIKE,
    HEAD_SIZE,
    NO_OTHER_BIAS,
    _gelu("geglu_tanh", "geglu", default="geglu_tanh"),
    always(norm_offset=True, scale_embeddings=True),
)
LLAMA = _family(
    "llama",
    *LLAMA_LIKE,
    LLAMA3,
    HEAD_SIZE,
    TIED_IF_ABSENT,
    _stored("out_bias", "blk.0.attn_output.bias"),
    _stored("bias", "blk.0.ffn_up.bias"),
    rotated="pairs",
)
# By the model_type of Hugging Face.
FAMILIES = {
    "gpt2": _family(
        "gpt2", *LAYER_NORM, TIED_IF_ABSENT, _gelu("gelu_tanh", "gelu", default="gelu_tanh"), has_fused_qkv=True
    ),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": _family("qwen2", *LLAMA_LIKE, TIED_IF_ABSENT, NO_OTHER_BIAS),
    "qwen3": _family("qwen3", *LLAMA_LIKE, HEAD_SIZE, TIED_IF_ABSENT, NO_OTHER_BIAS, always(qk_norm=True)),
    "gemma": _family("gemma", *GEMMA_LIKE),
    "gemma2": _family(
        "gemma2",
        *GEMMA_LIKE,
        _windows(4096, every=2),
        _query_scale(largest=46),
        fields(attention_softcap=("attn_logit_softcapping", 50.0), logit_softcap=("final_logit_softcapping", 30.0)),
        always(norm_position="sandwich"),
        norms=SANDWICH,
    ),
    "gemma3_text": _family(
        "gemma3",
        *GEMMA_LIKE,
        ConfigRule(
            ("rope.freq_base_swa",),
            lambda v: {"rope_local_theta": v.get("rope.freq_base_swa", 10_000.0)},
            lambda config: {"rope.freq_base_swa": config.rope_local_theta or config.rope_theta},
        ),
        _windows(None, every=6),
        _query_scale(largest=62),
        fields(logit_softcap=("final_logit_softcapping", None)),
        TIED_IF_ABSENT,
        always(norm_position="sandwich", qk_norm=True),
        norms=SANDWICH,
    ),
    "gpt_neox": _family(
        "gptneox",
        ROTATION,
        FRACTION,
        *LAYER_NORM,
        TIED_WITH_COPY,
        fields(parallel_residual="use_parallel_residual"),
        _gelu("gelu_tanh", "gelu", default="gelu"),
        has_fused_qkv=True,
    ),
    "olmo2": _family(
        "olmo2",
        *LLAMA_LIKE,
        TIED_WITH_COPY,
        NO_OTHER_BIAS,
        always(norm_position="output", qk_norm=True, qk_norm_over="heads"),
        norms=AFTER,
    ),
}
ARCHITECTURES = {family.model_type: family for family in FAMILIES.values()}  # by llama.cpp's name


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
