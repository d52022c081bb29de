"""Check the entries of the track of fewest steps: the rules of the track, and what its table says of the runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxgpt.errors import UserError, first_line
from jaxgpt.files import Result, read_bytes, read_json
from jaxgpt.statistics import paired_p_values

MARK, SEEDS, LEVEL = 1.88, 20, 1e-3  # nats per token to reach, runs of an entry, and level of each test
COLUMNS = "date|entry|steps|loss (sd)|p of the mark|p against the last record|seconds (sd)|processor|data".split("|")
HEAD = f"| {' | '.join(COLUMNS)} |"
LARGEST = 2**20  # bytes of a file


def records(page: tuple[Literal["check"], str]) -> Result:
    """Check the records of fewest training steps.

    Each row of the table links the file of its runs. Exit status 1: an entry breaks a rule.

    Args:
        page: the word check, and the page with the table, such as experiments/RECORDS.md
    """
    path, faults, last = Path(page[1]), {}, None
    lines = read_bytes(path, LARGEST).decode("utf-8", "replace").splitlines()
    if HEAD not in lines:
        raise UserError(f"{path} has no table of entries, whose first line is {HEAD}")
    first = lines.index(HEAD) + 2
    for number, line in enumerate(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]), first + 1):
        cells = [cell.strip() for cell in line.strip(" |").split("|")]
        place, link = f"{path}:{number}", re.search(r"\]\((.+)\)$", cells[-1])
        if len(cells) != len(COLUMNS) or link is None:
            raise UserError(f"{place}: a row needs {len(COLUMNS)} cells, the last one a link to the file of the runs")
        record = read_json(file := path.parent / link[1], LARGEST)
        try:
            with np.errstate(invalid="raise", over="raise"):  # from numbers that are not finite
                faults[f"{place}: {cells[1]}"] = _find_faults(record, cells, last)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise UserError(f"{place}: {file} is damaged: {type(e).__name__}: {first_line(e)}") from None
        last = record
    lines = [f"{entry}: {'; '.join(wrong) or 'valid'}" for entry, wrong in faults.items()]
    return Result(faults, "\n".join(lines) or "There is no entry.", accepted=not any(faults.values()))


def _find_faults(record: Any, cells: list[str], last: Any) -> list[str]:
    """Return what is wrong with an entry. last: the record before it. Errors of many types say that a record is damaged."""
    runs, steps, seeds = record["runs"], record["steps"], list(range(SEEDS))
    unaudited = [run["seed"] for run in runs if run["audit"] != {"retaken": steps, "accepted": True}]
    p_mark, p_against = _p_values(record)
    rows = zip(COLUMNS, cells, format_cells(record, entry=cells[1], data=cells[-1]), strict=True)
    rules = {f"{name} is {cell} in the table, {value} in its file": cell == value for name, cell, value in rows}
    rules |= {
        f"its seeds are not 0 to {SEEDS - 1}, each once": sorted(run["seed"] for run in runs) == seeds,
        f"seeds {unaudited}: not every step is audited and right": not unaudited,
        f"its mean loss is not below {MARK} at p < {LEVEL}": p_mark < LEVEL,
    }
    if last is not None:
        against = record["against"] or {"experiment": None, "losses": []}
        rules |= {
            "the last record has no more steps": steps < last["steps"],
            "against is not the last record's experiment": against["experiment"] == last["experiment"],
            "against has other seeds": sorted(run["seed"] for run in against["losses"]) == seeds,
            f"the last record is not worse at p < {LEVEL}": p_against < LEVEL,
        }
    return [fault for fault, is_kept in rules.items() if not is_kept]


def _p_values(record: dict[str, Any]) -> list[float]:
    """Return one-sided p-values: the losses are below the mark, and below the last record's. NaN means no losses of it."""
    losses = {run["seed"]: run["val_loss"] for run in record["runs"]}
    others = {run["seed"]: run["val_loss"] for run in (record["against"] or {"losses": []})["losses"]}
    both = [loss - MARK for loss in losses.values()], [losses[seed] - others[seed] for seed in losses if seed in others]
    two_sided = [float(paired_p_values(x)) if x else np.nan for x in both]
    return [p / 2 if sum(x) < 0 else 1 - p / 2 for x, p in zip(both, two_sided, strict=True)]


def format_cells(record: dict[str, Any], *, entry: str, data: str) -> list[str]:
    """Return a record as a row of the table. entry: its name. data: the link to its file."""
    tests = ["none" if np.isnan(p) else f"{p:.1e}" for p in _p_values(record)]
    loss, seconds = ([run[name] for run in record["runs"]] for name in ("val_loss", "seconds"))
    loss, seconds = (f"{np.mean(x):.{n}f} ({np.std(x, ddof=1):.{n}f})" for x, n in ((loss, 4), (seconds, 1)))
    return [record["date"], entry, f"{record['steps']}", loss, *tests, seconds, record["processor"], data]
