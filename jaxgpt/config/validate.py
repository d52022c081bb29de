"""Check values against their annotations: types and bounds."""

from __future__ import annotations

import functools
import inspect
import operator
import reprlib
import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxgpt.errors import UserError

LARGEST_INTEGER = 2**63 - 1  # that arrays and all JSON parsers can represent
# Far beyond any model, and small enough that products of them, and loops over them, are harmless.
LARGEST_SIZE, LARGEST_COUNT = 2**24, 2**14
# Bounds of magnitudes of floats. A product of two of them is still neither 0 nor infinite in float32.
SMALLEST_FLOAT, LARGEST_FLOAT = 1e-18, 1e18


class Interval(NamedTuple):
    """Bounds of a number, in its annotation: `Annotated[int, Interval(ge=1)]`, with the names of annotated-types."""

    ge: float | None = None  # the number is at least this. None means no bound
    gt: float | None = None  # the number is more than this. None means no bound
    le: float | None = None  # the number is at most this. None means no bound
    lt: float | None = None  # the number is less than this. None means no bound


Count = Annotated[int, Interval(ge=1, le=LARGEST_COUNT)]
Size = Annotated[int, Interval(ge=1, le=LARGEST_SIZE)]
PositiveInt = Annotated[int, Interval(ge=1)]
PositiveFloat = Annotated[float, Interval(gt=0)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]
Decay = Annotated[float, Interval(ge=0, lt=0.999999)]  # float32 would round larger ones to 1, and Adam divide by 0


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if abs(x) < 10**99 else f"a number of {x.bit_length():,} bits"


class _Shapes(_Short):
    def repr1(self, x: Any, level: int) -> str:
        if getattr(x, "ndim", 0):  # an array, whose numbers are not wanted
            return f"{x.dtype}{list(x.shape)}"
        return super().repr1(tuple(x) if isinstance(x, tuple) else x, level)


short = _Short().repr  # the repr of an unchecked value, shortened for a message


def short_repr(x: Any) -> str:
    """Return the repr of a dataclass or named tuple in one line, with the types and shapes of its arrays."""
    names = getattr(x, "_fields", None) or x.__dataclass_fields__
    return f"{type(x).__name__}({', '.join(f'{name}={_Shapes().repr1(getattr(x, name), 2)}' for name in names)})"


def to_python(value: Any) -> Any:
    """Convert a scalar of NumPy or JAX to a Python number. Return other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_count(name: str, value: Any, low: int = 1, high: int = LARGEST_INTEGER) -> int:
    """Return the value of the argument `name` as an int. Raise `UserError` unless it is from low to high."""
    return check_value(name, value, Annotated[int, Interval(ge=low, le=high)])


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields. Evaluated once: to read `experiment.json` took 3.5 ms, now 1."""
    return get_type_hints(cls, include_extras=True)


def check_fields(config: Any) -> None:
    """Check each field in the `__post_init__` of a frozen dataclass. Convert NumPy and JAX scalars to Python numbers."""
    cls = type(config)
    if "__dataclass_fields__" not in vars(cls) and (lost := list(inspect.get_annotations(cls))):
        decorate = "decorate it with @dataclasses.dataclass(frozen=True, kw_only=True)"
        raise UserError(f"{cls.__name__}: {', '.join(lost)} would be no fields of the configuration: {decorate}")
    for name, hint in field_hints(cls).items():
        object.__setattr__(config, name, check_value(name, getattr(config, name), hint))


def check_value(name: str, value: Any, hint: Any) -> Any:
    """Return a value, with numbers of Python. Raises `UserError` unless it has the annotated type, is finite and in bounds."""
    value = to_python(value)
    if not _is_a(value, hint):
        needed = " or ".join(map(_describe, alternatives(hint)))
        raise UserError(f"{name}={short(value)}: needs {needed}")
    if isinstance(value, float) and value and not SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT:
        raise UserError(f"{name}={value}: needs 0, or a size from {SMALLEST_FLOAT:g} to {LARGEST_FLOAT:g}")
    if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
        raise UserError(f"{name}={short(value)}: needs a number that fits in 64 bits")
    if value is not None:
        for part in (hint, *get_args(hint)):
            for bounds in getattr(part, "__metadata__", ()):
                if isinstance(bounds, Interval):
                    _check_bounds(name, value, bounds)
    return value


def _check_bounds(name: str, value: float, bounds: Interval) -> None:
    for key, words in zip(Interval._fields, ("at least", "more than", "at most", "less than"), strict=True):
        bound = getattr(bounds, key)
        if bound is not None and not getattr(operator, key)(value, bound):
            raise UserError(f"{name}={short(value)}: needs {words} {bound:,}")


def alternatives(hint: Any) -> list[Any]:
    """Return the annotations that a union allows, or the only one, without bounds."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return alternatives(arguments[0])
    if origin in (Union, types.UnionType):
        return [each for part in arguments for each in alternatives(part)]
    return [hint]


def _is_a(value: Any, hint: Any) -> bool:
    return any(_is_one(value, each) for each in alternatives(hint))


def _is_one(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple and isinstance(value, tuple):
        hints = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return len(value) == len(hints) and all(map(_is_a, value, hints))
    if hint in (float, int):  # an int is a fine learning rate, and True is not
        return isinstance(value, int | hint) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    kind = get_origin(hint) or hint
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", tuple: "a list"}
    return "nothing (None)" if kind is types.NoneType else names.get(kind, getattr(kind, "__name__", str(kind)))
