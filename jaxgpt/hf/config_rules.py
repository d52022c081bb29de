"""What `config.json` says and what `GPTConfig` says, aspect by aspect, each read and written by the same few lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import LARGEST_COUNT, short
from jaxgpt.errors import UserError

Json = dict[str, Any]
REQUIRED: Any = object()


class Aspect(NamedTuple):
    """One thing that a configuration says."""

    keys: tuple[str, ...]  # of config.json, which `read` looks at
    read: Callable[[Json], Json]  # their config.json -> fields of GPTConfig
    write: Callable[[GPTConfig], Json]  # a GPTConfig with every field explicit -> keys of theirs


def same(ours: str, theirs: str | None = None, default: Any = REQUIRED) -> Aspect:
    """One field, one key, one value. default: theirs, where a config.json leaves the key out."""
    key = theirs or ours

    def read(hf: Json) -> Json:
        value = hf.get(key, default)
        if value is REQUIRED or (value is None and default is REQUIRED):
            raise UserError(f"it has no {key}")
        return {ours: value}

    return Aspect((key,), read, lambda config: {key: getattr(config, ours)})


def always(**ours: Any) -> Aspect:
    """What all models of a family have, and no key says."""
    return Aspect((), lambda hf: ours, lambda config: {})


def never(**theirs: Any) -> Aspect:
    """Keys that have to be absent or have this value: what else they may mean, our layers have not."""

    def read(hf: Json) -> Json:
        for key, value in theirs.items():
            if hf.get(key, value) not in (value, None):
                raise UserError(f"{key}={short(hf[key])}, of which only {value!r} can be expressed")
        return {}

    return Aspect(tuple(theirs), read, lambda config: {})


def causal_decoder() -> Aspect:
    """Nothing of what transformers looks at in the config.json of any model, and none of ours has."""
    return never(
        is_causal=True,
        is_encoder_decoder=False,
        use_bidirectional_attention=False,
        add_cross_attention=False,
        attention_chunk_size=None,
        per_layer_config={},
        kv_sharing_modes=None,
        pruned_heads={},
    )


def alias(theirs: str, key: str, default: Any = REQUIRED) -> Aspect:
    """Another name of a key: it has to be absent, or to have the same value. default: of the key."""

    def read(hf: Json) -> Json:
        agreed({key: {key: hf.get(key, default)}, theirs: {key: hf.get(theirs)}})
        return {}

    return Aspect((theirs,), read, lambda config: {})


def agreed(places: dict[str, Json]) -> Json:
    """Return what several places say, without None. Raises `UserError` where two of them differ."""
    found: Json = {}
    where: dict[str, str] = {}
    for place, said in places.items():
        for key, value in said.items():
            if value is None:
                continue
            if key in found and found[key] != value:
                raise UserError(
                    f"{key}={short(found[key])} by {where[key]}, and {short(value)} by {place}: "
                    "one of them is wrong, so take it out"
                )
            found.setdefault(key, value)
            where.setdefault(key, place)
    return found


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

    return Aspect((theirs,), read, write)


def attention_bias(default: bool = False) -> Aspect:
    """Biases of all of attention's projections, or of none."""

    def read(hf: Json) -> Json:
        value = hf.get("attention_bias", default)
        return {"qkv_bias": value, "out_bias": value}

    return Aspect(("attention_bias",), read, lambda config: {"attention_bias": bool(config.qkv_bias)})


def gpt2_dropout() -> Aspect:
    names = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    # Ours is one number; it matters for training alone.
    return Aspect(
        names[:1], lambda hf: {"dropout": hf.get(names[0], 0.1)}, lambda config: dict.fromkeys(names, config.dropout)
    )


def head_of_width() -> Aspect:
    """GPT-NeoX's heads, which share the width whatever `head_dim` says: tensors of heads of another size are refused."""
    return Aspect(("head_dim",), lambda hf: {"head_dim": hf.get("head_dim")}, lambda config: {})


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


def _window(hf: Json) -> int | None:
    return hf.get("sliding_window", 4096)


