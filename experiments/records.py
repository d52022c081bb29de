"""Run an entry of the track "Fewest steps" of RECORDS.md: train 20 seeds, audit every step, compare with the last record.

Question    does an optimiser reach 1.88 in so many steps, and is it better than the last record's with as many?
Reference   rules 1 to 5 of RECORDS.md. The model, the text and the batch come from laptop/base.py.
Command     python experiments/records.py EXPERIMENT.py[:NAME] --data.path shakespeare.txt --steps N
                --out experiments/results/records/NAME.json [--against EXPERIMENT.py[:NAME]] [--seeds 20] [--on local:2]
            python experiments/records.py check experiments/RECORDS.md
Method      an experiment gets N steps, with its complete schedule within them. The whole validation split is measured
            after the last step. `jaxgpt audit` then recomputes all steps, from the seed. The experiment after --against
            is trained with the same steps and seeds, and not audited. Seconds count the steps, without
            compilation and validation.
Result      the file after --out, written again after each audit, and a row for the table of RECORDS.md. `check` trains
            nothing: it compares each row with its file and with the rules. Exit status 1: an entry breaks one.

Runs stay in runs/records/NAME/SEED, and in runs/records/NAME-against/SEED. A complete run is not trained again, and an
audit that the file has is not repeated on the same processor with the same versions.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.metadata
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt import Experiment, UserError
from jaxgpt.cli.console import report_errors, say, show
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import differences
from jaxgpt.config.words import replace_fields
from jaxgpt.data.corpus import CORPORA
from jaxgpt.errors import first_line
from jaxgpt.files import read_bytes, read_json, render_json, sha256, write_whole
from jaxgpt.runs.code import run_file
from jaxgpt.runs.resume import CHANGEABLE
from jaxgpt.statistics import paired_p_values
from jaxgpt.tools.executor import Workers, open_executor
from jaxgpt.tools.grid import train_grid
from jaxgpt.tools.replay import audit

HERE = Path(__file__).resolve().parent
BASE = f"{HERE / 'laptop/base.py'}"  # its model, text and batch are fixed
MARK, SEEDS, LEVEL = 1.88, 20, 1e-3  # nats per token to reach, runs of an entry, and level of each test
COLUMNS = "date|entry|steps|loss (sd)|p of the mark|p against the last record|seconds (sd)|processor|data".split("|")
HEAD = f"| {' | '.join(COLUMNS)} |"
LARGEST = 2**20  # bytes of a file
TEXT = CORPORA["shakespeare"].sha256
# Prefixes of the fields that rule 1 leaves free, and of those that decide no result.
FREE = (*CHANGEABLE, "optim.", "model.residual_init", "train.steps", "train.seed", "train.eval_tokens")


def name_of(named: str) -> str:
    """Return the name of an experiment in the files of the track: its path in the repository, and the name in it."""
    file, colon, attribute = named.partition(".py:")
    path = Path(f"{file}.py" if colon else named).resolve()
    inside = path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else str(path)
    return f"{inside}:{attribute}" if colon else inside


def load_entry(named: str, text: str | None, steps: int) -> Experiment:
    """Return an experiment with as many steps, validated after the last one. Raises `UserError` if it breaks rule 1."""
    experiment, base = load_experiment(named), load_experiment(BASE)
    changed = {field: values for field, values in differences(base, experiment).items() if not field.startswith(FREE)}
    smoothing = [e.optim.label_smoothing for e in (base, experiment)]  # of the objective, though in OptimConfig
    if smoothing[0] != smoothing[1]:
        changed["optim.label_smoothing"] = smoothing
    if changed:
        listed = ", ".join(f"{field} {ours} -> {theirs}" for field, (ours, theirs) in changed.items())
        raise UserError(f"{named} is another task than {name_of(BASE)}: {listed}. Only its optimiser may differ")
    if text is not None and sha256(text) != TEXT:
        raise UserError(
            f"{text} is not Tiny Shakespeare: its SHA-256 is not {TEXT}. Leave --data.path out to download it"
        )
    every = {"train.log_every": 1, "train.eval_every": steps + 1, "train.checkpoint_every": steps + 1}
    values = {"train.steps": steps, "train.eval_tokens": None, "train.sample_tokens": 0, "data.path": text}
    return replace_fields(experiment, every | values | {"data.corpus": base.data.corpus})


def run_entry(
    named: str, *, text: str | None, steps: int, out: Path, against: str | None, seeds: int, runs: Path, on: str | None
) -> dict[str, Any]:
    """Train all seeds, then audit them, writing the file after each. Return what it holds."""
    entry = load_entry(named, text, steps)
    last = None if against is None else load_entry(against, text, steps)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxgpt")}
    processor = run_file(HERE / "benchmarks/processor.py").describe_processor()
    where = {"experiment": name_of(named), "steps": steps, "mark": MARK, "processor": processor, "versions": versions}
    known = read_json(out, LARGEST) if out.exists() else {"runs": []}
    audited = {run["seed"]: run for run in known["runs"] if where == {name: known.get(name) for name in where}}
    found: dict[str, Any] = where | {"date": datetime.date.today().isoformat(), "runs": [], "against": None}
    grid = [
        (f"seed {seed}, {name}", replace_fields(experiment, {"train.seed": seed}), runs / name / str(seed))
        for seed in range(seeds)
        for name, experiment in ((out.stem, entry), (f"{out.stem}-against", last))
        if experiment is not None
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    with open_executor(Workers(on=on), runs.absolute()) as executor:
        trained: dict[str, list[dict[str, Any]]] = {out.stem: [], f"{out.stem}-against": []}
        for (name, _, place), curve in zip(grid, train_grid(grid, say, executor=executor), strict=True):
            if curve.failure:
                raise UserError(f"{name}: {curve.failure}, and an entry needs all its seeds")
            run = {"seed": int(place.name), "val_loss": curve.losses[-1], "seconds": curve.seconds[-1]}
            trained[place.parent.name].append(run)
        ours, others = trained.values()
        if against is not None:
            losses = [{name: run[name] for name in ("seed", "val_loss")} for run in others]
            found["against"] = {"experiment": name_of(against), "losses": losses}
        kept = [run["seed"] for run in ours if is_same_run(run, audited.get(run["seed"]))]
        again = functools.partial(audit, steps=steps)
        places = {run["seed"]: runs / out.stem / str(run["seed"]) for run in ours if run["seed"] not in kept}
        audits = {} if executor is None else {seed: executor.submit(again, at) for seed, at in places.items()}
        for run in ours:
            seed = run["seed"]
            if seed in kept:
                found["runs"].append(audited[seed])
                continue
            result = again(places[seed]) if executor is None else audits[seed].result()
            say(str(result))
            found["runs"].append(run | {"audit": {"retaken": result.retaken, "accepted": result.accepted}})
            write_whole(out, render_json(found, indent=1) + "\n")
    write_whole(out, render_json(found, indent=1) + "\n")
    return found


def is_same_run(run: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Return whether a run is the one that the file has, audited and accepted."""
    is_same = before is not None and run == {name: before.get(name) for name in run}
    return is_same and before["audit"]["accepted"]


