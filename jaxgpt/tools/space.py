"""The space of a sweep: fields of an experiment, each with a range or choices, and the points that are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np

from jaxgpt.config import Experiment
from jaxgpt.config.validate import check_value, field_hints, short, suggest
from jaxgpt.errors import UserError

VARIABLE = ("model", "optim", "lora")
# They change the tokens of a run, or what a loss per token means.
FIXED = ("model.block_size", "model.vocab_size")
DIGITS = 4  # of a float in a range: 0.001234


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A swept field: choices, or a range of floats or of whole numbers."""

    field: str  # such as optim.learning_rate
    choices: tuple[Any, ...] = ()  # empty: a range
    low: float = 0.0
    high: float = 0.0

    @property
    def is_log(self) -> bool:
        """Return whether the range is spread evenly over its logarithm, as every range above 0 is."""
        return self.low > 0

    def at(self, share: float) -> Any:
        """Return the value at a share of the range or of the choices, from 0 to less than 1."""
        if self.choices:
            return self.choices[int(share * len(self.choices))]
        span = self.high - self.low
        value = self.low * (self.high / self.low) ** share if self.is_log else self.low + span * share
        value = round(value) if isinstance(self.low, int) else float(f"{value:.{DIGITS}g}")
        return min(max(value, self.low), self.high)

    def __str__(self) -> str:
        """Return the axis as --over takes it."""
        values = ",".join(map(str, self.choices)) if self.choices else f"{self.low:g}..{self.high:g}"
        return f"{self.field}={values}"


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Parse what --over was given: `FIELD=LOW..HIGH` or `FIELD=A,B,C`, a field with - or _. Raises `UserError`."""
    axes = [parse_axis(text) for text in texts]
    fields = [axis.field for axis in axes]
    if twice := [field for field in fields if fields.count(field) > 1]:
        raise UserError(f"--over has {twice[0]} twice: give each field once")
    if not axes:
        raise UserError("a sweep needs a field: --over optim.learning-rate=1e-4..1e-1")
    return axes


def parse_axis(text: str) -> Axis:
    """Parse `FIELD=LOW..HIGH` or `FIELD=A,B,C`. Raises `UserError`."""
    name, _, values = text.partition("=")
    field = name.replace("-", "_")
    sections = {section: kind for section, kind in field_hints(Experiment).items() if dataclasses.is_dataclass(kind)}
    hints = {f"{section}.{x}": hint for section, kind in sections.items() for x, hint in field_hints(kind).items()}
    if not name or not values:
        raise UserError(f"--over {text}: needs FIELD=LOW..HIGH or FIELD=A,B,C, such as optim.learning-rate=1e-4..1e-1")
    if field not in hints:
        raise UserError(
            f"--over {text}: there is no field {short(field)}{suggest(field, hints)}. See jaxgpt train --help-all"
        )
    if field.split(".")[0] not in VARIABLE or field in FIXED:
        raise UserError(
            f"--over {text}: {field} cannot vary: it changes the data, the tokens or the steps of a run, or does not "
            f"decide its loss. Fields of {', '.join(VARIABLE)} can vary, except {' and '.join(FIXED)}"
        )
    kinds = _kinds(hints[field])
    if tuple in kinds:
        raise UserError(f"--over {text}: {field} cannot vary: it is a list")
    is_range = ".." in values and not kinds.isdisjoint((int, float))
    words = values.split("..", 1) if is_range else values.split(",")
    try:
        found = tuple(check_value(field, _parse_word(word.strip(), kinds), hints[field]) for word in words)
        if is_range and (None in found or not found[0] < found[1]):
            raise UserError("needs LOW below HIGH")
        if not is_range and len(set(found)) < max(2, len(found)):
            raise UserError("needs two or more different choices, or a range of numbers, LOW..HIGH")
    except UserError as e:
        raise UserError(f"--over {text}: {e}") from None
    return Axis(field=field, low=found[0], high=found[1]) if is_range else Axis(field=field, choices=found)


def _kinds(hint: Any) -> set[type]:
    """Return the plain types that an annotation allows."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kinds(arguments[0])
    if origin in (Union, UnionType):
        return set().union(*map(_kinds, arguments))
    return {str} if origin is Literal else {origin or hint}


def _parse_word(word: str, kinds: set[type]) -> Any:
    """Return the value that a word means; the word itself if it means none, for `check_value` to refuse."""
    if word == "None" and NoneType in kinds:
        return None
    if bool in kinds:
        return {"true": True, "false": False}.get(word.lower(), word)
    try:
        number = float(word)
    except ValueError:
        return word
    if float in kinds:
        return number
    return int(number) if int in kinds and number.is_integer() else word


def draw_points(axes: Sequence[Axis], trials: int, seed: int) -> list[dict[str, Any]]:
    """Return the points of a sweep, {field: value}, without repetitions.

    One field: spread evenly. Several: a scrambled Halton sequence (Owen 2017, arXiv:1706.02808), which covers each
    field as evenly as its own sweep would.

    Args:
        axes: the swept fields.
        trials: number of points. Fewer are returned where whole numbers or choices repeat.
        seed: of the sequence.
    """
    if len(axes) == 1:
        shares = (np.arange(trials)[:, None] + 0.5) / trials
    else:
        from scipy.stats import qmc  # a dependency of jax; takes 2 s to import

        shares = qmc.Halton(len(axes), scramble=True, seed=np.random.default_rng(seed)).random(trials)
    points = [tuple(axis.at(share) for axis, share in zip(axes, row, strict=True)) for row in shares.tolist()]
    return [dict(zip([axis.field for axis in axes], point, strict=True)) for point in dict.fromkeys(points)]


def with_values(experiment: Experiment, point: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other values of some fields: `{"optim.learning_rate": 1e-3}`."""
    changed: dict[str, dict[str, Any]] = {}
    for field, value in point.items():
        section, _, name = field.partition(".")
        changed.setdefault(section, {})[name] = value
    sections: dict[str, Any] = {
        section: dataclasses.replace(getattr(experiment, section), **values) for section, values in changed.items()
    }
    return dataclasses.replace(experiment, **sections)


def describe_point(point: Mapping[str, Any]) -> str:
    """Return a point in words: `optim.learning_rate=0.001`."""
    return ", ".join(f"{field}={value}" for field, value in point.items())