def no_window() -> Aspect:
    """Attention that reads all tokens, in every layer."""

    def read(hf: Json) -> Json:
        if hf.get("sliding_window") is not None or SLIDING in _kinds(hf):
            raise UserError(
                f"sliding_window={short(hf.get('sliding_window'))} and layer_types={short(_kinds(hf))}: a model of this "
                "model_type has no windows, so leave them out"
            )
        return {}

    return Aspect(("sliding_window", "layer_types"), read, lambda config: {})


def window_everywhere() -> Aspect:
    """Mistral's: a window for all layers, or for none."""

    def read(hf: Json) -> Json:
        size, kinds = _window(hf), _kinds(hf)
        if (SLIDING if size is None else FULL) in kinds:
            raise UserError(
                f"layer_types={short(kinds)} and sliding_window={short(size)}: all layers of this model_type have the "
                "window, or none has, so leave layer_types out"
            )
        return {"sliding_window": size}

    return Aspect(("sliding_window", "layer_types"), read, lambda config: {"sliding_window": config.sliding_window})


def windows(
    usual: Callable[[int, Json], bool],
    *,
    keys: tuple[str, ...] = (),
    size: Callable[[Json], int | None] = _window,
    **more: Callable[[GPTConfig], Any],
) -> Aspect:
    """`layer_types`, a list; usual(layer, config.json) -> whether it slides where there is none.

    keys: what `usual` and `size` look at beside. size: of the window; None: there is none. more: keys to write beside it.
    """

    def read(hf: Json) -> Json:
        layers, kinds = whole(hf, "num_hidden_layers", 0), _kinds(hf)
        slides = [kind == SLIDING for kind in kinds] if kinds else [usual(i, hf) for i in range(layers)]
        if len(slides) != layers:
            raise UserError(f"layer_types={short(kinds)}: needs {layers}, as many as num_hidden_layers")
        if not any(slides):
            return {"sliding_window": None}
        if size(hf) is None:
            said = ", ".join(f"{key}={short(hf.get(key))}" for key in ("layer_types", "sliding_window", *keys))
            raise UserError(f"{said}: needs the size of a window, or no layers of {SLIDING}")
        every = None if all(slides) else slides.index(False) + 1
        if slides != [every is None or bool((i + 1) % every) for i in range(layers)]:
            raise UserError("layer_types has no period: only each n-th layer can read all tokens")
        return {"sliding_window": size(hf), "global_every": every}

    def write(config: GPTConfig) -> Json:
        kinds = [FULL if config.window(i) is None else SLIDING for i in range(config.n_layer)]
        return {
            "sliding_window": config.sliding_window,
            "layer_types": kinds,
            **{key: of(config) for key, of in more.items()},
        }

    return Aspect(("sliding_window", "layer_types", *keys), read, write)


# What the types of rope_parameters in transformers 5 have, with our names for it.
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_context",
    },
}


# What decides training and not what the parameters mean.
TRAINING = ("dropout", "residual_init", "scan_layers", "remat")


def meaning(config: GPTConfig) -> Json:
    """All that decides the logits, in one form for each function: equal meanings, equal models."""
    c = config.explicit()
    said = {name: value for name, value in dataclasses.asdict(c).items() if name not in TRAINING}
    by_layer = ("sliding_window", "global_every", "rope_local_theta")
    rotations = tuple(name for name in said if name.startswith("rope_"))
    turns = {name: said.pop(name) for name in {*by_layer, *rotations}}
    if c.position == "rope":
        local = c.rope_local_theta
        scaled = c.rope_scaling if c.rope_scaling != "linear" or c.rope_factor != 1.0 else "none"
        names = SCALINGS["default" if scaled == "none" else scaled]
        whole = (float(c.rope_theta), scaled, *(float(turns[ours]) for ours in names.values()))
        assert c.head_dim
        said["rope_size"] = int(c.head_dim * c.rope_fraction)
        said["rope"] = [
            whole if c.window(i) is None or local is None else (float(local), "none") for i in range(c.n_layer)
        ]
    said["windows"] = [c.window(i) for i in range(c.n_layer)]
    if c.norm == "rmsnorm":
        said["norm_offset"] = c.norm_offset
    if not c.qk_norm:
        del said["qk_norm_over"]
    return said
