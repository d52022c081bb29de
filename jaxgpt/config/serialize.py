"""Read configurations from JSON values, write them as such, and compare them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from jaxgpt.config.validate import check_fields, field_hints, short
from jaxgpt.errors import UserError

T = TypeVar("T")

# Fields that earlier versions wrote, and what to take for a value that is neither 0 nor null. "" means nothing.
GONE = {
    "n_encoder_layer": "models with an encoder are experiments/transformer_2017",
    "skip_spikes": "no spike is skipped from now on, but by the optimizer of experiments/zoo/skip_spikes.py",
    "log_layers": "the norms of layers are logged by an OptimConfig.metrics of your own",
    **dict.fromkeys(("check_replicas_every", "watchdog", "loss_kernel"), ""),
}


class Checked:
    """The base of all configurations. Their fields are checked: names when a class is defined, values at construction."""

    def __init_subclass__(cls) -> None:
        """Check the names of a class that is not ours. Raises `UserError`."""
        if not cls.__module__.startswith("jaxgpt."):
            check_names(cls)

    def __post_init__(self) -> None:
        """Check the values. A subclass that checks more calls this first."""
        check_fields(self)
        if not type(self).__module__.startswith("jaxgpt."):  # ours hold only what JSON can
            to_dict(self)


def check_json(name: str, value: Any) -> None:
    """Raise `UserError` for a value that experiment.json cannot hold. A configuration has been checked itself."""
    if isinstance(value, tuple):
        for each in value:
            check_json(name, each)
    elif not (isinstance(value, str | int | float | None) or dataclasses.is_dataclass(value)):
        needed = "a number, a text, true or false, None, or a tuple of them"
        raise UserError(f"{name}={short(value)}: experiment.json needs {needed}")


def to_dict(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration as JSON values, with the name of each class that is not ours as "class"."""
    cls = type(config)
    values: dict[str, Any] = {} if cls.__module__.startswith("jaxgpt.") else {"class": class_name(cls)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        check_json(f"{cls.__name__}.{field.name}", value)
        values[field.name] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return values


def check_names(cls: type) -> None:
    """Raise `UserError` for a field of a configuration that hides a method or a property, and for what hides a field."""
    annotated = inspect.get_annotations(cls)
    for base, name in itertools.product(cls.__mro__[1:], (*annotated, *vars(cls))):
        old, new = vars(base).get(name), vars(cls).get(name)
        is_value = not (callable(new) or hasattr(new, "__get__") or isinstance(old, property))
        is_hidden = hasattr(old, "__get__") and (name in annotated or is_value)
        if name in getattr(base, "__dataclass_fields__", ()):
            is_hidden = name not in annotated  # dataclasses would ignore it
        if is_hidden:
            hidden = f"{base.__name__}.{name}{'()' * callable(old)}"
            raise UserError(f"{cls.__name__}.{name} hides {hidden}: give it another name, or a field its type")


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question that names the known word with the closest spelling, or an empty text if there is none."""
    found = difflib.get_close_matches(word[:80], list(known), n=1)
    return f" (did you mean {found[0]}?)" if found else ""


def from_dict(
    cls: type[T], values: Any, where: str = "", *, find_class: Callable[[type, str], type] | None = None
) -> T:
    """Build a configuration from the result of `to_dict`. `where` precedes field names in messages.

    `values` may be anything that `json.load` returns. It need not be trusted. Raises `UserError` for unknown keys, missing
    fields and wrong types.

    find_class: returns the subclass of a class by its name, for classes that are not ours. None means there are none.
    """
    if not isinstance(values, dict):
        raise UserError(f"{where or cls.__name__}: got {type(values).__name__}, needs an object")
    if (name := values.get("class")) is not None:
        if find_class is None or not isinstance(name, str) or ":" not in name:
            raise UserError(f"{where}class={short(name)}: needs the name of a class in the run's own code")
        found: Any = find_class(cls, name)
        cls, values = found, {key: x for key, x in values.items() if key != "class"}
    if where.endswith("train.") and values.get("attention") == "xla":  # which earlier versions had
        values = values | {"attention": "plain"}
    hints, arguments = field_hints(cls), {}
    for key, value in values.items():
        if key in hints and dataclasses.is_dataclass(hints[key]):
            arguments[key] = from_dict(hints[key], value, f"{where}{key}.", find_class=find_class)
        elif key in hints:
            arguments[key] = tuple(value) if isinstance(value, list) else value
        elif key not in GONE:
            raise UserError(f"unknown field {where}{key[:80]}{suggest(key, hints)}")
        elif value and key == "n_encoder_layer":
            raise UserError(f"{where}{key}={short(value)}: {GONE[key]}")
        elif value and GONE[key]:
            warnings.warn(f"{where}{key}={short(value)}: {GONE[key]}", UserWarning, stacklevel=2)
    fields: Any = dataclasses.fields(cls)  # type: ignore[bad-argument-type]
    missing = [f.name for f in fields if f.default is f.default_factory and f.name not in values]
    if missing:
        raise UserError(f"{where or cls.__name__}: missing {', '.join(missing)}")
    return cls(**arguments)


def class_name(cls: type) -> str:
    """Return the name of a class in `experiment.json`: "moe:MoEConfig". A program's own module has its file's name."""
    module = cls.__module__.partition("@")[0]
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return f"{Path(file).stem if module == '__main__' and file else module}:{cls.__qualname__}"


def differences(a: Any, b: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations differ: `{"model.n_layer": (4, 6)}`."""
    if class_name(type(a)) != class_name(type(b)):  # by name: a file that is run twice defines two classes
        return {f"{where}class": (type(a).__name__, type(b).__name__)}
    found = {}
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            found |= differences(x, y, f"{where}{field.name}.")
        elif x != y:
            found[where + field.name] = (x, y)
    return found
