"""Filter, sort and print the rows of the table of runs."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxgpt.config.validate import suggest
from jaxgpt.errors import UserError
from jaxgpt.tools.overview.rows import Row

SORTS = {"name": False, "loss": False, "size": True, "tokens": True, "speed": True, "date": True}  # True: largest first
NUMBERS, WORDS = ("size", "tokens", "loss", "speed", "step", "steps"), ("name", "status", "date", "verdict")
SUFFIXES = {"k": 1e3, "M": 1e6, "B": 1e9}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "~": fnmatch.fnmatchcase,
}
CONDITION = re.compile(r"(\w+)\s*(<=|>=|!=|=|<|>|~)\s*(.*)", re.DOTALL)
LEAST = 12  # characters to which a name or a verdict is cut
GAP = "  "


def select_rows(rows: Sequence[Row], conditions: Sequence[str], sort: str) -> list[Row]:
    """Return the rows that meet all conditions, such as "loss<1.5", sorted by a field; those without it come last.

    Raises `UserError` for a condition that cannot be read.
    """
    tests = [parse_condition(condition) for condition in conditions]
    kept = [row for row in rows if all(test(row) for test in tests)]
    known = [row for row in kept if getattr(row, sort) is not None]
    known.sort(key=lambda row: getattr(row, sort), reverse=SORTS[sort])
    return known + [row for row in kept if getattr(row, sort) is None]


def parse_condition(condition: str) -> Callable[[Row], bool]:
    """Return the test of a condition FIELD OPERATOR VALUE. A row without the field does not meet it."""
    match = CONDITION.fullmatch(condition)
    if match is None:
        raise UserError(f"--filter {condition!r}: needs FIELD, one of {' '.join(COMPARE)}, and a value: 'loss<1.5'")
    name, sign, text = match.groups()
    if name not in (*NUMBERS, *WORDS):
        known = (*WORDS, *NUMBERS)
        raise UserError(f"--filter {condition!r}: no field {name}{suggest(name, known)}. There are {', '.join(known)}")
    if name in NUMBERS and sign == "~":
        raise UserError(f"--filter {condition!r}: ~ compares {', '.join(WORDS)} with a pattern; {name} needs < or >")
    wanted = _number(condition, text) if name in NUMBERS else text

    def test(row: Row) -> bool:
        value = getattr(row, name)
        if name == "date" and sign != "~" and value is not None:
            value = value[: len(text)]  # so that date=2026-11-23 is all of that day
        return value is not None and COMPARE[sign](value, wanted)

    return test


def _number(condition: str, text: str) -> float:
    """Return the number 1.5, 1e6, 300k or 124M."""
    factor = SUFFIXES.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"--filter {condition!r}: got {text!r}, needs a number such as 1.5, 1e6, 300k or 124M")
    return value


def rows_to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as values for JSON."""
    return [dataclasses.asdict(row) for row in rows]


def format_rows(rows: Sequence[Row], width: int | None) -> str:
    """Return the table as lines of text.

    Args:
        rows: in their order.
        width: columns of the terminal; long names are cut in the middle, verdicts at their end. None cuts nothing.
    """
    head = ("run", "size", "tokens", "loss", "tokens/s", "date", "status", "verdict")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    if width is not None:
        rest = width - sum(widths[1:-1]) - len(GAP) * (len(head) - 1)
        verdict = min(widths[-1], max(LEAST, rest - widths[0]))
        widths[0], widths[-1] = min(widths[0], max(LEAST, rest - verdict)), verdict
    lines = []
    for row, (name, *numbers, date, status, verdict) in zip([None, *rows], cells, strict=True):
        line = [_cut_middle(name, widths[0]).ljust(widths[0])]
        line += [text.rjust(size) for text, size in zip(numbers, widths[1:5], strict=True)]
        line += [date.ljust(widths[5]), status.ljust(widths[6]), _cut_end(verdict, widths[7])]
        if row is not None and row.problem is not None:
            room = math.inf if width is None else width - widths[0] - len(GAP)
            line = [line[0], _cut_end(_printable(row.problem), room)]
        lines.append(GAP.join(line).rstrip())
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    """Return the columns of a row, as text."""
    status = row.status
    if status in ("training", "interrupted", "diverged"):
        status += f" {row.step}/{row.steps}"
    return (
        _printable(row.name),
        *(_short(number) for number in (row.size, row.tokens)),
        "" if row.loss is None else f"{row.loss:.4f}",
        "" if row.speed is None else f"{row.speed:,.0f}",
        (row.date or "")[:10],
        status,
        _printable(row.verdict or ""),
    )


def _short(number: int | None) -> str:
    """Return a count with four digits: 9,999 as it is, 124.4M."""
    if number is None or number < 10_000:
        return "" if number is None else f"{number:,}"
    name, factor = max(((n, f) for n, f in SUFFIXES.items() if f <= number), key=lambda pair: pair[1])
    return f"{number / factor:.4g}{name}"


def _printable(text: str) -> str:
    """Return a text from a file as one line without control characters."""
    return text if text.isprintable() else repr(text)


def _cut_middle(text: str, width: float) -> str:
    """Cut a path to a width. Its end, with the variant and the seed, distinguishes runs: it gets three quarters."""
    if len(text) <= width:
        return text
    front = (int(width) - 1) // 4
    return f"{text[:front]}…{text[len(text) - (int(width) - 1 - front) :]}"


def _cut_end(text: str, width: float) -> str:
    return text if len(text) <= width else f"{text[: int(width) - 1]}…"
