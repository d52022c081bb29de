"""Describe a model family by rules for config.json and for the tensors, each of which converts in both directions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxgpt.config.validate import LARGEST_COUNT, check_count, short
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.model import GPTConfig


class ConfigRule(NamedTuple):
    """Convert some keys of config.json to fields of `GPTConfig`, and back."""

    keys: tuple[str, ...]  # the keys of config.json that `read` uses
    read: Callable[[Json], Json]  # config.json -> fields of GPTConfig
    write: Callable[[GPTConfig], Json] = lambda config: {}  # explicit GPTConfig -> keys of config.json


def fields(**table: str | tuple[str, Any]) -> ConfigRule:
    """Return the rule for fields that are stored as they are. table: field -> its key, or (key, value if it is absent)."""
    keys = {ours: (key,) if isinstance(key, str) else key for ours, key in table.items()}

    def read(hf: Json) -> Json:
        for key, *default in keys.values():
            if not default and hf.get(key) is None:
                raise UserError(f"it has no {key}")
        return {ours: hf.get(*key) for ours, key in keys.items()}

    names = {ours: key[0] for ours, key in keys.items()}
    return ConfigRule(
        tuple(names.values()), read, lambda config: {key: getattr(config, ours) for ours, key in names.items()}
    )


def always(**ours: Any) -> ConfigRule:
    """Return the rule for fields that have the same value in all models of a family, without a key."""
    return ConfigRule((), lambda hf: ours)


def never(**theirs: Any) -> ConfigRule:
    """Return the rule for keys that must be absent or have this value: our layers do not support any other."""

    def read(hf: Json) -> Json:
        for key, value in theirs.items():
            if hf.get(key, value) not in (value, None):
                raise UserError(f"{key}={short(hf[key])}: only {value!r} is supported")
        return {}

    return ConfigRule(tuple(theirs), read)


# Keys that transformers reads for any model, with the only values that our layers support.
CAUSAL_DECODER = never(
    is_causal=True,
    is_encoder_decoder=False,
    use_bidirectional_attention=False,
    add_cross_attention=False,
    attention_chunk_size=None,
    per_layer_config={},
    kv_sharing_modes=None,
    pruned_heads={},
)


def aliases(**table: str | tuple[str, Any]) -> ConfigRule:
    """Return the rule for second names of keys: absent, or with the same value. table: see `fields`."""

    def read(hf: Json) -> Json:
        for name, key in table.items():
            value, used = hf.get(name), hf.get(key) if isinstance(key, str) else _get(hf, *key)
            if None not in (value, used) and value != used:
                raise UserError(f"{name}={short(value)}: another key says {short(used)}")
        return {}

    return ConfigRule(tuple(table), read)


def _get(hf: Json, key: str, default: Any) -> Any:
    return default if hf.get(key) is None else hf[key]


def choice(ours: str, theirs: str, values: dict[str, str], default: str) -> ConfigRule:
    """Return the rule for a field, `ours`, with other names for its values under the key `theirs`.

    values: their name -> ours. If several mean the same, the first is written. default: their name if there is none.
    """

    def read(hf: Json) -> Json:
        value = hf.get(theirs) or default
        if str(value) not in values:
            raise UserError(f"{theirs}={short(value)}: needs one of {', '.join(values)}")
        return {ours: values[value]}

    def write(config: GPTConfig) -> Json:
        value = getattr(config, ours)
        return {theirs: next((name for name, meant in values.items() if meant == value), None)}

    return ConfigRule((theirs,), read, write)


SLIDING, FULL = "sliding_attention", "full_attention"
NO_WINDOW = never(sliding_window=None, layer_types=None)


def read_count(hf: Json, key: str, default: int) -> int:
    """Return the number of layers under a key, checked."""
    return check_count(key, hf.get(key, default), 0, LARGEST_COUNT)


def windows(usual: Callable[[int, Json], bool], *keys: str, switch: str | None = None) -> ConfigRule:
    """Return the rule for `layer_types`, which lists the layers that have a sliding window.

    usual: (layer, config.json) -> whether the layer has a window if there is no list. keys: the further keys that it
    reads. switch: a key that must be true for any layer to have a window, if there is one.
    """
    keys = ("layer_types", "sliding_window", *([switch] if switch else []), *keys)

    def read(hf: Json) -> Json:
        layers = read_count(hf, "num_hidden_layers", 0)
        is_on = switch is None or bool(hf.get(switch))
        size = hf.get("sliding_window", 4096) if is_on else None
        kinds = hf.get("layer_types")
        if not kinds:
            has_window = switch is None or size is not None
            kinds = [SLIDING if has_window and usual(i, hf) else FULL for i in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
            raise UserError(f"layer_types={short(kinds)}: needs {SLIDING} or {FULL} for each of {layers} layers")
        if SLIDING not in kinds:
            return {"sliding_window": None}
        if size is None:
            raise UserError(f"{', '.join(keys)}: give the size of a window, or no {SLIDING} layers")
        every = kinds.index(FULL) + 1 if FULL in kinds else None
        if kinds != [FULL if every and (i + 1) % every == 0 else SLIDING for i in range(layers)]:
            raise UserError("layer_types has no period: only every n-th layer can have full attention")
        return {"sliding_window": size, "global_every": every}

    def write(config: GPTConfig) -> Json:
        size, layers = config.sliding_window, config.n_layer
        kinds = [FULL if config.window(i) is None else SLIDING for i in range(layers)]
        qwens = {switch: size is not None, "max_window_layers": 0 if size else layers} if switch else {}
        return {"sliding_window": size, "layer_types": kinds} | qwens

    return ConfigRule(keys, read, write)


THETA, FRACTION, ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
# For each type of rope_parameters in transformers 5: its key -> our field.
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        ORIGINAL: "rope_original_context",
    },
    "longrope": {"short_factor": "rope_short_factors", "long_factor": "rope_long_factors"}
    | {"attention_factor": "rope_magnitude", ORIGINAL: "rope_original_context"},
}


def rope(
    theta: str = THETA, usual: float = 10_000.0, *, fraction: str | None = None, local: str | None = None
) -> ConfigRule:
    """Return the rule for rotations.

    transformers 4 has `rope_theta` and `rope_scaling`, 5 `rope_parameters`. Both are written. As in 5, `rope_scaling` is
    read if there is one, else `rope_parameters`, and other keys for what they lack.

    theta: the family's key in transformers 4 for the base of the wavelengths. usual: the base if it is absent. fraction:
    the key for the rotated fraction of each head, if they are not rotated in full. local: the key for the base in layers
    with a sliding window, if they have a rotation of their own (Gemma 3).
    """

    def read(hf: Json) -> Json:
        older = _read_object(hf, "rope_scaling")
        whole = _get(hf, fraction or FRACTION, 0.25 if fraction == "rotary_pct" else 1.0)
        usual_values = {THETA: _get(hf, theta, usual), FRACTION: whole}
        if local is None:
            found = older or _read_object(hf, "rope_parameters")
            return _to_fields(hf, usual_values | found, has_fraction=fraction is not None)
        both = hf.get("rope_parameters") or {}
        if not isinstance(both, dict) or both.keys() - {FULL, SLIDING}:
            raise UserError(f"rope_parameters: needs {FULL} and {SLIDING}, each an object")
        inner = _to_fields(hf, {THETA: _get(hf, local, 10_000.0)} | _read_object(both, SLIDING))
        if "rope_scaling" in inner:
            raise UserError("rope_parameters scale the layers with a sliding window: only others can be scaled")
        outer = _to_fields(hf, usual_values | _read_object(both, FULL) | older)
        return outer | {"rope_local_theta": inner["rope_theta"]}

    def write(config: GPTConfig) -> Json:
        kind = "default" if config.rope_scaling == "none" else config.rope_scaling
        scaling = {"rope_type": kind} | {theirs: getattr(config, ours) for theirs, ours in SCALINGS[kind].items()}
        newer: Json = {THETA: config.rope_theta} | scaling
        hf: Json = {theta: config.rope_theta}
        if kind == "longrope":
            hf[ORIGINAL] = scaling[ORIGINAL]  # beside them, or Phi3Config's default is taken
        if local:
            hf[local] = config.rope_local_theta or config.rope_theta
            newer = {FULL: newer, SLIDING: {THETA: hf[local], "rope_type": "default"}}
        hf["rope_scaling"] = None if kind == "default" else scaling
        if fraction:
            hf[fraction] = newer[FRACTION] = config.rope_fraction
        return hf | {"rope_parameters": newer}

    keys = (theta, fraction or FRACTION, "rope_scaling", "rope_parameters", ORIGINAL)
    return ConfigRule((*keys, local) if local else keys, read, write)


def _read_object(hf: Json, key: str) -> Json:
    """Return the parameters of a rotation, with `rope_type`, which files older than transformers 4.43 call `type`."""
    value = hf.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{key} must be an object")
    parameters = {name: inner for name, inner in value.items() if inner is not None}
    return {"rope_type": parameters.pop("type", "default")} | parameters if parameters else {}


def _to_fields(hf: Json, rotation: Json, *, has_fraction: bool = False) -> Json:
    """Return the fields of `GPTConfig` for a rotation of transformers 5. has_fraction: heads may be turned in part."""
    kind = rotation.get("rope_type", "default")
    if str(kind) not in SCALINGS:
        raise UserError(f"rope_type={short(kind)}: needs one of {', '.join(SCALINGS)}")
    names = SCALINGS[kind]
    if ORIGINAL in names and hf.get(ORIGINAL) is not None:  # other types ignore it
        rotation = rotation | {ORIGINAL: hf[ORIGINAL]}
    if kind == "longrope":
        before = check_count(ORIGINAL, rotation.get(ORIGINAL), 2)
        grown = max(1.0, check_count("context", hf.get("max_position_embeddings", before)) / before)
        rotation = {"attention_factor": math.sqrt(1.0 + math.log(grown) / math.log(before))} | rotation
        rotation |= {key: tuple(x) for key, x in rotation.items() if isinstance(x, list)}
    given = rotation.keys() - {"rope_type", THETA, FRACTION}
    if given != names.keys():
        raise UserError(f"rope_type={kind} needs {', '.join(names)} and has {', '.join(sorted(given))}")
    fields = {"position": "rope", "rope_theta": rotation[THETA]} | {names[key]: rotation[key] for key in names}
    if kind != "default":
        fields["rope_scaling"] = kind
    if has_fraction:
        fields["rope_fraction"] = rotation[FRACTION]
    elif rotation.get(FRACTION, 1.0) != 1.0:
        raise UserError(f"{FRACTION}={short(rotation[FRACTION])}: only 1.0 is supported")
    return fields


EMBEDDING, HEAD = ("wte/embedding",), ("lm_head/kernel",)  # paths of the parameters that are one if embeddings are tied

# Layout of the elements in a file. same: as ours. columns: parts concatenated along the last axis (GPT-2's Conv1D). rows:
# parts transposed to [out, in], where ours is [in, out], and concatenated. heads: as rows, but with all parts of the
# first head, then of the second, ... (GPT-NeoX). pairs: as rows, but in each head the elements that rotate together are
# neighbours, which here are half a head apart (Llama in GGUF).
Layout = Literal["same", "columns", "rows", "heads", "pairs"]


class WeightRule(NamedTuple):
    """Map one tensor of a file to the parameters that it holds. "{}" is the index of the layer."""

    ours: tuple[str, ...]  # "h_{}/attn/q/kernel"
    theirs: str  # "model.layers.{}.self_attn.q_proj.weight"
    layout: Layout = "same"


# Modules that share a tensor in some families, by the name of it in rules.
FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("c_gate", "c_fc")}


def weight_rules(
    top: dict[str, str],
    layer: str,
    inside: dict[str, str],
    *,
    matrices: Layout = "rows",
    fused: Layout = "rows",
    rotated: Layout = "rows",
) -> tuple[WeightRule, ...]:
    """Return the rules for all tensors, from the names of modules.

    top: the path of our module -> theirs, outside of the layers. inside: the same in a layer, where their names begin with
    `layer`. See `FUSED` for those that share a tensor. fused: layout of attn/qkv. rotated: of attn/q and attn/k. matrices:
    of the other linear layers.
    """
    rules, layouts = [], {"qkv": fused, "q": rotated, "k": rotated}
    for ours, theirs in (top | {f"h_{{}}/{ours}": f"{layer}.{theirs}" for ours, theirs in inside.items()}).items():
        place, _, last = ours.rpartition("/")
        if last in ("wte", "wpe"):
            rules.append(WeightRule((f"{last}/embedding",), f"{theirs}.weight"))
        elif last == "lm_head":
            rules.append(WeightRule(HEAD, f"{theirs}.weight", "rows"))
        else:
            is_norm = last.startswith("ln_") or last.endswith("_norm")
            layout = "same" if is_norm else layouts.get(last, matrices)
            paths = [f"{place}/{x}" for x in FUSED[last]] if last in FUSED else [ours]
            for x, y in (("scale" if is_norm else "kernel", "weight"), ("bias", "bias")):
                rules.append(WeightRule(tuple(f"{path}/{x}" for path in paths), f"{theirs}.{y}", layout))
    return tuple(rules)


def split(theirs: np.ndarray, outputs: Sequence[int], layout: Layout, head_dim: int) -> list[np.ndarray]:
    """Split a tensor of a file into our arrays, views where possible. outputs: the last axis of each array."""
    cuts = np.cumsum(outputs)[:-1]
    if layout == "same":
        return [theirs]
    if layout == "columns":
        return np.split(theirs, cuts, axis=-1)
    if layout == "heads":
        theirs = _swap(theirs, (-1, len(outputs), head_dim), (0, 1))
    if layout == "pairs":
        theirs = _swap(theirs, (-1, head_dim // 2, 2), (1, 2))
    return [x.T for x in np.split(theirs, cuts)]


def join(ours: Sequence[np.ndarray], layout: Layout, head_dim: int) -> np.ndarray:
    """Join our arrays into the tensor of a file, the inverse of `split`."""
    if layout == "same":
        return ours[0]
    if layout == "columns":
        return np.concatenate(ours, axis=-1)
    theirs = np.concatenate([x.T for x in ours])
    if layout == "heads":
        return _swap(theirs, (len(ours), -1, head_dim), (0, 1))
    if layout == "pairs":
        return _swap(theirs, (-1, 2, head_dim // 2), (1, 2))
    return theirs


def _swap(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, int]) -> np.ndarray:
    """Return an array of the same shape, whose first axis has two parts swapped. shape: how the first axis is split."""
    return x.reshape(*shape, *x.shape[1:]).swapaxes(*axes).reshape(x.shape)


def their_shape(ours: Sequence[tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """Return the shape of the tensor that `join` makes of arrays with these shapes."""
    inputs, outputs = ours[0][:-1], sum(shape[-1] for shape in ours)
    return (*inputs, outputs) if layout in ("same", "columns") else (outputs, *inputs)


# Keys of config.json that do not change the logits in any family. A key is unknown if it is not here and no rule of its
# family reads it.
IGNORED = frozenset(
    # File and storage.
    "model_type architectures transformers_version dtype torch_dtype quantization_config name_or_path "
    # Implementation: the same result up to rounding.
    "attn_implementation chunk_size_feed_forward gradient_checkpointing "
    "pretraining_tp reorder_and_upcast_attn torchscript use_bfloat16 use_cache cache_implementation "
    # Further outputs of a call.
    "output_attentions output_hidden_states return_dict use_return_dict tie_last_hidden_states "
    # Training and initialisation.
    "attention_dropout attn_pdrop embd_pdrop hidden_dropout initializer_range tie_encoder_decoder tf_legacy_loss "
    # Classification heads.
    "classifier_dropout finetuning_task id2label label2id num_labels problem_type summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params "
    # Special tokens and sampling.
    "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id prefix tokenizer_class bad_words_ids "
    "begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p "
    # Notes of other tools.
    "is_llama_config transformers.js_config unsloth_fixed unsloth_version "
    # Read by transformers only in other families, or in other versions if layer_types is absent.
    "is_decoder cross_attention_hidden_size n_ctx".split()
)
# Fields that only matter in training, and fields that `canonical_form` replaces by a list over the layers.
TRAINING = ("dropout", "residual_init", "mup_base_width", "scan_layers", "remat")
BY_LAYER = ("sliding_window", "global_every")
# Parts of the canonical form that are not fields, with the fields that decide them.
PARTS = {
    "windows": BY_LAYER,
    "rope": ("rope_theta", "rope_scaling", "rope_factor", "rope_local_theta", "rope_long_factors"),
    "rope_size": ("rope_fraction",),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A model family in a format: its names, and the rules for the configuration and for the tensors."""

    model_type: str  # transformers' name for it, in config.json
    architecture: str | None = None  # transformers' class. None means another format, with neither name
    prefix: str = ""  # begins the names of all tensors but the output matrix. Checkpoints of the base model lack it
    config_rules: tuple[ConfigRule, ...]  # how each field of the configuration is stored
    weight_rules: tuple[WeightRule, ...]  # how each parameter is stored

    def read(self, hf: Json) -> GPTConfig:
        """Return the architecture that a config.json describes. Raises `UserError` if our layers do not support it."""
        fields: Json = {}
        for rule in self.config_rules:
            fields |= rule.read(hf)
        if fields.get("sliding_window") is None:  # no layer has the local rotation
            fields.pop("rope_local_theta", None)
        return GPTConfig(**fields)

    def write(self, config: GPTConfig) -> Json:
        """Return the config.json of an architecture, without the keys of the tokenizer."""
        hf: Json = {}
        if self.architecture is not None:
            hf |= {"model_type": self.model_type, "architectures": [self.architecture]}
        for rule in self.config_rules:
            hf |= rule.write(config.explicit())
        return hf

    def unknown_keys(self, hf: Json) -> list[str]:
        """Return the unknown keys of a config.json, except those that are null, false or private to transformers."""
        known = IGNORED.union(*(rule.keys for rule in self.config_rules))
        used = (key for key, value in hf.items() if value not in (None, False) and not key.startswith("_"))
        return sorted({*used} - known)

    def expand_rules(self, config: GPTConfig, paths: Container[str]) -> Iterator[WeightRule]:
        """Yield the rule of each tensor of a model, with layer indices filled in, if it has these paths of parameters."""
        for rule in self.weight_rules:
            for layer in range(config.n_layer) if "{}" in rule.theirs else (0,):
                ours = tuple(path.format(layer) for path in rule.ours)
                if ours[0] in paths:
                    yield WeightRule(ours, rule.theirs.format(layer), rule.layout)


