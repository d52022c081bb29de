"""Rules that convert between the fields of a GGUF file and `GPTConfig`, each in both directions.

`read` gives the model that llama.cpp computes: each rule follows what it reads, with its defaults. Fields are named
without the prefix of their architecture; those that begin with "jaxgpt." are ours, which llama.cpp ignores. The names of
tensors count as fields, because parts of a configuration show only in their presence.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import LARGEST_SIZE, check_count, short
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import ConfigRule, Json, alias, always, never, optional, required
from jaxgpt.hf.rotations import SCALINGS

OUTPUT, FREQUENCIES = "output.weight", "rope_freqs.weight"
LARGEST_DEPTH = 512  # layers: llama.cpp's LLAMA_MAX_LAYERS


def count(values: Json, key: str, most: int = LARGEST_SIZE) -> int:
    """Return a field that must be present, a whole number from 1 to `most`."""
    return check_count(key, values.get(key), 1, most)


def head_size(values: Json) -> int:
    """Return the elements per head."""
    usual = count(values, "embedding_length") // count(values, "attention.head_count")
    return check_count("attention.key_length", values.get("attention.key_length", usual), 1, LARGEST_SIZE)


def stored(ours: str, tensor: str) -> ConfigRule:
    """Return the rule for a field that is true if there is a tensor."""
    return ConfigRule(
        (tensor,), lambda v: {ours: tensor in v}, lambda config: {tensor: True} if getattr(config, ours) else {}
    )


SIZES = (
    required(
        vocab_size="vocab_size",
        block_size="context_length",
        n_embd="embedding_length",
        n_layer="block_count",
        n_head="attention.head_count",
        mlp_dim="feed_forward_length",
    ),
    ConfigRule(("block_count",), lambda v: {"n_layer": count(v, "block_count", LARGEST_DEPTH)}),
    # What llama.cpp reads for all architectures.
    never(
        **{
            "attention.causal": True,
            "attention.key_length_swa": None,
            "attention.value_length_swa": None,
            "embedding_length_out": None,
            "expert_count": 0,
            "nextn_predict_layers": 0,
            "rope.dimension_count_swa": None,
            "rope.scaling.alpha": 0.0,
            "rope.scaling.attn_factor": 1.0,
        }
    ),
)
KV_HEADS = optional("n_kv_head", "attention.head_count_kv", None)
EQUAL_HEADS = alias("attention.head_count_kv", "attention.head_count")  # as many for keys as for queries
HEAD_SIZE = ConfigRule(
    ("attention.key_length",),
    lambda v: {"head_dim": head_size(v)},
    lambda config: dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim),
)
RMS_NORM = (required(norm_eps="attention.layer_norm_rms_epsilon"), always(norm="rmsnorm"))
LAYER_NORM = (required(norm_eps="attention.layer_norm_epsilon"), always(norm="layernorm"))

TIED_IF_ABSENT = ConfigRule(
    (OUTPUT,),
    lambda v: {"tie_embeddings": OUTPUT not in v},
    lambda config: {} if config.tie_embeddings else {OUTPUT: True},
)
TIED_WITH_COPY = optional("tie_embeddings", "jaxgpt.tie_embeddings", False)  # where llama.cpp needs the output matrix

QKV_BIAS = stored("qkv_bias", "blk.0.attn_q.bias")
NO_OTHER_BIAS = always(bias=False, out_bias=False)


def _read_rotation(values: Json) -> Json:
    kind = values.get("rope.scaling.type", "linear")
    factor = values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
    if kind not in ("linear", "none"):
        raise UserError(f"rope.scaling.type={short(kind)}: only linear and none are supported")
    scaling = {} if kind == "none" or factor == 1.0 else {"rope_scaling": "linear", "rope_factor": factor}
    return {"position": "rope", "rope_theta": values.get("rope.freq_base", 10_000.0)} | scaling


def _write_rotation(config: GPTConfig) -> Json:
    assert config.head_dim
    fields = {"rope.freq_base": config.rope_theta, "rope.dimension_count": int(config.head_dim * config.rope_fraction)}
    if config.rope_scaling == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_factor}
    return fields


def _check_whole(values: Json) -> Json:
    head = head_size(values)
    if values.get("rope.dimension_count", head) != head:
        raise UserError(f"rope.dimension_count={short(values['rope.dimension_count'])}: needs the head size, {head}")
    return {}


def _read_fraction(values: Json) -> Json:
    head = head_size(values)
    return {
        "rope_fraction": check_count("rope.dimension_count", values.get("rope.dimension_count", head), 1, head) / head
    }


_ROTATION = ConfigRule(
    ("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"), _read_rotation, _write_rotation
)
ROPE = (_ROTATION, ConfigRule(("rope.dimension_count",), _check_whole))  # of whole heads
PARTIAL_ROPE = (_ROTATION, ConfigRule(("rope.dimension_count",), _read_fraction))


def _read_llama3(values: Json) -> Json:
    """Return the llama3 scaling whose factors are in a tensor, which does not determine it."""
    if FREQUENCIES not in values:
        return {}
    factors = values[FREQUENCIES]
    usual = (float(np.max(factors, initial=1.0)), 1.0, 4.0, 8192)  # of Llama 3.1 to 3.3
    names = SCALINGS["llama3"].values()
    fields = {name: values.get(f"jaxgpt.{name}", value) for name, value in zip(names, usual, strict=True)}
    rotation = _read_rotation(values) | {"head_dim": head_size(values), "rope_scaling": "llama3"} | fields
    config = dataclasses.replace(GPTConfig(), **rotation)
    same_size = np.shape(factors) == (head_size(values) // 2,)
    if not same_size or not np.allclose(_llama3_factors(config), factors, rtol=1e-4):
        named = ", ".join(f"{name}={value}" for name, value in fields.items())
        raise UserError(f"the factors in {FREQUENCIES} are not those of {named}")
    return {"rope_scaling": "llama3"} | fields


def _write_llama3(config: GPTConfig) -> Json:
    if config.rope_scaling != "llama3":
        return {}
    ours = {f"jaxgpt.{name}": getattr(config, name) for name in SCALINGS["llama3"].values()}
    return ours | {FREQUENCIES: _llama3_factors(config)}


def _llama3_factors(config: GPTConfig) -> np.ndarray:
    """Return what llama.cpp divides the angle of each pair by, float32."""
    rope = config.make_rope(None)
    assert rope is not None
    return np.asarray(rope._replace(scaling="none").frequencies() / rope.frequencies())


LLAMA3 = ConfigRule((FREQUENCIES,), _read_llama3, _write_llama3)
# Rotations of layers with a window: Gemma 3's own, and Gemma 2's, the same as elsewhere.
LOCAL_ROPE = ConfigRule(
    ("rope.freq_base_swa",),
    lambda v: {"rope_local_theta": v.get("rope.freq_base_swa", 10_000.0)},
    lambda config: {"rope.freq_base_swa": config.rope_local_theta or config.rope_theta},
)
SAME_ROPE = alias("rope.freq_base_swa", "rope.freq_base", 10_000.0)


def gelu(computed: str, approximated: str, default: str) -> ConfigRule:
    """Return the rule for GELU, of which llama.cpp has the tanh form only.

    Args:
        computed: the activation that llama.cpp computes.
        approximated: the same with GELU by erf, at most 4.7e-4 away; ggml's table in float16 is up to 2e-3 away.
        default: the activation of a file without our field.
    """

    def read(values: Json) -> Json:
        value = values.get("jaxgpt.activation", default)
        if value not in (computed, approximated):
            raise UserError(f"jaxgpt.activation={short(value)}: needs {computed} or {approximated}")
        return {"activation": value}

    def write(config: GPTConfig) -> Json:
        value = config.activation
        return {"jaxgpt.activation": value} if value in (computed, approximated) and value != default else {}

    return ConfigRule(("jaxgpt.activation",), read, write)


def windows(size: int | None, every: int) -> ConfigRule:
    """Return the rule for layers with a sliding window. The arguments are defaults for absent fields.

    Args:
        size: tokens of the window. None means full attention.
        every: every n-th layer has full attention; 0: none has, 1: all have.
    """
    keys = "attention.sliding_window", "attention.sliding_window_pattern"

    def read(values: Json) -> Json:
        window, pattern = values.get(keys[0], size), values.get(keys[1], every)
        if type(pattern) is not int:
            raise UserError(f"{keys[1]}={short(pattern)}: only a number is supported")
        if not window or pattern == 1:
            return {"sliding_window": None}
        return {"sliding_window": window, "global_every": pattern or None}

    def write(config: GPTConfig) -> Json:
        if config.window(0) is None:  # then no layer has one
            return {}
        return {keys[0]: config.sliding_window, keys[1]: config.global_every or 0}

    return ConfigRule(keys, read, write)


NO_WINDOW = never(**{"attention.sliding_window": 0})


def query_scale(largest: int) -> ConfigRule:
    """Return the rule for the scale of scores: the head size, and n_embd / n_head in Gemma's model of 27B.

    largest: layers of that model, by which llama.cpp knows it.
    """

    def read(values: Json) -> Json:
        if values.get("block_count") != largest:
            return {}
        return {"query_scale": count(values, "embedding_length") // count(values, "attention.head_count")}

    return ConfigRule(("block_count",), read)
