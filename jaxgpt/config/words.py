"""Fields of configurations in words: values that are typed, names with dots, and comments."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

from jaxgpt.config.validate import alternatives, check_value

T = TypeVar("T")


def plain_types(hint: Any) -> list[Any]:
    """Return the types that an annotation allows, without bounds: a `Literal` counts as the text that it is."""
    return [str if get_origin(each) is Literal else get_origin(each) or each for each in alternatives(hint)]


def parse_value(name: str, word: str, hint: Any) -> Any:
    """Return the value that a word means for an annotation. Raises `UserError` as `check_value` does."""
    kinds = plain_types(hint)
    value: Any = word
    if word == "None" and types.NoneType in kinds:
        value = None
    elif bool in kinds:
        value = {"true": True, "false": False}.get(word.lower(), word)
    elif int in kinds or float in kinds:
        value = _parse_number(word, kinds)
    return check_value(name, value, hint)


def _parse_number(word: str, kinds: list[Any]) -> int | float | str:
    """Return the number of a word, whole if only those are allowed: 1e3 is 1000. Any other word stays."""
    with contextlib.suppress(ValueError):
        if int in kinds:
            return int(word)
    with contextlib.suppress(ValueError):
        number = float(word)
        if float in kinds:
            return number
        if number.is_integer():
            return int(number)
    return word


def replace_fields(config: T, values: dict[str, Any]) -> T:
    """Return a configuration with the values of some fields, and of fields in them: {"name": "x", "model.n_layer": 3}."""
    parts = {}
    for path, value in values.items():
        field, _, inner = path.partition(".")
        parts.setdefault(field, {})[inner] = value
    changed = {
        field: given[""] if "" in given else replace_fields(getattr(config, field), given)
        for field, given in parts.items()
    }
    return dataclasses.replace(config, **changed)  # type: ignore[bad-specialization]


def field_comments(cls: type) -> dict[str, str]:
    """Return what is said of each field of a class: beside or above it, or of the field in the line before."""
    found = {}
    for base in reversed(cls.__mro__):
        if not inspect.get_annotations(base):
            continue
        source, definition = _find_definition(base)
        lines, text, last = source.splitlines(), "", 0
        fields: list[Any] = [node for node in definition.body if isinstance(node, ast.AnnAssign)]
        for node in fields:
            beside = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            above = itertools.takewhile(lambda line: line.lstrip().startswith("#"), reversed(lines[: node.lineno - 1]))
            said = [beside] if "#" in beside else [*above][::-1]
            if said or node.lineno > last + 1:
                text = " ".join(" ".join(said).replace("#:", " ").replace("# ", " ").split())
            found[node.target.id], last = text, node.end_lineno
    return found


def _find_definition(cls: type) -> tuple[str, ast.ClassDef]:
    """Return a text that has the definition of a class, and the definition."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except OSError:  # Python 3.13 forgets the line of a class whose `__module__` is set, as runs.code does
        source = Path(inspect.getfile(cls)).read_text(encoding="utf-8")
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return source, next(node for node in classes if node.name == cls.__name__)
