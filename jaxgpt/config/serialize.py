"""Read configurations from JSON values, compare them, and write them as Python source."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from jaxgpt.config.validate import field_hints, short, suggest
from jaxgpt.errors import UserError

T = TypeVar("T")


# Fields that earlier versions wrote: the value that changes nothing, and what to take for the others.
GONE = {"n_encoder_layer": (0, "models with an encoder are experiments/transformer_2017")}


def to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as JSON values, with the name of each class that is not ours as "class"."""
    cls = type(config)
    values: dict[str, Any] = {} if cls.__module__.startswith("jaxgpt.") else {"class": _name(cls)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values[field.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return values


def from_dict(cls: type[T], values: Any, where: str = "") -> T:
    """Build a configuration from the result of `to_dict`. `where` precedes field names in messages.

    `values` may be anything that `json.load` returns; it need not be trusted: a class that is not ours must have been
    imported already. Raises `UserError` for unknown keys, missing fields and wrong types.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where or cls.__name__}: got {type(values).__name__}, needs an object")
    if (name := values.get("class")) is not None:
        cls, values = _find_subclass(cls, name, where), {key: x for key, x in values.items() if key != "class"}
    hints = field_hints(cls)
    for key in GONE.keys() & values.keys() - hints.keys():
        harmless, instead = GONE[key]
        if values[key] != harmless:
            raise UserError(f"{where}{key}={short(values[key])}: {instead}")
        values = {other: x for other, x in values.items() if other != key}
    for key in values:
        if key not in hints:
            raise UserError(f"unknown field {where}{str(key)[:80]}{suggest(str(key), hints)}")
    fields: Any = dataclasses.fields(cls)  # type: ignore[bad-argument-type]
    unset = dataclasses.MISSING
    missing = [f.name for f in fields if f.default is unset is f.default_factory and f.name not in values]
    if missing:
        raise UserError(f"{where or cls.__name__}: missing {', '.join(missing)}")
    arguments = dict(values)
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = from_dict(hints[key], value, f"{where}{key}.")
        elif isinstance(value, list):
            arguments[key] = tuple(value)
    return cls(**arguments)


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _find_subclass(cls: type, name: Any, where: str) -> Any:
    """Return the subclass of that name, "module:Class", among those that were imported. Nothing is imported here."""
    found, seen = [cls], set[type]()
    while found:
        one = found.pop()
        if _name(one) == name:
            return one
        found += [other for other in one.__subclasses__() if other not in seen]
        seen.add(one)
    raise UserError(f"{where}class={str(name)[:80]}: it is not one of jaxgpt's: import its module first")


def differences(a: Any, b: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations differ: `{"model.n_layer": (4, 6)}`."""
    if _name(type(a)) != _name(type(b)):  # by name: a file that is run twice defines two classes
        return {f"{where}class": (type(a).__name__, type(b).__name__)}
    found: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            found |= differences(x, y, f"{where}{field.name}.")
        elif x != y:
            found[where + field.name] = (x, y)
    return found


def to_source(experiment: Any) -> str:
    """Return Python source that defines `experiment`, with the fields that differ from their defaults."""
    classes: set[str] = set()

    def render(config: Any, indent: str) -> str:
        name = type(config).__name__
        classes.add(name)
        lines = []
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            if value != default:
                text = render(value, f"{indent}    ") if dataclasses.is_dataclass(value) else repr(value)
                lines.append(f"{indent}    {field.name}={text},\n")
        return f"{name}(\n{''.join(lines)}{indent})"

    body = render(experiment, "")
    return f"""\
import jaxgpt
from jaxgpt import {", ".join(sorted(classes))}

experiment = {body}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
"""
