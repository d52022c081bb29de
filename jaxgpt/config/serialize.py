"""Configurations to and from JSON, and what differs between two."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeVar, get_type_hints

from jaxgpt.errors import UserError

T = TypeVar("T")


def from_dict(cls: type[T], values: Any, where: str = "") -> T:
    """The inverse of `dataclasses.asdict`. Unknown keys, missing fields and wrong types raise `UserError`.

    values: anything that `json.load` returns; it need not be trusted.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where or cls.__name__}: got {type(values).__name__}, needs an object")
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            close = difflib.get_close_matches(str(key)[:80], fields, n=1)
            raise UserError(
                f"unknown field {where}{str(key)[:80]}" + (f": did you mean {where}{close[0]}?" if close else "")
            )
    missing = [
        name
        for name, f in fields.items()
        if name not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise UserError(f"{where or cls.__name__}: missing {', '.join(missing)}")
    return cls(
        **{
            key: from_dict(hints[key], value, f"{where}{key}.")
            if dataclasses.is_dataclass(hints[key])
            else tuple(value)
            if isinstance(value, list)
            else value
            for key, value in values.items()
        }
    )


def differences(a: Any, b: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two configurations of one class differ: `{"model.n_layer": (4, 6)}`."""
    found: dict[str, tuple[Any, Any]] = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            found |= differences(x, y, f"{where}{field.name}.")
        elif x != y:
            found[where + field.name] = (x, y)
    return found
