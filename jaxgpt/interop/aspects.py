"""What `config.json` says and what `GPTConfig` says, aspect by aspect, each read and written by the same few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.checks import LARGEST_COUNT, short
from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError

Json = dict[str, Any]
REQUIRED: Any = object()


class Aspect(NamedTuple):
    """One thing that a configuration says."""

    read: Callable[[Json], Json]  # their config.json -> fields of GPTConfig
    write: Callable[[GPTConfig], Json]  # a GPTConfig with every field explicit -> keys of theirs


def same(ours: str, theirs: str | None = None, default: Any = REQUIRED) -> Aspect:
    """One field, one key, one value. default: theirs, where a config.json leaves the key out."""
    key = theirs or ours

    def read(hf: Json) -> Json:
        value = hf.get(key, default)
        if value is REQUIRED:
            raise UserError(f"it has no {key}")
        return {ours: value}

    return Aspect(read, lambda config: {key: getattr(config, ours)})


def always(**ours: Any) -> Aspect:
    """What all models of a family have, and no key says."""
    return Aspect(lambda hf: ours, lambda config: {})


def never(**theirs: Any) -> Aspect:
    """Keys that have to be absent or have this value: what else they may mean, our layers have not."""

    def read(hf: Json) -> Json:
        for key, value in theirs.items():
            if hf.get(key, value) not in (value, None):
                raise UserError(f"{key}={short(hf[key])}, of which only {value!r} can be expressed")
        return {}

    return Aspect(read, lambda config: {})


def named(ours: str, theirs: str, values: dict[str, str], default: str) -> Aspect:
    """A field whose values have other names there; the first of several for one of ours is written, none for what is not there."""

    def read(hf: Json) -> Json:
        value = hf.get(theirs) or default
        if not isinstance(value, str) or value not in values:
            raise UserError(f"{theirs}={short(value)}: known are {', '.join(values)}")
        return {ours: values[value]}

    def write(config: GPTConfig) -> Json:
        mine = getattr(config, ours)
        return {theirs: next((name for name, value in values.items() if value == mine), None)}

    return Aspect(read, write)


def attention_bias(default: bool = False) -> Aspect:
    """Biases of all of attention's projections, or of none."""

    def read(hf: Json) -> Json:
        value = hf.get("attention_bias", default)
        return {"qkv_bias": value, "out_bias": value}

    return Aspect(read, lambda config: {"attention_bias": bool(config.qkv_bias)})


def gpt2_dropout() -> Aspect:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    # Ours is one number; it matters for training alone.
    return Aspect(lambda hf: {"dropout": hf.get(names[0], 0.1)}, lambda config: dict.fromkeys(names, config.dropout))


def rope(theta: str = "rope_theta", fraction: str | None = None) -> Aspect:
    """transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`: either is read, both are written.

    theta, fraction: the keys that a family has for them in 4.
    """

    def read(hf: Json) -> Json:
        found = _parameters(hf.get("rope_parameters"), "rope_parameters") | _parameters(
            hf.get("rope_scaling"), "rope_scaling"
        )
        said = {"position": "rope", "rope_theta": found.get("rope_theta", hf.get(theta, 10_000.0))}
        if fraction is not None:
            said["rope_fraction"] = found.get("partial_rotary_factor", hf.get(fraction, 0.25))
        return said | _scaling(found, hf)

    def write(config: GPTConfig) -> Json:
        scaling = _spelled(config)
        five = {"rope_theta": config.rope_theta} | (scaling or {"rope_type": "default"})
        four: Json = {theta: config.rope_theta, "rope_scaling": scaling}
        if fraction is not None:
            five["partial_rotary_factor"] = four[fraction] = config.rope_fraction
        return four | {"rope_parameters": five}

    return Aspect(read, write)


def rope_by_layer() -> Aspect:
    """Gemma 3's: layers with a sliding window have rotations of their own."""

    def read(hf: Json) -> Json:
        five = _parameters(hf.get("rope_parameters"), "rope_parameters")
        whole = _parameters(five.get("full_attention"), "rope_parameters") | _parameters(
            hf.get("rope_scaling"), "rope_scaling"
        )
        local = _parameters(five.get("sliding_attention"), "rope_parameters")
        if local.get("rope_type", "default") != "default":
            raise UserError("rope_parameters scale the layers with a sliding window: only the others can be")
        return {
            "position": "rope",
            "rope_theta": whole.get("rope_theta", hf.get("rope_theta", 1_000_000.0)),
            "rope_local_theta": local.get("rope_theta", hf.get("rope_local_base_freq", 10_000.0)),
        } | _scaling(whole, hf)

    def write(config: GPTConfig) -> Json:
        scaling, local = _spelled(config), config.rope_local_theta or config.rope_theta
        whole = {"rope_theta": config.rope_theta} | (scaling or {"rope_type": "default"})
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": whole,
                "sliding_attention": {"rope_theta": local, "rope_type": "default"},
            },
        }

    return Aspect(read, write)


def _parameters(value: Any, name: str) -> Json:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name}={short(value)}: needs an object")
    return value