def check_page(page: str) -> dict[str, list[str]]:
    """Return what is wrong with each entry of the page's table, whose rows link the files of their runs."""
    path, faults, last = Path(page), {}, None
    lines = read_bytes(path, LARGEST).decode("utf-8", "replace").splitlines()
    if HEAD not in lines:
        raise UserError(f"{path} has no table of entries, whose first line is {HEAD}")
    first = lines.index(HEAD) + 2
    end = next((n for n, line in enumerate(lines) if n >= first and not line.strip()), len(lines))
    section = itertools.takewhile(lambda line: not line.startswith("#"), lines[end:])
    for number, line in enumerate(section, end + 1):
        if line.lstrip().startswith("|"):
            raise UserError(f"{path}:{number}: a row after the end of the table: remove the blank line before it")
    for number, line in enumerate(lines[first:end], first + 1):
        cells = [cell.strip() for cell in line.strip(" |").split("|")]
        place, link = f"{path}:{number}", re.search(r"\]\((.+)\)$", cells[-1])
        if len(cells) != len(COLUMNS) or link is None:
            raise UserError(f"{place}: a row needs {len(COLUMNS)} cells, the last one a link to the file of the runs")
        if not line.isprintable():
            raise UserError(f"{place}: {line!r} has characters that cannot be printed")
        record = read_json(file := path.parent / link[1], LARGEST)
        try:
            with np.errstate(invalid="raise", over="raise"):  # from numbers that are not finite
                faults[f"{place}: {cells[1]}"] = find_faults(record, cells, last)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise UserError(f"{place}: {file} is damaged: {type(e).__name__}: {first_line(e)}") from None
        last = record
    return faults


