"""Measure the validation curves of an experiment over five seeds, for `jaxgpt report` to compare a run with.

Command     python experiments/bands.py quickstart experiments/sancho_mini.py ... [--seeds 5] [--runs DIR]
Result      jaxgpt/tools/report/bands/NAME.json: for each validation the mean over the seeds and the interval in which a
            further run's loss is expected with 95% probability, by Student's t.

Runs stay in --runs. A complete run is not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from importlib import metadata
from pathlib import Path

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.files import write_whole
from jaxgpt.parallel.device import device_kind
from jaxgpt.runs.directory import is_run, read_metadata
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.session import fit
from jaxgpt.tools.report.reference_band import fit_band, render_band

BANDS = Path(__file__).parent.parent / "jaxgpt/tools/report/bands"


def curve(directory: Path) -> list[tuple[int, float]]:
    """Return the validation losses of a run, as (step, loss)."""
    return finite_values(read_metrics(directory / "metrics.jsonl"), "val_loss")


def make(named: str, runs: Path, seeds: int, out: Path = BANDS) -> Path:
    """Train the seeds that are missing, write the band, and return its path."""
    experiment, curves = load_experiment(named), []
    for seed in range(seeds):
        place = runs / experiment.name / f"seed-{seed}"
        seeded = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, seed=seed))
        if not is_run(place) or max([step for step, _ in curve(place)], default=0) < experiment.train.steps:
            fit(seeded, place, progress=False)
        curves.append(curve(place))
        print(f"{experiment.name}, seed {seed}: {curves[-1][-1][1]:.4f}", file=sys.stderr, flush=True)
    made = {
        "date": datetime.date.today().isoformat(),
        "device": device_kind(),
        "last": [losses[-1][1] for losses in curves],
        "versions": {name: metadata.version(name) for name in ("jaxgpt", "jax", "flax", "optax")},
    }
    out.mkdir(exist_ok=True)
    path = out / f"{experiment.name}.json"
    write_whole(path, render_band(read_metadata(runs / experiment.name / "seed-0"), fit_band(curves), made))
    return path


def main(argv: list[str] | None = None) -> list[Path]:
    """Write the bands of the experiments named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", help="names of built-in experiments, or files")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--runs", type=Path, default=Path("runs/bands"))
    parser.add_argument("--out", type=Path, default=BANDS)
    options = parser.parse_args(argv)
    return [make(named, options.runs, options.seeds, options.out) for named in options.experiments]


if __name__ == "__main__":
    main()
