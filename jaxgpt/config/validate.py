"""Whether the fields of a dataclass hold what their annotations say and what is possible, told in words."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxgpt.errors import UserError

LARGEST_INTEGER = 2**63 - 1  # that arrays can hold, and every reader of JSON
# Far beyond any model, and small enough that products of them, and loops over them, are harmless.
LARGEST_SIZE, LARGEST_COUNT = 2**24, 2**14
# Of numbers that are not whole. A product of two of them is still a number of float32, neither 0 nor infinite.
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-18, 1e18


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**99 else f"a number of {x.bit_length():,} bits"


short = _Short().repr  # the repr of an unchecked value, shortened for a message


def to_python(value: Any) -> Any:
    """Return a scalar of NumPy or JAX as Python's, which JSON and hashing take; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_whole(name: str, value: Any) -> int:
    """Return the value of an argument as an int. Raise `UserError` unless it is a whole number."""
    value = to_python(value)
    if not _is_a(value, int):
        raise UserError(f"{name}={short(value)}: needs a whole number")
    return value


def check_count(name: str, value: Any, low: int = 1, high: int = LARGEST_INTEGER) -> int:
    """Return the value of an argument as an int. Raise `UserError` unless it is a whole number from low to high."""
    value = check_whole(name, value)
    if not low <= value <= high:
        raise UserError(f"{name}={short(value)}: needs at {f'least {low}' if value < low else f'most {high:,}'}")
    return value


def check_types(config: Any) -> None:
    """Raise unless every field holds what its annotation says: Python callers and JSON get the same message.

    Scalars of NumPy and JAX become Python's.
    """
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = to_python(getattr(config, field.name)), hints[field.name]
        object.__setattr__(config, field.name, value)  # of a frozen dataclass, which is being made
        if not _is_a(value, hint):
            raise UserError(f"{field.name}={short(value)}: needs {_say(hint)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field.name}={value}: needs a finite number")
        if isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
            raise UserError(f"{field.name}={value}: needs 0, or a size from {SMALLEST_FLOAT:g} to {LARGEST_FLOAT:g}")
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise UserError(f"{field.name}={short(value)}: needs a number that fits in 64 bits")


def _is_a(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return any(_is_a(value, h) for h in get_args(hint))
    if get_origin(hint) is tuple:  # of any length
        return isinstance(value, tuple) and all(_is_a(item, get_args(hint)[0]) for item in value)
    if hint is float:  # an int is a fine learning rate; True is not
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _say(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_say(h) for h in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, of each {_say(get_args(hint)[0])}"
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a text",
        type(None): "nothing (None)",
    }
    return names.get(hint, getattr(hint, "__name__", str(hint)))


def at_least(config: Any, low: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise UserError(f"{name}={value}: needs at least {low}")


def at_most(config: Any, high: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value > high:
            raise UserError(f"{name}={value}: needs at most {high:,}")


def above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise UserError(f"{name}={value}: needs more than 0")


def in_range(config: Any, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    if not low <= value < high:
        raise UserError(f"{name}={value}: needs at least {low:g} and less than {high:g}")