SCALINGS = {"factor": "rope_factor"}
LLAMA3 = SCALINGS | {
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_context",
}


def _scaling(found: Json, hf: Json) -> Json:
    kind = found.get("rope_type", found.get("type", "default"))
    if kind in ("default", None):
        return {}
    if kind not in ("linear", "llama3"):
        raise UserError(f"rope_type={short(kind)}: known are default, linear, llama3")
    names = SCALINGS if kind == "linear" else LLAMA3
    if missing := [name for name in names if name not in found]:
        raise UserError(f"its rope_scaling of type {kind} needs {', '.join(missing)} as well")
    return {"rope_scaling": kind} | {ours: found[name] for name, ours in names.items()}


def _spelled(config: GPTConfig) -> Json | None:
    if config.rope_scaling == "none":
        return None
    names = SCALINGS if config.rope_scaling == "linear" else LLAMA3
    return {"rope_type": config.rope_scaling} | {name: getattr(config, ours) for name, ours in names.items()}


SLIDING, FULL = "sliding_attention", "full_attention"


def whole(hf: Json, key: str, default: int) -> int:
    """A number of layers."""
    value = hf.get(key, default)
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise UserError(f"{key}={short(value)}: needs a whole number from 0 to {LARGEST_COUNT}")
    return value


def _kinds(hf: Json) -> list[str]:
    """`layer_types`; empty where there are none."""
    kinds = hf.get("layer_types") or []
    if not isinstance(kinds, list) or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise UserError(f"layer_types={short(kinds)}: needs a list of {SLIDING} and {FULL}")
    return kinds


def window_everywhere() -> Aspect:
    """Mistral's: a window for all layers, or for none."""

    def read(hf: Json) -> Json:
        if FULL in (kinds := _kinds(hf)):
            raise UserError(f"layer_types={short(kinds)}: of this model_type all layers have to be {SLIDING}")
        return {"sliding_window": hf.get("sliding_window", 4096)}

    return Aspect(read, lambda config: {"sliding_window": config.sliding_window})


def windows(usual: Callable[[int, Json], bool], **more: Callable[[GPTConfig], Any]) -> Aspect:
    """`layer_types`, a list; usual(layer, config.json) -> whether it slides where there is none.

    more: keys that are to be written beside it.
    """

    def read(hf: Json) -> Json:
        layers, size, kinds = whole(hf, "num_hidden_layers", 0), hf.get("sliding_window", 4096), _kinds(hf)
        slides = [kind == SLIDING for kind in kinds] if kinds else [usual(i, hf) for i in range(layers)]
        if len(slides) != layers:
            raise UserError(f"layer_types={short(kinds)}: needs {layers}, as many as num_hidden_layers")
        if size is None or not any(slides):
            return {"sliding_window": None}
        every = None if all(slides) else slides.index(False) + 1
        if slides != [every is None or bool((i + 1) % every) for i in range(layers)]:
            raise UserError("layer_types has no period: only each n-th layer can read all tokens")
        return {"sliding_window": size, "global_every": every}

    def write(config: GPTConfig) -> Json:
        kinds = [FULL if config.window(i) is None else SLIDING for i in range(config.n_layer)]
        return {
            "sliding_window": config.sliding_window,
            "layer_types": kinds,
            **{key: of(config) for key, of in more.items()},
        }

    return Aspect(read, write)


def explicit(config: GPTConfig) -> GPTConfig:
    """The same architecture with every None that means another field replaced by that field's value."""
    return dataclasses.replace(
        config,
        n_kv_head=config.kv_heads,
        head_dim=config.head_size,
        mlp_dim=config.mlp_hidden,
        qkv_bias=config.has_qkv_bias,
        out_bias=config.has_out_bias,
        query_scale=float(config.head_size if config.query_scale is None else config.query_scale),
    )


# What decides training and not what the parameters mean.
TRAINING = ("dropout", "residual_init", "scan_layers", "remat")


def meaning(config: GPTConfig) -> Json:
    """All that decides the logits, in one form for each function: equal meanings, equal models."""
    c = explicit(config)
    said = {name: value for name, value in dataclasses.asdict(c).items() if name not in TRAINING}
    by_layer = ("sliding_window", "global_every", "rope_local_theta")
    rotations = tuple(name for name in said if name.startswith("rope_"))
    turns = {name: said.pop(name) for name in {*by_layer, *rotations}}
    if c.position == "rope":
        local = c.rope_local_theta
        scaled = c.rope_scaling if c.rope_scaling != "linear" or c.rope_factor != 1.0 else "none"
        names = {"none": {}, "linear": SCALINGS, "llama3": LLAMA3}[scaled]
        whole = (float(c.rope_theta), scaled, *(float(turns[ours]) for ours in names.values()))
        said["rope_size"] = c.rotary_size
        said["rope"] = [
            whole if c.window(i) is None or local is None else (float(local), "none") for i in range(c.n_layer)
        ]
    said["windows"] = [c.window(i) for i in range(c.n_layer)]
    if c.norm == "rmsnorm":
        said["norm_offset"] = c.norm_offset
    if not c.qk_norm:
        del said["qk_norm_over"]
    return said
