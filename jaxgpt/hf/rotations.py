"""Rotary positions in `config.json`, as transformers 4 and 5 spell them."""

from __future__ import annotations

from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.hf.config_rules import FULL, SCALINGS, SLIDING, Aspect, Json, agreed

THETA, FRACTION, ORIGINAL = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"


def rope(theta: str = THETA, fraction: str | None = None) -> Aspect:
    """transformers 4 has `rope_theta` and `rope_scaling`, 5 has `rope_parameters`: either is read, both are written.

    theta, fraction: the keys that a family has for them in 4. fraction: None: all of each head turns.
    """

    def read(hf: Json) -> Json:
        usual = {THETA: 10_000.0, FRACTION: 1.0 if fraction is None else 0.25}
        older = {THETA: hf.get(theta), FRACTION: hf.get(fraction or FRACTION)}
        said = usual | _rotation(hf, hf.get("rope_parameters"), "rope_parameters", older)
        for key in (THETA, FRACTION):  # the names of most families, which some files have beside their own
            agreed({"what this model_type reads": {key: said[key]}, key: {key: hf.get(key)}})
        if fraction is None:
            return _turns(said)
        return _turns(said | {FRACTION: 1.0}) | {"rope_fraction": said[FRACTION]}

    def write(config: GPTConfig) -> Json:
        scaling = _spelled(config)
        five = {THETA: config.rope_theta} | (scaling or {"rope_type": "default"})
        four: Json = {theta: config.rope_theta, "rope_scaling": scaling}
        if fraction is not None:
            five[FRACTION] = four[fraction] = config.rope_fraction
        return four | {"rope_parameters": five}

    names = (theta, THETA, *([] if fraction is None else [fraction]), FRACTION)
    return Aspect((*dict.fromkeys(names), "rope_scaling", "rope_parameters", ORIGINAL), read, write)


def rope_by_layer() -> Aspect:
    """Gemma 3's: layers with a sliding window have rotations of their own."""

    def read(hf: Json) -> Json:
        five = _object(hf.get("rope_parameters"), "rope_parameters")
        if five.keys() - {FULL, SLIDING}:
            raise UserError(f"rope_parameters={short(five)}: needs {FULL} and {SLIDING}, with an object for each")
        usual = {FULL: 1_000_000.0, SLIDING: 10_000.0}
        older = {
            FULL: {THETA: hf.get(THETA), FRACTION: hf.get(FRACTION)},
            SLIDING: {THETA: hf.get("rope_local_base_freq")},
        }
        whole, local = (
            {THETA: usual[kind]}
            | _rotation(hf if kind == FULL else {}, five.get(kind), f"rope_parameters.{kind}", older[kind])
            for kind in (FULL, SLIDING)
        )
        if local.get("rope_type", "default") != "default":
            raise UserError("rope_parameters scale the layers with a sliding window: only the others can be")
        return _turns(whole) | {"rope_local_theta": _turns(local)["rope_theta"]}

    def write(config: GPTConfig) -> Json:
        scaling, local = _spelled(config), config.rope_local_theta or config.rope_theta
        whole = {THETA: config.rope_theta} | (scaling or {"rope_type": "default"})
        return {
            THETA: config.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling,
            "rope_parameters": {FULL: whole, SLIDING: {THETA: local, "rope_type": "default"}},
        }

    return Aspect((THETA, "rope_local_base_freq", "rope_scaling", "rope_parameters", FRACTION, ORIGINAL), read, write)


def _rotation(hf: Json, five: Any, name: str, older: Json) -> Json:
    """Return the rotation of some layers, with the keys of transformers 5. Raises `UserError` where two places differ.

    five: the object `name` of transformers 5. older: the keys of transformers 4 outside `rope_scaling`.
    """
    places = {
        name: _typed(five, name),
        "rope_scaling": _typed(hf.get("rope_scaling"), "rope_scaling"),
        "config.json": older,
    }
    if agreed(places).get("rope_type") == "llama3":  # the other types do not look at it
        places["config.json"] = older | {ORIGINAL: hf.get(ORIGINAL)}
    return agreed(places)


def _object(value: Any, name: str) -> Json:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError(f"{name}={short(value)}: needs an object")
    return value


def _typed(value: Any, name: str) -> Json:
    """Return an object of rope parameters with its type, which files before transformers 4.43 call `type`."""
    said = dict(_object(value, name))
    if not said:
        return {}
    kind = agreed(
        {
            f"{name}.rope_type": {"rope_type": said.get("rope_type")},
            f"{name}.type": {"rope_type": said.pop("type", None)},
        }
    )
    return said | {"rope_type": kind.get("rope_type", "default")}


def _turns(said: Json) -> Json:
    """Return fields of ours for what `_rotation` has found."""
    kind = said.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UserError(f"rope_type={short(kind)}: known are {', '.join(SCALINGS)}")
    names = SCALINGS[kind]
    if missing := [name for name in names if name not in said]:
        raise UserError(f"its rope_scaling of type {kind} needs {', '.join(missing)} as well")
    if more := said.keys() - names.keys() - {"rope_type", THETA, FRACTION}:
        raise UserError(f"rope_type={kind} has no {', '.join(sorted(more))}: give the type that has, or take it out")
    if said.get(FRACTION, 1.0) != 1.0:
        raise UserError(f"{FRACTION}={short(said[FRACTION])}, of which only 1.0 can be expressed")
    scaling = {} if kind == "default" else {"rope_scaling": kind}
    return {"position": "rope", "rope_theta": said[THETA], **scaling} | {
        ours: said[name] for name, ours in names.items()
    }


def _spelled(config: GPTConfig) -> Json | None:
    if config.rope_scaling == "none":
        return None
    names = SCALINGS[config.rope_scaling]
    return {"rope_type": config.rope_scaling} | {name: getattr(config, ours) for name, ours in names.items()}
