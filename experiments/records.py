"""Run an entry of the track "Fewest steps" of RECORDS.md: train 20 seeds, audit every step, compare with the last record.

Question    does an optimiser reach 1.88 in so many steps, and is it better than the last record's with as many?
Reference   rules 1 to 5 of RECORDS.md. The model, the text and the batch come from laptop/base.py.
Command     python experiments/records.py EXPERIMENT.py[:NAME] --data.path shakespeare.txt --steps N
                --out experiments/results/records/NAME.json [--against EXPERIMENT.py[:NAME]] [--seeds 20]
            jaxgpt records check experiments/RECORDS.md
Method      an experiment gets N steps, with its complete schedule within them. The whole validation split is measured
            after the last step. `jaxgpt audit` then takes all steps again, from the seed. The experiment after --against
            is trained with the same steps and seeds, and not audited. Seconds count the steps, without
            compilation and validation.
Result      the file after --out, written again after each seed, and a row for the table of RECORDS.md.

Runs stay in runs/records/NAME/SEED, and in runs/records/NAME-against/SEED. A complete run is not trained again, and an
audit that the file has is not repeated on the same processor with the same versions.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from jaxgpt import Experiment, UserError, fit
from jaxgpt.cli.console import report_errors, say, show
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config import differences
from jaxgpt.data.corpus import CORPORA
from jaxgpt.files import read_json, render_json, sha256, write_whole
from jaxgpt.runs.code import run_file
from jaxgpt.runs.training import CHANGEABLE
from jaxgpt.tools.grid import read_curve, with_values
from jaxgpt.tools.records import LARGEST, MARK, SEEDS, format_cells
from jaxgpt.tools.replay import audit

HERE = Path(__file__).resolve().parent
BASE = f"{HERE / 'laptop/base.py'}"  # its model, text and batch are fixed
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
    return with_values(experiment, every | values | {"data.corpus": base.data.corpus})


def train(experiment: Experiment, directory: Path, seed: int) -> dict[str, Any]:
    """Train a seed, or read it if it is complete. Return {"seed", "val_loss" after the last step, "seconds"}."""
    fit(with_values(experiment, {"train.seed": seed}), directory / str(seed), progress=False, extend=False)
    curve = read_curve(directory / str(seed), experiment)
    return {"seed": seed, "val_loss": curve.losses[-1], "seconds": curve.seconds[-1]}


def run_entry(
    named: str, *, text: str | None, steps: int, out: Path, against: str | None, seeds: int, runs: Path
) -> dict[str, Any]:
    """Train, audit and compare all seeds, writing the file after each. Return what it holds."""
    entry = load_entry(named, text, steps)
    last = None if against is None else load_entry(against, text, steps)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxgpt")}
    processor = run_file(HERE / "benchmarks/processor.py").describe_processor()
    where = {"experiment": name_of(named), "steps": steps, "mark": MARK, "processor": processor, "versions": versions}
    known = read_json(out, LARGEST) if out.exists() else {"runs": []}
    audited = {run["seed"]: run for run in known["runs"] if where == {name: known.get(name) for name in where}}
    found: dict[str, Any] = where | {"date": "", "runs": [], "against": None}
    if against is not None:
        found["against"] = {"experiment": name_of(against), "losses": []}
    out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        run, before = train(entry, runs / out.stem, seed), audited.get(seed, {})
        if run == {name: before.get(name) for name in run} and before["audit"]["accepted"]:
            run = before
        else:
            again = audit(runs / out.stem / str(seed), steps=steps)
            run["audit"] = {"retaken": again.retaken, "accepted": again.accepted}
            if not again.accepted:
                say(str(again))
        found["runs"].append(run)
        line = f"seed {seed}: {run['val_loss']:.4f} in {run['seconds']:.1f} s"
        if last is not None:
            other = train(last, runs / f"{out.stem}-against", seed)
            found["against"]["losses"].append({name: other[name] for name in ("seed", "val_loss")})
            line += f", and {other['val_loss']:.4f} by {found['against']['experiment']}"
        found["date"] = datetime.date.today().isoformat()
        if run is not before or seed == seeds - 1:  # until then the file has all of these runs
            write_whole(out, render_json(found, indent=1) + "\n")
        say(line)
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Exit status 2: the user's mistake, in a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", help="FILE.py or FILE.py:NAME")
    parser.add_argument("--data.path", dest="text", help="the file of Tiny Shakespeare, which is downloaded otherwise")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file, whose name is the name of the runs")
    parser.add_argument("--against", help="the last record's experiment")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"fewer than {SEEDS} are no entry")
    parser.add_argument("--runs", type=Path, default=Path("runs/records"), help="the directory of the runs")
    given = vars(parser.parse_args(argv))
    with report_errors():
        found = run_entry(given.pop("experiment"), **given)
        link = f"[{given['out'].name}]({os.path.relpath(given['out'].resolve(), HERE)})"
        cells = format_cells(found, entry=f"`{found['experiment']}`", data=link)
        show(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
