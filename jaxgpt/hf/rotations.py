"""Convert rotary position embeddings between `config.json`, as transformers 4 and 5 write it, and `GPTConfig`."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import FULL, SLIDING, ConfigRule, Json, merge_agreeing

THETA, FRACTION, ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
# For each type of rope_parameters in transformers 5: its key -> our field.
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


def rope(theta: str = THETA, fraction: str | None = None) -> ConfigRule:
    """Return the rule for one rotation in all layers.

    transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`: either is read, both are written.

    Args:
        theta: the family's key in transformers 4 for the base of the wavelengths.
        fraction: its key for the rotated fraction of each head. None means that heads are rotated in full.
    """

    def read(hf: Json) -> Json:
        usual = {THETA: 10_000.0, FRACTION: 1.0 if fraction is None else 0.25}
        older = {THETA: hf.get(theta), FRACTION: hf.get(fraction or FRACTION)}
        rotation = usual | _read_rotation(hf, hf.get("rope_parameters"), "rope_parameters", older)
        for key in (THETA, FRACTION):  # the usual names; some files have them as well as the family's
            merge_agreeing({"the keys of this model_type": {key: rotation[key]}, key: {key: hf.get(key)}})
        if fraction is None:
            return _to_fields(rotation)
        return _to_fields(rotation | {FRACTION: 1.0}) | {"rope_fraction": rotation[FRACTION]}

    def write(config: GPTConfig) -> Json:
        hf, newer = _write_rotation(config, theta)
        if fraction is not None:
            hf[fraction] = newer[FRACTION] = config.rope_fraction
        return hf | {"rope_parameters": newer}

    keys = (theta, THETA, fraction or FRACTION, FRACTION, "rope_scaling", "rope_parameters", ORIGINAL)
    return ConfigRule(keys, read, write)


def rope_by_layer() -> ConfigRule:
    """Return the rule of Gemma 3, whose layers with a sliding window have their own rotation."""
    local_theta = "rope_local_base_freq"

    def read(hf: Json) -> Json:
        newer = _read_object(hf.get("rope_parameters"), "rope_parameters")
        if newer.keys() - {FULL, SLIDING}:
            raise UserError(f"rope_parameters={short(newer)}: needs {FULL} and {SLIDING}, with an object for each")
        older = {THETA: hf.get(THETA), FRACTION: hf.get(FRACTION)}
        full = {THETA: 1_000_000.0} | _read_rotation(hf, newer.get(FULL), f"rope_parameters.{FULL}", older)
        older = {THETA: hf.get(local_theta)}
        local = {THETA: 10_000.0} | _read_rotation({}, newer.get(SLIDING), f"rope_parameters.{SLIDING}", older)
        if local.get("rope_type", "default") != "default":
            raise UserError(
                "rope_parameters scale the layers with a sliding window: only the other layers can be scaled"
            )
        return _to_fields(full) | {"rope_local_theta": _to_fields(local)["rope_theta"]}

    def write(config: GPTConfig) -> Json:
        hf, newer = _write_rotation(config, THETA)
        local = config.rope_local_theta or config.rope_theta
        by_layer = {FULL: newer, SLIDING: {THETA: local, "rope_type": "default"}}
        return {THETA: config.rope_theta, local_theta: local} | hf | {"rope_parameters": by_layer}

    return ConfigRule((THETA, local_theta, "rope_scaling", "rope_parameters", FRACTION, ORIGINAL), read, write)


def _read_rotation(hf: Json, newer: Any, name: str, older: Json) -> Json:
    """Return a rotation with the keys of transformers 5. Raises `UserError` if two places differ.

    newer is the object `name` of transformers 5, older has the keys of transformers 4 outside `rope_scaling`.
    """
    places = {
        name: _read_parameters(newer, name),
        "rope_scaling": _read_parameters(hf.get("rope_scaling"), "rope_scaling"),
        "config.json": older,
    }
    if merge_agreeing(places).get("rope_type") == "llama3":  # other types ignore it
        places["config.json"] = older | {ORIGINAL: hf.get(ORIGINAL)}
    return merge_agreeing(places)


def _read_object(value: Any, name: str) -> Json:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name}={short(value)}: needs an object")
    return dict(value or {})


def _read_parameters(value: Any, name: str) -> Json:
    """Return rope parameters with `rope_type`, which files older than transformers 4.43 call `type`."""
    parameters = _read_object(value, name)
    if not parameters:
        return {}
    older, newer = {"rope_type": parameters.pop("type", None)}, {"rope_type": parameters.get("rope_type")}
    return parameters | {"rope_type": "default"} | merge_agreeing({f"{name}.rope_type": newer, f"{name}.type": older})


def _to_fields(rotation: Json) -> Json:
    """Return the fields of `GPTConfig` for a rotation with the keys of transformers 5."""
    kind = rotation.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UserError(f"rope_type={short(kind)}: needs one of {', '.join(SCALINGS)}")
    names = SCALINGS[kind]
    if missing := [name for name in names if name not in rotation]:
        raise UserError(f"its rope_scaling of type {kind} needs {', '.join(missing)} as well")
    if more := rotation.keys() - names.keys() - {"rope_type", THETA, FRACTION}:
        raise UserError(
            f"rope_type={kind} does not use {', '.join(sorted(more))}: give the type that does, or remove it"
        )
    if rotation.get(FRACTION, 1.0) != 1.0:
        raise UserError(f"{FRACTION}={short(rotation[FRACTION])}: only 1.0 is supported")
    scaling = {} if kind == "default" else {"rope_scaling": kind}
    factors = {ours: rotation[theirs] for theirs, ours in names.items()}
    return {"position": "rope", "rope_theta": rotation[THETA]} | scaling | factors


def _write_rotation(config: GPTConfig, theta: str) -> tuple[Json, Json]:
    """Return (the keys of transformers 4, the `rope_parameters` of transformers 5)."""
    kind = "default" if config.rope_scaling == "none" else config.rope_scaling
    scaling = {"rope_type": kind} | {theirs: getattr(config, ours) for theirs, ours in SCALINGS[kind].items()}
    older = {theta: config.rope_theta, "rope_scaling": None if kind == "default" else scaling}
    return older, {THETA: config.rope_theta} | scaling