def find_faults(record: Any, cells: list[str], last: Any) -> list[str]:
    """Return what is wrong with an entry. last: the record before it. Errors of many types say that a record is damaged."""
    runs, steps, seeds = record["runs"], record["steps"], list(range(SEEDS))
    unaudited = [run["seed"] for run in runs if run["audit"] != {"retaken": steps, "accepted": True}]
    p_mark, p_against = p_values(record)
    rows = zip(COLUMNS, cells, format_cells(record, entry=cells[1], data=cells[-1]), strict=True)
    rules = {f"{name} is {cell} in the table, {value} in its file": cell == value for name, cell, value in rows}
    rules |= {
        f"its steps are {steps!r}, not a whole number from 1": type(steps) is int and steps >= 1,
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


def p_values(record: dict[str, Any]) -> list[float]:
    """Return one-sided p-values: the losses are below the mark, and below the last record's. NaN means no losses of it."""
    losses = {run["seed"]: run["val_loss"] for run in record["runs"]}
    others = {run["seed"]: run["val_loss"] for run in (record["against"] or {"losses": []})["losses"]}
    both = [loss - MARK for loss in losses.values()], [losses[seed] - others[seed] for seed in losses if seed in others]
    two_sided = [float(paired_p_values(x)) if x else np.nan for x in both]
    return [p / 2 if sum(x) < 0 else 1 - p / 2 for x, p in zip(both, two_sided, strict=True)]


def format_cells(record: dict[str, Any], *, entry: str, data: str) -> list[str]:
    """Return a record as a row of the table. entry: its name. data: the link to its file."""
    tests = ["none" if np.isnan(p) else f"{p:.1e}" for p in p_values(record)]
    loss, seconds = ([run[name] for run in record["runs"]] for name in ("val_loss", "seconds"))
    loss, seconds = (f"{np.mean(x):.{n}f} ({np.std(x, ddof=1):.{n}f})" for x, n in ((loss, 4), (seconds, 1)))
    return [record["date"], entry, f"{record['steps']}", loss, *tests, seconds, record["processor"], data]


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status 2: the user's mistake, in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="FILE.py or FILE.py:NAME")
    parser.add_argument("--data.path", dest="text", help="the file of Tiny Shakespeare, which is downloaded otherwise")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, whose name is the name of the runs")
    parser.add_argument("--against", help="the last record's experiment")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"fewer than {SEEDS} are no entry")
    parser.add_argument(
        "--on", help="local:N or ray, as for `jaxgpt study`. Seconds of runs that share a machine are longer"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/records"), help="the directory of the runs")
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["check"] and len(words) == 2:
        with report_errors():
            faults = check_page(words[1])
            lines = [f"{entry}: {'; '.join(wrong) or 'valid'}" for entry, wrong in faults.items()]
            show("\n".join(line if line.isprintable() else repr(line) for line in lines) or "There is no entry.")
        sys.exit(any(faults.values()))
    given = vars(parser.parse_args(words))
    with report_errors():
        found = run_entry(given.pop("experiment"), **given)
        link = f"[{given['out'].name}]({os.path.relpath(given['out'].resolve(), HERE)})"
        cells = format_cells(found, entry=f"`{found['experiment']}`", data=link)
        show(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
