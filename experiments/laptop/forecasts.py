"""Forecast pull requests before their verdict: five ideas of modded-nanogpt on a small model, and what we expect of them.

Question    Five pull requests of modded-nanogpt had no verdict when they were last seen. Does a model of 384,120 parameters on a
            laptop say which of their claims hold?
Reference   github.com/KellerJordan/modded-nanogpt, pull requests 331, 351 and 359 of track 3, 346 and 360 of track 1. Each is
            an entry of ../zoo/, which says what was translated and what was left out.
Runs        Muon with the rates that its sweep found, and each idea on it: width 88, 200 steps, seeds 0 to 19, paired by
            seeds; and 800 steps with seeds 0 to 4. A shorter tail is compared with the longer one that it shortens.
            Muon alone is the baseline of the ideas in run.py, whose losses of these seeds are in ../results/laptop/.
Command     python experiments/laptop/forecasts.py train --text shakespeare.txt
            python experiments/laptop/forecasts.py train --steps 800 --text shakespeare.txt
            python experiments/laptop/forecasts.py report
            Runs go seed by seed, and what ../results/laptop/forecasts.json has is not run again.
Expected    Written before the first run, of the difference in nats after 200 steps (negative is better) and after 800.
            Longer tail against Muon: within 0.004 at both lengths, as `ema_tail.py` found.
            331, shorter tail against longer tail: between -0.002 and 0, and its sign is negative: at a rate that falls to zero
            an average only lags, and a shorter one lags less. After 800 steps within 0.002.
            351, fast-slow decay: +0.01 (0 to +0.03) after 200 steps, which are too few for a tail of half of them at a
            fifth of the rate; -0.003 (-0.012 to +0.006) after 800.
            359, K-Maxwell: +0.015 (0 to +0.04) after 200 steps, since even a momentum of 0.95 gains nothing by then and a mean
            age of 50 is a quarter of the run; 0 (-0.01 to +0.01) after 800.
            346, Ember: 0 (-0.012 to +0.012) at both lengths.
            360, sampled softmax: +0.012 (0 to +0.03) after 200 steps, and +0.008 (0 to +0.02) after 800.
Result      see ../../docs/findings/forecasts.md.
Verdict     open: see ../../docs/findings/forecasts.md.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import jaxgpt
from jaxgpt import Experiment
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.runs.code import run_file
from jaxgpt.tools.executor import Workers, open_executor
from jaxgpt.tools.study import Comparison, compare_losses

HERE = Path(__file__).resolve().parent
RUN = run_file(HERE / "run.py")
SIGNED = HERE.parent / "results" / "forecasts.json"
SEEDS = {200: range(20), 800: range(5)}
# Each arm: the entry of the zoo and what differs from it, and the arm that it is compared with.
ARMS: dict[str, tuple[str, dict[str, float], str]] = {
    "longer tail": ("tail_blend", {"tail_memory": 0.056}, "baseline"),
    "shorter tail": ("tail_blend", {}, "longer tail"),
    "fast-slow decay": ("fast_slow_decay", {}, "baseline"),
    "K-Maxwell": ("kmaxwell", {}, "baseline"),
    "Ember": ("ember", {}, "baseline"),
    "sampled softmax": ("sampled_softmax", {}, "baseline"),
}


def experiment_of(arm: str, steps: int, text: str) -> Experiment:
    """Return the experiment of an arm: the laptop's model and tuned Muon, with what the entry changes."""
    (muon,) = RUN.tuned(["muon"]).values()
    plain = RUN.experiment_of(muon, RUN.WIDTHS[0], steps, text)
    entry, change, _ = ARMS[arm]
    page = load_experiment(str(HERE.parent / "zoo" / f"{entry}.py"))
    fixed = {field.name: getattr(muon, field.name) for field in dataclasses.fields(jaxgpt.OptimConfig)}
    return dataclasses.replace(plain, optim=dataclasses.replace(page.optim, **fixed | change), objective=page.objective)


def train(steps: int, text: str, on: str | None) -> None:
    """Train all arms, and add their losses to the results after each seed."""
    with open_executor(Workers(on=on), RUN.RUNS) as executor:
        for seed in SEEDS[steps]:
            jobs = [("forecasts", [str(steps), arm], experiment_of(arm, steps, text), seed) for arm in ARMS]
            RUN.run_all(jobs, executor)


def compare(arm: str, other: str, steps: int) -> Comparison | None:
    """Compare the losses of two arms, paired by the seeds that both have. Without two such seeds: None."""
    found = RUN.read("forecasts").get(str(steps), {})
    found |= {"baseline": RUN.read("ideas").get(RUN.key_of("baseline", steps=steps), {})}
    runs = [found.get(name, {}) for name in (other, arm)]
    seeds = [str(seed) for seed in SEEDS[steps] if all(run.get(str(seed), [None])[0] for run in runs)]
    if len(seeds) < 2:
        return None
    losses = {name: [run[seed][0] for seed in seeds] for name, run in zip(("", arm), runs, strict=True)}
    return compare_losses({"": losses}, apart=np.inf)[""][1]


def report() -> str:
    """Return the differences that are known so far, with their 95% intervals, and the digest of the forecasts."""
    lines = []
    for steps in SEEDS:
        lines += [f"{steps} steps", "", "| arm | against | seeds | loss | difference |", "|---|---|---|---|---|"]
        for arm, (_, _, other) in ARMS.items():
            if row := compare(arm, other, steps):
                cells = f"{arm} | {other} | {len(row.losses)} | {np.mean(row.losses):.4f}"
                lines.append(f"| {cells} | {row.difference:+.4f} ± {row.margin:.4f} |")
        lines.append("")
    seconds = [seconds for _, seconds in RUN.list_runs(RUN.read("forecasts"))]
    spent = f"core-hours: {sum(seconds) / 3600:.2f} ({len(seconds)} runs)"
    return "\n".join([*lines, spent, *signed()])


def digest() -> str:
    """Return the SHA-256 of the forecasts as JSON with sorted keys and without spaces, so that only content counts."""
    text = json.dumps(json.loads(SIGNED.read_text()), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def signed() -> list[str]:
    """Return what the page prints of the forecasts: their digest, and the rows of the table up to the verdict."""
    lines = [digest()]
    for number, its in json.loads(SIGNED.read_text())["forecasts"].items():
        value, low, high = (
            f"{its[key]:+.4f}" if its["unit"] == "nats" else its[key] for key in ("value", "low", "high")
        )
        link = f"[#{number}](https://github.com/KellerJordan/modded-nanogpt/pull/{number})"
        cells = [link, its["claim"], its["sign"], f"{value} ({low} to {high}) {its['unit']}"]
        lines.append(f"| {' | '.join(cells)} | {its['merged']:.2f} | {its['holds']:.2f} |")
    return lines


def main() -> None:
    """Train, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("block", choices=("train", "report"))
    parser.add_argument("--text", help="file of Tiny Shakespeare")
    parser.add_argument("--steps", type=int, choices=SEEDS, default=200)
    parser.add_argument("--on", help="local:N or ray, as for `jaxgpt study`. None means this process")
    options = parser.parse_args()
    if options.block == "report":
        print(report())
        return
    if not options.text:
        parser.error("--text is needed: a file of Tiny Shakespeare")
    jaxgpt.configure_jax()
    train(options.steps, str(Path(options.text).resolve()), options.on)


if __name__ == "__main__":
    sys.exit(main())
