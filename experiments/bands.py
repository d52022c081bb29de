"""Is a run as good as this experiment has been? Reference intervals of validation losses over five seeds.

Command     python experiments/bands.py quickstart experiments/sancho_mini.py ... [--seeds 5] [--runs DIR]
            trains the seeds that are missing and writes experiments/bands/NAME.json.
            python experiments/bands.py --compare runs/mine ...
            says where the validation losses of runs lie: inside the interval of their experiment, above it, or below.
Result      for each validation step the mean over the seeds, and the interval in which the loss of one more run lies with
            95% probability: Student's t on logarithms, since losses are positive and a seed that learns late is far
            above the others. experiments/bands/ has the experiments that run on a CPU, and LOG.md a table:
            2026-11-22, "look inside, compare, translate".

Runs stay in --runs. A complete run is not trained again.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import jax
import numpy as np

from jaxgpt import Experiment, UserError, fit
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config.serialize import differences, from_dict, to_dict
from jaxgpt.runs.code import find_class_in
from jaxgpt.runs.directory import RunMetadata, read_metadata
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.runs.resume import CHANGEABLE, describe_data_changes
from jaxgpt.statistics import t_quantile
from jaxgpt.tools.grid import train_or_resume

BANDS = Path(__file__).parent / "bands"
# Prefixes of the fields that do not affect the loss curve, or that the fingerprint of the data covers.
FREE = (*CHANGEABLE, "train.seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Band:
    """The interval of the validation loss of one more run, step by step."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int

    def at(self, step: int) -> tuple[float, float] | None:
        """Return (low, high) at a step, interpolated between measured steps; None outside their range."""
        if not self.steps[0] <= step <= self.steps[-1]:
            return None
        return float(np.interp(step, self.steps, self.low)), float(np.interp(step, self.steps, self.high))


def fit_band(curves: Sequence[Sequence[tuple[int, float]]]) -> Band:
    """Return the band of runs, each [(step, validation loss), ...].

    Raises `UserError` for fewer than two runs, and for runs with validations at different steps.
    """
    steps = [step for step, _ in curves[0]]
    if any([step for step, _ in curve] != steps for curve in curves):
        raise UserError("the runs of a band need validations at the same steps")
    if len(curves) < 2:
        raise UserError(f"a band needs at least two runs, got {len(curves)}")
    losses_NS = np.array([[loss for _, loss in curve] for curve in curves])
    n, logs_NS = len(curves), np.log(losses_NS)
    margin_S = t_quantile(n - 1) * logs_NS.std(axis=0, ddof=1) * math.sqrt(1 + 1 / n)
    low_S, high_S = (np.exp(logs_NS.mean(axis=0) + sign * margin_S) for sign in (-1, 1))
    mean_S = losses_NS.mean(axis=0)
    return Band(steps=steps, mean=mean_S.tolist(), low=low_S.tolist(), high=high_S.tolist(), seeds=n)


def differing_fields(ours: Experiment, theirs: Experiment) -> list[str]:
    """Return the names of the fields that differ and that affect the loss curve."""
    return [name for name in differences(ours, theirs) if not name.startswith(FREE)]


def find_band(run: RunMetadata) -> Band:
    """Return the band of a run's experiment on its data. Raises `UserError` if there is none."""
    file, name = BANDS / f"{run.experiment.name}.json", run.experiment.name
    if not file.is_file():
        raise UserError(f"{BANDS} has no {file.name}: make it with python experiments/bands.py EXPERIMENT")
    values = json.loads(file.read_text())
    if differing := differing_fields(
        run.experiment, from_dict(Experiment, values["experiment"], find_class=find_class_in(run.experiment))
    ):
        raise UserError(f"the reference interval of {name} has another configuration: {', '.join(differing[:6])}")
    if describe_data_changes(run.data, values["data"]):
        raise UserError(f"the reference interval of {name} is for another text")
    return Band(**values["band"])


def locate(curve: Sequence[tuple[int, float]], band: Band) -> tuple[str | None, int | None]:
    """Return where a curve ends, "inside", "above" or "below" the band, and since which step, if it is not inside.

    None: it has no validation within the steps of the band.
    """
    positions: list[tuple[int, str]] = []
    for step, loss in curve:
        if (edges := band.at(step)) is not None:
            positions.append((step, "below" if loss < edges[0] else "inside" if loss <= edges[1] else "above"))
    if not positions:
        return None, None
    last = positions[-1][1]
    stretch = list(itertools.takewhile(lambda point: point[1] == last, reversed(positions)))
    return last, None if last == "inside" else stretch[-1][0]


def read_curve(directory: Path) -> list[tuple[int, float]]:
    """Return the validation losses of a run, as (step, loss)."""
    return finite_values(read_metrics(directory / "metrics.jsonl"), "val_loss")


def compare(directory: Path) -> str:
    """Return where the validation losses of a run lie, in words."""
    band = find_band(read_metadata(directory))
    place, since = locate(read_curve(directory), band)
    if place is None:
        return f"{directory}: no validation within the steps of the reference interval"
    better, begun = " (better)" if place == "below" else "", "" if since is None else f" since step {since:,}"
    return f"{directory}: {place} the reference interval of {band.seeds} seeds{better}{begun}"


def make(named: str, runs: Path, seeds: int, out: Path = BANDS) -> Path:
    """Train the seeds that are missing, write the band, and return its path."""
    experiment, curves = load_experiment(named), []
    for seed in range(seeds):
        place = runs / experiment.name / f"seed-{seed}"
        train_or_resume(
            dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, seed=seed)), place, fit
        )
        curves.append(read_curve(place))
        print(f"{experiment.name}, seed {seed}: {curves[-1][-1][1]:.4f}", file=sys.stderr, flush=True)
    first = read_metadata(runs / experiment.name / "seed-0")
    content = {
        "experiment": to_dict(first.experiment),
        "data": first.data,
        "made": {
            "date": datetime.date.today().isoformat(),
            "device": jax.devices()[0].device_kind,
            "last": [losses[-1][1] for losses in curves],
            "versions": {name: metadata.version(name) for name in ("jaxgpt", "jax", "flax", "optax")},
        },
        "band": dataclasses.asdict(fit_band(curves)),
    }
    out.mkdir(exist_ok=True)
    path = out / f"{experiment.name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def main(argv: list[str] | None = None) -> list[Path]:
    """Compare runs, or write the bands of the experiments named on the command line and return their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="names of built-in experiments, or files")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], help="run directories")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/bands"))
    parser.add_argument("--out", type=Path, default=BANDS)
    options = parser.parse_args(argv)
    if not options.experiments and not options.compare:
        parser.error("name experiments, or --compare runs")
    try:
        for directory in options.compare:
            print(compare(directory))
        return [make(named, options.runs, options.seeds, options.out) for named in options.experiments]
    except UserError as e:
        parser.exit(2, f"{parser.prog}: {e}\n")


if __name__ == "__main__":
    main()
