"""Fields of dataclasses, NamedTuples and TypedDicts for the API reference: type in words, default and meaning."""

import dataclasses
import inspect
import re
import sys
import types
from typing import Annotated, Literal, Union, get_args, get_origin, is_typeddict

from jax.typing import DTypeLike

from jaxgpt.config.words import field_comments  # what `--help` reads

BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def shorten_paths(text):
    """Leave the last part of each dotted name: jax.Array is Array."""
    return re.sub(r"~?\b(?:\w+\.)+(?=[A-Za-z_])", "", text)


def describe_type(hint):
    """Return an annotation in words, as RST: "int from 1 to 16,384 or None"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint == DTypeLike:
        return "dtype"
    if origin is Annotated:
        given = {key: bound for key, bound in arguments[1]._asdict().items() if bound is not None}
        bounds = [
            BOUNDS[key].format(f"{bound:{',' if isinstance(bound, int) else 'g'}}") for key, bound in given.items()
        ]
        return f"{describe_type(arguments[0])} {' '.join(bounds)}"
    if origin is Literal:
        return f"one of {', '.join(f'``{value!r}``' for value in arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe_type, arguments))
    if origin in (tuple, list) and len(set(arguments) - {...}) == 1:
        return f"{origin.__name__} of {describe_type(arguments[0])}"
    if origin is not None or not isinstance(hint, type):
        return f"``{shorten_paths(hint if isinstance(hint, str) else str(hint))}``"
    name = {float: "number", type(None): "None"}.get(hint, hint.__name__)
    return name if hint.__module__ == "builtins" else f"`.{name}`"  # with a dot: wherever it is defined


def describe_default(field):
    """Return a field's default in words, as RST."""
    default, missing = field.default, dataclasses.MISSING
    if getattr(field, "default_factory", missing) is not missing:
        return f"default ``{field.default_factory.__name__}()``"
    if default is missing:
        return "required"
    if default is inspect.Parameter.empty:
        return "optional"
    if callable(default):  # a function or a dtype
        name = getattr(default, "__qualname__", None) or default.dtype.name
        return "default a function" if "<" in name else f"default ``{name}``"
    return f"default ``{type(default).__name__}()``" if hasattr(default, "_fields") else f"default ``{default!r}``"


def find_fields(cls):
    """Return the fields of a dataclass, NamedTuple or TypedDict without required keys, with name and default."""
    if is_typeddict(cls):
        return [types.SimpleNamespace(name=name, default=inspect.Parameter.empty) for name in cls.__annotations__]
    if hasattr(cls, "_field_defaults"):
        missing = dataclasses.MISSING
        return [
            types.SimpleNamespace(name=name, default=cls._field_defaults.get(name, missing)) for name in cls._fields
        ]
    if not dataclasses.is_dataclass(cls):
        return []
    of_linen = ("parent", "name") if hasattr(cls, "setup") else ()
    return [field for field in dataclasses.fields(cls) if field.init and field.name not in of_linen]


def find_meaning(cls, name):
    """Return what the comment of a field says, as `--help` does, in RST.

    Without one, what a docstring of flax says of it, or the class of its value.
    """
    hint = find_hint(cls, name)
    listed = re.search(rf"^  {name}: (.*(?:\n {{4,}}.*)*)", "\n".join(map(str, map(inspect.getdoc, cls.__mro__))), re.M)
    of_class = hint.__doc__ if inspect.isclass(hint) and hint.__module__ != "builtins" else ""
    meaning = field_comments(cls)[name] or (listed and listed[1]) or of_class
    parts = re.split(r"(`[^`]*`)", (meaning or "").partition("\n\n")[0])
    text = "".join(part if n % 2 else re.sub(r"([\\*|_])", r"\\\1", part) for n, part in enumerate(parts))
    text = re.sub(r"--[\w.-]*\w", r"``\g<0>``", text)
    return re.sub(r"arXiv:([\d.]+\d)", r"`arXiv:\1 <https://arxiv.org/abs/\1>`__", " ".join(text.split()))


def find_hint(cls, name):
    """Return the annotation of a field: as it is written, where a type is imported for type checkers only."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    hint = inspect.get_annotations(owner)[name]
    hint = getattr(hint, "__forward_arg__", hint)
    try:
        return eval(hint, vars(sys.modules[owner.__module__])) if isinstance(hint, str) else hint
    except NameError:
        return hint


def list_fields(cls):
    """Return the lines of a list of a class's fields in RST: name, type and default, and below them the meaning."""
    lines = [".. rubric:: Fields", ""]
    # A class of the experiments is listed with its own fields, beside the class of jaxgpt that it extends.
    is_ours = cls.__module__.startswith("jaxgpt.")
    own = [field for field in find_fields(cls) if is_ours or field.name in inspect.get_annotations(cls)]
    for field in own:
        kind = f"{describe_type(find_hint(cls, field.name))}, {describe_default(field)}"
        lines += [f"``{field.name}`` : {kind}", f"   {find_meaning(cls, field.name)}"]
    return (
        lines
        if len(own) == len(find_fields(cls))
        else [*lines, "", f"It also has the fields of `.{cls.__base__.__name__}`."]
    )


def list_number_types():
    """Return the lines of a table of the types of numbers, as configurations bound them, in Markdown."""
    from jaxgpt.config import validate

    found = vars(validate).items()
    rows = [f"| `{name}` | {describe_type(hint)} |" for name, hint in found if get_origin(hint) is Annotated]
    return ["| type | numbers |", "|---|---|", *rows]
