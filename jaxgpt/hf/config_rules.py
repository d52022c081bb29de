"""Rules that convert between `config.json` and `GPTConfig`, each in both directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import LARGEST_COUNT, check_count, short
from jaxgpt.errors import UserError

Json = dict[str, Any]


class ConfigRule(NamedTuple):
    """Convert some keys of config.json to fields of `GPTConfig`, and back."""

    keys: tuple[str, ...]  # of config.json, those that `read` uses
    read: Callable[[Json], Json]  # config.json -> fields of GPTConfig
    write: Callable[[GPTConfig], Json] = lambda config: {}  # explicit GPTConfig -> keys of config.json


def fields(**table: str | tuple[str, Any]) -> ConfigRule:
    """Return the rule for fields that are stored as they are.

    table: field of `GPTConfig` -> its key, which must be present, or (key, the value that its absence means).
    """

    def read(hf: Json) -> Json:
        for key in table.values():
            if isinstance(key, str) and hf.get(key) is None:
                raise UserError(f"it has no {key}")
        return {ours: hf[key] if isinstance(key, str) else hf.get(*key) for ours, key in table.items()}

    names = {ours: key if isinstance(key, str) else key[0] for ours, key in table.items()}
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


def alias(theirs: str, key: str, default: Any = None) -> ConfigRule:
    """Return the rule for `theirs`, a second name of `key`: absent, or with the same value.

    default: the value of `key` if it is absent.
    """

    def read(hf: Json) -> Json:
        value, used = hf.get(theirs), _get(hf, key, default)
        if value is not None and used is not None and value != used:
            raise UserError(f"conflicting {key}={short(used)} and {theirs}={short(value)}: remove the wrong one")
        return {}

    return ConfigRule((theirs,), read)


def _get(hf: Json, key: str, default: Any) -> Any:
    return default if hf.get(key) is None else hf[key]


def choice(ours: str, theirs: str, values: dict[str, str], default: str) -> ConfigRule:
    """Return the rule for a field whose values have other names in config.json.

    Args:
        ours: the field of `GPTConfig`.
        theirs: the key in config.json.
        values: their name -> ours. If several names mean the same, the first is written; null if none does.
        default: their name if the key is absent or null.
    """

    def read(hf: Json) -> Json:
        value = hf.get(theirs) or default
        if not isinstance(value, str) or value not in values:
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

    Args:
        usual: (layer, config.json) -> whether the layer has a window if there is no list.
        keys: the further keys that `usual` reads.
        switch: a key that must be true for any layer to have a window. None means that there is none.
    """
    keys = ("layer_types", "sliding_window", *([switch] if switch else []), *keys)

    def read(hf: Json) -> Json:
        kinds, layers = hf.get("layer_types") or [], read_count(hf, "num_hidden_layers", 0)
        if not isinstance(kinds, list) or not all(kind in (SLIDING, FULL) for kind in kinds):
            raise UserError(f"layer_types={short(kinds)}: needs a list of {SLIDING} and {FULL}")
        is_on = switch is None or bool(hf.get(switch))
        size = hf.get("sliding_window", 4096) if is_on else None
        slides = [kind == SLIDING for kind in kinds]
        if not kinds:
            slides = [(switch is None or size is not None) and usual(i, hf) for i in range(layers)]
        if len(slides) != layers:
            raise UserError(f"layer_types={short(kinds)}: needs {layers} entries, one per layer")
        if not any(slides):
            return {"sliding_window": None}
        if size is None:
            values = ", ".join(f"{key}={short(hf.get(key))}" for key in keys)
            raise UserError(f"{values}: needs the size of a window, or no {SLIDING} layers")
        every = None if all(slides) else slides.index(False) + 1
        if slides != [every is None or bool((i + 1) % every) for i in range(layers)]:
            raise UserError("layer_types has no period: only every n-th layer can have full attention")
        return {"sliding_window": size, "global_every": every}

    def write(config: GPTConfig) -> Json:
        kinds = [FULL if config.window(i) is None else SLIDING for i in range(config.n_layer)]
        return {"sliding_window": config.sliding_window, "layer_types": kinds}

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
}


def rope(
    theta: str = THETA, usual: float = 10_000.0, *, fraction: str | None = None, local: str | None = None
) -> ConfigRule:
    """Return the rule for rotations.

    transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`. Both are written. Read is what
    transformers 5 reads: `rope_scaling` if there is one, else `rope_parameters`, and other keys for what they lack.

    Args:
        theta: the family's key in transformers 4 for the base of the wavelengths.
        usual: the base if it is absent.
        fraction: the key for the rotated fraction of each head. None means that heads are rotated in full.
        local: the key for the base in layers with a sliding window, which have a rotation of their own (Gemma 3).
    """

    def read(hf: Json) -> Json:
        older, newer, more = _read_object(hf, "rope_scaling"), hf.get("rope_parameters") or {}, {}
        if local is None:
            newer = older or _read_object(hf, "rope_parameters")
        elif not isinstance(newer, dict) or newer.keys() - {FULL, SLIDING}:
            raise UserError(f"rope_parameters={short(newer)}: needs {FULL} and {SLIDING}, with an object for each")
        else:
            nested = {THETA: _get(hf, local, 10_000.0)} | _read_object(newer, SLIDING)
            newer, more = _read_object(newer, FULL) | older, {"rope_local_theta": nested[THETA]}
            if _to_fields(hf, nested).get("rope_scaling"):
                raise UserError(
                    "rope_parameters scale the layers with a sliding window: only the other layers can be scaled"
                )
        newer = {
            THETA: _get(hf, theta, usual),
            FRACTION: _get(hf, fraction or FRACTION, 0.25 if fraction else 1.0),
        } | newer
        if fraction:
            more, newer = {"rope_fraction": newer[FRACTION]}, newer | {FRACTION: 1.0}
        return _to_fields(hf, newer) | more

    def write(config: GPTConfig) -> Json:
        kind = "default" if config.rope_scaling == "none" else config.rope_scaling
        scaling = {"rope_type": kind} | {theirs: getattr(config, ours) for theirs, ours in SCALINGS[kind].items()}
        newer: Json = {THETA: config.rope_theta} | scaling
        hf: Json = {theta: config.rope_theta}
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
        raise UserError(f"{key}={short(value)}: needs an object")
    parameters = {name: inner for name, inner in value.items() if inner is not None}
    return {"rope_type": parameters.pop("type", "default")} | parameters if parameters else {}


def _to_fields(hf: Json, rotation: Json) -> Json:
    """Return the fields of `GPTConfig` for a rotation with the keys of transformers 5."""
    kind = rotation.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UserError(f"rope_type={short(kind)}: needs one of {', '.join(SCALINGS)}")
    names = SCALINGS[kind]
    if ORIGINAL in names and hf.get(ORIGINAL) is not None:  # other types ignore it
        rotation = rotation | {ORIGINAL: hf[ORIGINAL]}
    if missing := [name for name in names if name not in rotation]:
        raise UserError(f"its rope_scaling of type {kind} needs {', '.join(missing)} as well")
    if more := rotation.keys() - names.keys() - {"rope_type", THETA, FRACTION}:
        raise UserError(
            f"rope_type={kind} does not use {', '.join(sorted(more))}: give the type that does, or remove it"
        )
    if rotation.get(FRACTION, 1.0) != 1.0:
        raise UserError(f"{FRACTION}={short(rotation[FRACTION])}: only 1.0 is supported")
    scaling = {} if kind == "default" else {"rope_scaling": kind}
    return {"position": "rope", "rope_theta": rotation[THETA]} | scaling | {names[key]: rotation[key] for key in names}