def canonical_form(config: GPTConfig) -> Json:
    """Return all that determines the logits: configurations with equal forms describe the same model."""
    c = config.explicit()
    form = {
        name: value
        for name, value in dataclasses.asdict(c).items()
        if name not in TRAINING + BY_LAYER and not name.startswith("rope_")
    }
    form["windows"] = [c.window(i) for i in range(c.n_layer)]
    if c.position == "rope":
        scaling = "none" if c.rope_scaling == "linear" and c.rope_factor == 1.0 else c.rope_scaling
        names = SCALINGS.get(scaling, {}).values()
        usual = (float(c.rope_theta), scaling, *(np.float32(getattr(c, name)).tolist() for name in names))
        local = usual if c.rope_local_theta is None else (float(c.rope_local_theta), "none")
        form["rope_size"] = int(config.shape.head_dim * c.rope_fraction)
        form["rope"] = [usual if window is None else local for window in form["windows"]]
    if not c.qk_norm:
        del form["qk_norm_over"]
    return form


def find_differences(config: GPTConfig, other: GPTConfig) -> list[str]:
    """Return "name=value" of the fields, sorted, by which `other` describes another model than `config`."""
    ours, theirs = canonical_form(config), canonical_form(other)
    fields: list[str] = []
    for part in ours.keys() | theirs.keys():
        if ours.get(part) != theirs.get(part):
            names = PARTS.get(part, (part,))
            fields += [n for n in names if getattr(config, n) != getattr(GPTConfig, n)] or names
    return sorted(f"{name}={getattr(config, name)}" for name in fields)
