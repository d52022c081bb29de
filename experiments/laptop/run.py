"""Does a laptop predict a pod? Twelve optimisers and thirteen ideas on two CPU cores, beside what eight H100 have found.

Question    modded-nanogpt's track 3 orders optimisers by their steps to a loss, with 124M parameters on eight H100. Does a
            model of 0.4M parameters on two cores order them alike, and do wider ones come nearer?
Reference   github.com/KellerJordan/modded-nanogpt, records/track_3_optimization/README.md at commit f411b3d, 2026-08-01:
            see TRACK_3. For ideas also nanochat's dev/LOG.md: see ../../docs/laptop-and-pod.md.
Models      the text, batch and model of `base.py` at widths 88, 176 and 352, with 0.4, 1.5 and 6.0 million parameters.
Tuning      nine trials of `jaxgpt sweep` for each optimiser at width 88, over its learning rate and one other field, see
            OVER: nine of 66 steps, and the best three with 200 steps and two new seeds. The winner's fields hold at all
            widths, by muP.
Runs        Twelve optimisers to 100 and to 200 steps, each with a complete schedule: 20 seeds at widths 88 and 176, and 16
            at 352, since more do not fit into the twelve hours of two cores set for all but the null edits. Muon and its
            two relatives are below the target after 100 steps, so they have 50 steps too, and in wider models no 200.
            Five variants nearer to track 3's, see NEARER: tuned alike, 50, 100 and 200 steps, 20 seeds at width 88. SOAP
            with a new basis in each step also has five seeds with 50 and 100 steps at width 176.
            The six that track 3 has, to 800 steps: five seeds at width 88 with the rates of 200 steps, which is less than
            one pass over the text.
            Thirteen ideas with Muon, 200 steps: 20 seeds at width 88. Three of them, see FURTHER_IDEAS, have five seeds
            with 800 steps, and five with 200 steps at widths 176 and 352.
            200 null edits of three seeds and 100 steps, which change nothing but the seeds.
Steps       The target of a width is AdamW's mean loss after 200 steps. Steps to it are a straight line between two losses
            over the logarithm of the steps; where they are more than 200 they are extrapolated.
Added       50 steps after the first two seeds, the five variants after ten, 800 steps after the first seeds of these, and
            the three ideas, longer and wider, after all ideas had their seeds. SOAP at width 176 after the page was written.
Command     python experiments/laptop/run.py sweeps --text shakespeare.txt
            python experiments/laptop/run.py optimizers --width 88 --text shakespeare.txt     # then 176 and 352
            python experiments/laptop/run.py nearer --text shakespeare.txt                    # then --width 176
            python experiments/laptop/run.py longer --text shakespeare.txt
            python experiments/laptop/run.py ideas --width 88 --text shakespeare.txt          # then 176 and 352
            python experiments/laptop/run.py null --text shakespeare.txt
            python experiments/laptop/run.py report
            --on local:2: two runs at once, with a core each, or --on ray. All commands resume: what is in
            ../results/laptop/ is not run again. `report` says what is known so far.
Expected    Written before the first run. In the order of steps, fewest first: NorMuon, Muon, Muon with Polar Express, SOAP,
            Shampoo, cautious AdamW, schedule-free AdamW, AdamW, Adafactor, Prodigy, Lion, SGD. The rank correlation with
            the five that track 3 has is 0.6 to 0.9, since SOAP, its first, is behind Muon in the zoo. Wider models bring
            SOAP and Shampoo nearer to Muon. The first three differ by less than 5% of the steps at every width.
            Of the ten ideas with a verdict, eight have its sign. Value embeddings and the cap of logits do not: the
            text has 65 characters, and 200 steps make no large logits. Of the three that the two projects judge
            differently, smear and skips are noise and the second token is worse. Of 200 null edits, "keep it if the loss
            is lower" accepts 80 to 120 against one run of the baseline, and 3 to 9 against the best so far. `jaxgpt
            study` with three seeds accepts 1 to 9.
            Of the five that were added, written after ten seeds of the others and one untuned run of 66 steps of each:
            AdamW with two rates needs 170 steps, Shampoo 105, SOAP 115 and with a new basis in each step 95, still more
            than Muon, and Muon without momentum 150. The rank correlation with track 3 is then 0.7 to 0.95.
            Of 800 steps, written after two seeds of these five, where Muon without momentum was level with Muon: by then it
            is worse by 0.01 to 0.04, and SOAP is better than Muon by 0.01 to 0.03. The six losses have a rank correlation
            with track 3 of at least 0.85.
            Of ideas after 800 steps, written before any of them: SwiGLU has lost its lead and lies between -0.005 and
            +0.02, GELU is still worse by 0.02 to 0.05, and projections not from zero are worse by 0.003 to 0.02.
            Of these three at widths 176 and 352, written after three seeds of 800 steps, where SwiGLU had a longer lead:
            after 200 steps it keeps a lead of 0.005 to 0.025 at both, GELU is worse by 0.01 to 0.04 at both, and
            projections not from zero lie within 0.015 of the baseline.
            Of SOAP with a new basis in each step at width 176, written before its first run there: it needs 1.00 to 1.14
            times Muon's steps, as it needs 1.06 times them at 88, and is 0 to 0.02 behind Muon after 100 steps.
Result      see ../../docs/laptop-and-pod.md.
Verdict     see ../../docs/laptop-and-pod.md.
"""

import argparse
import dataclasses
import itertools
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock

import jaxgpt
from jaxgpt import Experiment, OptimConfig, UserError
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.files import write_whole
from jaxgpt.runs.code import run_file
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.tools.executor import Executor, Workers, open_executor
from jaxgpt.tools.grid import train_grid
from jaxgpt.tools.study import Comparison, compare_losses
from jaxgpt.tools.sweep import sweep

HERE = Path(__file__).resolve().parent
NEW, SOAP = run_file(HERE / "optimizers.py"), run_file(HERE.parent / "zoo" / "soap.py")
RESULTS, RUNS = HERE.parent / "results" / "laptop", Path("runs/laptop")
SEEDS, STEPS, WIDTHS = range(20), (100, 200), (88, 176, 352)
TRIALS, FINAL_SEEDS = 9, 2  # of each sweep
RATE, BETA2 = "optim.learning_rate=1e-3..2e-2", "optim.beta2=0.9..0.99"
TABLES = "optim.learning_rate=3e-3..3e-2"
MUON, TWO_RATES = (
    ("optim.muon_learning_rate=4e-3..4e-2", TABLES),
    ("optim.muon_learning_rate=1e-3..2e-2", TABLES),
)
# What is tuned: the learning rate over a factor of ten to a hundred, and one other field.
OVER = {
    "sgd": ("optim.learning_rate=0.05..5", "optim.momentum=0.8..0.98"),
    "adamw": (RATE, BETA2),
    "lion": ("optim.learning_rate=3e-4..1e-2", BETA2),
    "adafactor": ("optim.learning_rate=1e-3..5e-2", "optim.beta1=0.0,0.9"),
    "soap": (RATE, BETA2),
    "shampoo": (RATE, BETA2),
    "muon": MUON,
    "normuon": MUON,
    "polar express": MUON,
    "schedule-free": ("optim.learning_rate=1e-3..5e-2", "optim.beta1=0.8..0.98"),
    "cautious adamw": (RATE, BETA2),
    "prodigy": ("optim.learning_rate=0.3..5", "optim.beta2=0.9..0.999"),
}
# Track 3 gives tables a learning rate of their own with every optimiser, its SOAP turns its basis in each step, and it has
# Muon without momentum. These five do so too.
NEARER = {
    "adamw, two rates": TWO_RATES,
    "shampoo, two rates": TWO_RATES,
    "soap, two rates": TWO_RATES,
    "soap, two rates, each step": TWO_RATES,
    "muon without momentum": MUON,
}
FAST = ("muon", "normuon", "polar express", *NEARER)  # with which 50 steps are trained as well
# Ideas: what changes in the model, or the entry of the zoo that has it; the published sign, + for a lower loss at equal
# steps and - for a higher one, None where the two projects differ; and where it was published (nanochat's log at commit
# 92d63d4, records of modded-nanogpt's track 1 at f411b3d).
IDEAS = {
    "bigrams": ("ngram_embeddings", "+", "nanochat 2026-01-27; record 62"),
    "value embeddings": ("value_embeddings", "+", "nanochat 2026-01-17; record 14"),
    "experts": ("moe", "+", "nanochat 2026-02-19"),
    "logits capped at 15": ({"logit_softcap": 15.0}, "+", "records 9 and 18; nanochat 2026-03-02"),
    "DyT": ("dyt", "-", "nanochat 2026-05-05"),
    "SwiGLU": ({"activation": "swiglu"}, "-", "nanochat 2026-02-05"),
    "GELU": ({"activation": "gelu"}, "-", "record 5"),
    "no norm of queries and keys": ({"qk_norm": False}, "-", "record 5"),
    "projections not from zero": ({"residual_init": "scaled"}, "-", "record 5"),
    "tied embeddings": ({"tie_embeddings": True}, "-", "record 8"),
    "smear": ("smear", None, "negligible (nanochat 2026-01-16); record 34"),
    "U-net skips": ("unet_skips", None, "slightly worse (nanochat 2026-01-16); record 11"),
    "a second token": ("multi_token_prediction", None, "equal or slightly worse (nanochat 2026-01-12); record 53"),
}
LONGER, LONGER_SEEDS = 800, 5
WIDER = "soap, two rates, each step"  # of the variants nearer to track 3's, with as many seeds
# What is also trained longer and wider: the idea that does not carry over, its rival, and one within the noise.
FURTHER_IDEAS = ("SwiGLU", "GELU", "projections not from zero")
NULL_EDITS, NULL_SEEDS, NULL_STEPS = 200, 3, STEPS[0]
# Steps to 3.28: results 27, 36, 10, 21 and 2. Adam's is called "most likely undertuned" there, and is a single run.
TRACK_3 = {"soap": 3125, "muon": 3250, "normuon": 3250, "shampoo": 4100, "adamw": 5625}
# The same, and result 22, for what is nearer to it.
NEARER_TRACK_3 = {"soap, two rates, each step": 3125, "muon": 3250, "normuon": 3250, "shampoo, two rates": 4100}
NEARER_TRACK_3 |= {"adamw, two rates": 5625, "muon without momentum": 8225}


# The order of steps that was expected before the first run.
PREDICTED = ["normuon", "muon", "polar express", "soap", "shampoo", "cautious adamw", "schedule-free", "adamw"]
PREDICTED += ["adafactor", "prodigy", "lion", "sgd"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRatesAdamWConfig(SOAP.matrices.TwoRates, OptimConfig):
    """AdamW with a rate for matrices and one for the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRatesShampooConfig(SOAP.matrices.TwoRates, NEW.ShampooConfig):
    """Shampoo for matrices, AdamW for the rest."""


def optimizers() -> dict[str, OptimConfig]:
    """Return all with the values of the zoo: the twelve, then those nearer to track 3."""
    fixed = run_file(HERE / "base.py")
    pages = {
        name: load_experiment(str(HERE.parent / "zoo" / f"{name}.py")).optim
        for name in ("lion", "soap", "normuon", "polar_express", "schedule_free", "cautious_weight_decay")
    }
    cautious = {"name": "adamw", "learning_rate": 4e-3, "cautious_decay": False, "cautious_updates": True}
    found = {name: experiment.optim for name, experiment in NEW.variants.items()}
    found |= {"adamw": fixed.adamw.optim, "muon": fixed.experiment.optim}
    found |= {name.replace("_", " "): pages[name] for name in ("lion", "soap", "normuon", "polar_express")}
    found["schedule-free"] = pages["schedule_free"]
    found["cautious adamw"] = dataclasses.replace(pages["cautious_weight_decay"], **cautious)
    fields = {field.name: getattr(fixed.adamw.optim, field.name) for field in dataclasses.fields(OptimConfig)}
    found["adamw, two rates"], fields["beta2"] = TwoRatesAdamWConfig(**fields), 0.95
    found["shampoo, two rates"] = TwoRatesShampooConfig(**fields)
    found["soap, two rates"] = SOAP.SoapMatricesConfig(**fields)
    found["soap, two rates, each step"] = SOAP.SoapMatricesConfig(**fields, refresh_every=1)
    found["muon without momentum"] = dataclasses.replace(fixed.experiment.optim, momentum=0.0)
    return {name: found[name] for name in (*OVER, *NEARER)}


def lengths_of(name: str, width: int) -> tuple[int, ...]:
    """Return the numbers of steps of an optimiser. In wider models the fastest have only those that the target is between."""
    return STEPS if name not in FAST else (50, *STEPS) if width == WIDTHS[0] else (50, STEPS[0])


def experiment_of(optim: OptimConfig, width: int, steps: int, text: str) -> Experiment:
    """Return the experiment of an optimiser at a width."""
    fixed = run_file(HERE / "base.py")
    train = dataclasses.replace(fixed.experiment.train, steps=steps)
    data = jaxgpt.DataConfig(path=text)
    return dataclasses.replace(fixed.experiment, model=fixed.model(width), optim=optim, train=train, data=data)


def idea_of(name: str, optim: OptimConfig, text: str, steps: int = STEPS[-1], width: int = WIDTHS[0]) -> Experiment:
    """Return the experiment of an idea, or of "baseline"."""
    plain = experiment_of(optim, width, steps, text)
    change = IDEAS[name][0] if name in IDEAS else {}
    if isinstance(change, dict):
        return dataclasses.replace(plain, model=dataclasses.replace(plain.model, **change))
    page = load_experiment(str(HERE.parent / "zoo" / f"{change}.py"))
    fixed = {field.name: getattr(plain.model, field.name) for field in dataclasses.fields(jaxgpt.GPTConfig)}
    return dataclasses.replace(plain, model=dataclasses.replace(page.model, **fixed), objective=page.objective)


def read(name: str) -> dict:
    """Return a file of results, empty if there is none."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def add(name: str, keys: list[str], value) -> None:
    """Put a value at its place in a file of results, which other processes write as well."""
    for directory in (RESULTS, RUNS):
        directory.mkdir(parents=True, exist_ok=True)
    with FileLock(RUNS / f"{name}.lock"):
        found = read(name)
        place = found
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = value
        lines = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", json.dumps(found, indent=1))
        write_whole(RESULTS / f"{name}.json", lines + "\n")


def processor() -> str:
    """Return vendor, family and model of the processor, and its vector width."""
    described = run_file(HERE.parent / "benchmarks" / "processor.py").describe_processor()
    return described.rpartition(", ")[0]  # without the number of cores


def run_sweeps(over: dict[str, tuple[str, ...]], text: str, workers: Workers) -> None:
    """Tune each optimiser that has no result yet. over: what of each."""
    shelf = optimizers()
    for name in over:
        if name in read("sweeps"):
            continue
        began, directory = time.perf_counter(), RUNS / "sweeps" / name.replace(" ", "-")
        experiment = experiment_of(shelf[name], WIDTHS[0], max(STEPS), text)
        experiment = dataclasses.replace(experiment, name=f"laptop-{name.replace(' ', '-').replace(',', '')}")
        how = {"trials": TRIALS, "seeds": FINAL_SEEDS, "run_dir": str(directory), "workers": workers}
        found = sweep(over=over[name], experiment=experiment, **how)
        trials = [[*trial.point.values(), *map(mean, trial.losses)] for trial in found.trials]
        value = {"over": over[name], "winner": found.trials[0].point, "trials": trials}
        seconds = round(time.perf_counter() - began, 1)
        add("sweeps", [name], value | {"seconds": seconds, "processor": processor()})
        shutil.rmtree(directory)
        print(f"{name}: {found.trials[0]}: {found.trials[0].mean:.4f} after {seconds:.0f} s", flush=True)


def list_runs(found: dict) -> Iterator[list]:
    """Yield each [loss, seconds] of a file of results."""
    for value in found.values():
        if isinstance(value, dict):
            yield from list_runs(value)
        elif isinstance(value, list):
            yield value


def mean(losses: list[float | None]) -> float | None:
    """Return the mean of a round, None if a run diverged."""
    return None if None in losses else round(float(np.mean(losses)), 5)


def run_all(jobs: Iterable[tuple[str, list[str], Experiment, int]], executor: Executor | None) -> None:
    """Train runs, and add [loss, seconds] of each to its file of results. A run that diverged has no loss.

    jobs: (file, keys in it, experiment, seed) of each. What its file has is not run again.
    """
    grid, places = [], []
    for file, keys, experiment, seed in jobs:
        place = read(file)
        for key in keys:
            place = place.get(key, {})
        if str(seed) not in place:
            train = dataclasses.replace(experiment.train, seed=seed)
            directory = RUNS / "-".join([file, *keys, str(seed)]).replace(" ", "-")
            grid.append((directory.name, dataclasses.replace(experiment, train=train), directory))
            places.append((file, [*keys, str(seed)]))
    curves = train_grid(grid, lambda text: print(text, flush=True), executor=executor)
    for (file, keys), (_, _, directory), curve in zip(places, grid, curves, strict=True):
        if curve.failure not in ("", "diverged"):
            continue  # it is trained again by the next call
        loss = round(curve.losses[-1], 6) if curve.losses else None
        lines = read_metrics(directory / "metrics.jsonl")
        seconds = max((line.get("seconds") or 0.0 for line in lines), default=0.0)
        add(file, keys, [loss, round(seconds, 1)])
        add(file, ["processors", processor()], 1 + read(file).get("processors", {}).get(processor(), 0))
        shutil.rmtree(directory, ignore_errors=True)


def tuned(names: list[str]) -> dict[str, OptimConfig]:
    """Return optimisers with the fields that their sweeps found."""
    sweeps, shelf = read("sweeps"), optimizers()
    if missing := set(names) - sweeps.keys():
        raise UserError(f"{', '.join(sorted(missing))} are not tuned yet: run the sweeps first")
    points = {name: sweeps[name]["winner"].items() for name in names}
    fields = {name: {key.removeprefix("optim."): value for key, value in point} for name, point in points.items()}
    return {name: dataclasses.replace(shelf[name], **fields[name]) for name in names}


def run_longer(text: str, executor: Executor | None) -> None:
    """Train those that track 3 has for longer, and some ideas, seed by seed."""
    optims = tuned(list(NEARER_TRACK_3))
    jobs = [
        ("optimizers", [str(WIDTHS[0]), name, str(LONGER)], experiment_of(optim, WIDTHS[0], LONGER, text))
        for name, optim in optims.items()
    ]
    for name in ("baseline", *FURTHER_IDEAS):
        jobs.append(("ideas", [key_of(name, steps=LONGER)], idea_of(name, optims["muon"], text, LONGER)))
    run_all([(*job, seed) for seed in SEEDS[:LONGER_SEEDS] for job in jobs], executor)


def key_of(name: str, *, steps: int = STEPS[-1], width: int = WIDTHS[0]) -> str:
    """Return the key of an idea's runs."""
    return name + f", {steps} steps" * (steps != STEPS[-1]) + f", width {width}" * (width != WIDTHS[0])


def run_optimizers(names: list[str], width: int, text: str, executor: Executor | None) -> None:
    """Train optimisers at a width, seed by seed, so that what is interrupted is complete for some seeds."""
    optims = tuned(names)
    lengths = [(name, steps) for name in names for steps in lengths_of(name, width)]
    for seed in SEEDS[:LONGER_SEEDS] if names == [WIDER] else SEEDS:
        jobs = [
            ("optimizers", [str(width), name, str(steps)], experiment_of(optims[name], width, steps, text), seed)
            for name, steps in lengths
        ]
        run_all(jobs, executor)


def run_ideas(width: int, text: str, executor: Executor | None) -> None:
    """Train the baseline and ideas with the baseline's tuned Muon, seed by seed. Wider models have only FURTHER_IDEAS."""
    (optim,) = tuned(["muon"]).values()
    ideas, seeds = (IDEAS, SEEDS) if width == WIDTHS[0] else (FURTHER_IDEAS, SEEDS[:LONGER_SEEDS])
    jobs = [
        ("ideas", [key_of(name, width=width)], idea_of(name, optim, text, width=width), seed)
        for seed, name in itertools.product(seeds, ["baseline", *ideas])
    ]
    run_all(jobs, executor)


def run_null(text: str, executor: Executor | None) -> None:
    """Train the baseline with new seeds: each edit changes the seeds and nothing else."""
    experiment = experiment_of(tuned(["muon"])["muon"], WIDTHS[0], NULL_STEPS, text)
    run_all([("null", ["baseline"], experiment, seed) for seed in range((1 + NULL_EDITS) * NULL_SEEDS)], executor)


def steps_to(target: float, lengths: tuple[int, ...], losses: np.ndarray) -> float:
    """Return the steps to a loss, by straight lines between mean losses over the logarithm of the steps.

    Args:
        lengths: steps of complete runs, the fewest first.
        losses: mean losses after them. Beyond the first and the last the nearest line goes on.
    """
    place = min(max(int((losses > target).sum()), 1), len(lengths) - 1)
    x, y = np.log(lengths[place - 1 : place + 1]), losses[place - 1 : place + 1]
    return float(np.exp(x[1] + (y[1] - target) / (y[0] - y[1]) * (x[1] - x[0])))


def losses_at(width: int, names: Iterable[str] = OVER) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return the seeds that these optimisers have at a width, and for each optimiser its losses [lengths, seeds]."""
    found = read("optimizers").get(str(width), {})
    runs = {name: [found.get(name, {}).get(str(n), {}) for n in lengths_of(name, width)] for name in names}
    seeds = [seed for seed in SEEDS if all(str(seed) in run for by_length in runs.values() for run in by_length)]
    pick = lambda run: [np.nan if run[str(s)][0] is None else run[str(s)][0] for s in seeds]  # noqa: E731
    return seeds, {name: np.array(list(map(pick, by_length)), float) for name, by_length in runs.items()}


def rank(values: np.ndarray) -> np.ndarray:
    """Return the ranks of values, equal ones with their mean rank."""
    values = np.asarray(values)
    return (values[:, None] > values).sum(1) + ((values[:, None] == values).sum(1) - 1) / 2


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the rank correlation of two arrays."""
    return float(np.corrcoef(rank(a), rank(b))[0, 1])


def bootstrap(width: int, names: Iterable[str] = OVER, draws: int = 2000) -> Iterator[dict[str, float]]:
    """Yield the steps of optimisers with seeds drawn with replacement. The first has the seeds as they are."""
    seeds, losses = losses_at(width, names)
    rng = np.random.default_rng(0)
    for draw in range(draws + 1):
        chosen = np.arange(len(seeds)) if draw == 0 else rng.integers(0, len(seeds), len(seeds))
        means = {name: by_length[:, chosen].mean(1) for name, by_length in losses.items()}
        target = means["adamw"][-1]
        yield {name: steps_to(target, lengths_of(name, width), by_length) for name, by_length in means.items()}


def compare_ideas(ideas: Iterable[str] = IDEAS, **setting: int) -> list[Comparison]:
    """Compare ideas with the baseline, paired by the seeds that all have. None so far: an empty list.

    setting: steps and width, see `key_of`.
    """
    runs = {name: read("ideas").get(key_of(name, **setting), {}) for name in ("baseline", *ideas)}
    seeds = [str(seed) for seed in SEEDS if all(str(seed) in by_seed for by_seed in runs.values())]
    if len(seeds) < 2:
        return []
    losses = {name: [by_seed[seed][0] for seed in seeds] for name, by_seed in runs.items()}
    _, *rows = compare_losses({"": losses}, apart=np.inf)[""]
    return [row for row in rows if row.margin is not None]  # others diverged


def count_false() -> dict[str, np.ndarray]:
    """Count the null edits that each rule accepts [21]. Empty until all runs are there.

    The first three seeds stand for the baseline, as declared. After the runs it was added that every tenth edit stands for
    it too, since no edit differs from it. The other edits follow it, around the end.
    """
    runs = read("null").get("baseline", {})
    if len(runs) < (1 + NULL_EDITS) * NULL_SEEDS:
        return {}
    losses = [runs[str(seed)][0] for seed in range(len(runs))]
    edits = [losses[i : i + NULL_SEEDS] for i in range(0, len(losses), NULL_SEEDS)]
    counts = [count_accepted(*edits[place:], *edits[:place]) for place in range(0, len(edits), 10)]
    return {rule: np.array([count[rule] for count in counts]) for rule in counts[0]}


def count_accepted(ours: list[float], *edits: list[float]) -> dict[str, int]:
    """Count the edits that each rule accepts. Each argument is the losses of three seeds."""
    best, records = ours[0], 0
    for edit in edits:
        records, best = records + (edit[0] < best), min(best, edit[0])
    tables = (compare_losses({"": {"baseline": ours, "edit": edit}}, apart=np.inf)[""][1] for edit in edits)
    return {
        "lower than one run": sum(edit[0] < ours[0] for edit in edits),
        "lower than the best so far": records,
        "study, three seeds": sum(row.verdict == "better" for row in tables),
    }


def agreement(signs: list[bool], draws: int = 2000) -> tuple[float, float, float]:
    """Return the share of signs that agree, and its 95% interval when ideas are drawn with replacement."""
    drawn = np.random.default_rng(0).choice(signs, (draws, len(signs))).mean(1)
    return float(np.mean(signs)), *map(float, np.percentile(drawn, [2.5, 97.5]))


def agree(losses: list[np.ndarray], order: np.ndarray, draws: int = 2000) -> str:
    """Return the rank correlation of mean losses, each [seeds], with an order, and its interval for draws of the seeds."""
    by_seed, rng = np.array(losses), np.random.default_rng(0)
    drawn = rng.integers(0, by_seed.shape[1], (draws, by_seed.shape[1]))
    low, high = np.percentile([spearman(by_seed[:, seeds].mean(1), order) for seeds in drawn], [2.5, 97.5])
    return f"{spearman(by_seed.mean(1), order):.2f} ({low:.2f} to {high:.2f})"


def report_steps(width: int, names: list[str], orders: dict[str, dict[str, float]]) -> list[str]:
    """Return a table of the steps of optimisers at a width, and their rank correlation with other orders."""
    seeds, losses = losses_at(width, names)
    if len(seeds) < 2:
        return [f"width {width}, {len(names)} optimisers: fewer than two seeds are complete", ""]
    first, *others = bootstrap(width, names)
    lines = [f"width {width}, {len(names)} optimisers, {len(seeds)} seeds", ""]
    lines += ["| optimiser | loss after 50 steps (sd) | 100 | 200 | steps (95%) |", "|---|---|---|---|---|"]
    for name in sorted(first, key=first.__getitem__):
        low, high = np.percentile([draw[name] for draw in others], [2.5, 97.5])
        by_length = dict(zip(lengths_of(name, width), losses[name], strict=True))
        cells = [
            f"{x.mean():.4f} ({x.std(ddof=1):.4f})" if (x := by_length.get(n)) is not None else "" for n in (50, *STEPS)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {first[name]:.0f} ({low:.0f} to {high:.0f}) |")
    for whose, order in orders.items():
        theirs = np.array(list(order.values()))
        agreed = [spearman(np.array([draw[name] for name in order]), theirs) for draw in (first, *others)]
        low, high = np.percentile(agreed[1:], [2.5, 97.5])
        lines += ["", f"rank correlation with {whose} {len(order)}: {agreed[0]:.2f} ({low:.2f} to {high:.2f})"]
        if all(lengths_of(name, width)[-1] == STEPS[-1] for name in order):  # added after the runs
            lines.append(f"and of the losses after {STEPS[-1]} steps: {agree([losses[n][-1] for n in order], theirs)}")
    return [*lines, ""]


def report_widths() -> list[str]:
    """Return the steps of the twelve at each width as a share of AdamW's, and the agreement with the first width."""
    found = {width: list(bootstrap(width)) for width in WIDTHS if len(losses_at(width)[0]) > 1}
    if len(found) < 2:
        return []
    lines = [f"| steps of | {' | '.join(f'width {width}' for width in found)} |", "|---" * (1 + len(found)) + "|"]
    first = found[WIDTHS[0]][0]
    shown = [(name, "adamw") for name in sorted(first, key=first.__getitem__)]
    for name, other in [*shown, ("shampoo", "muon"), ("soap", "muon")]:  # the last two were predicted to fall
        shares = ([draw[name] / draw[other] for draw in draws] for draws in found.values())
        cells = [f"{x[0]:.2f} ({np.percentile(x[1:], 2.5):.2f} to {np.percentile(x[1:], 97.5):.2f})" for x in shares]
        lines.append(f"| {name} / {other} | {' | '.join(cells)} |")
    for width, draws in list(found.items())[1:]:
        pairs = zip(found[WIDTHS[0]], draws, strict=True)
        agreed = [spearman(*(np.array([draw[name] for name in first]) for draw in pair)) for pair in pairs]
        low, high = np.percentile(agreed[1:], [2.5, 97.5])
        lines += ["", f"rank correlation of widths {WIDTHS[0]} and {width}: {agreed[0]:.2f} ({low:.2f} to {high:.2f})"]
    return [*lines, ""]


def report() -> str:
    """Return what is known so far."""
    sweeps = read("sweeps")
    lines = ["| optimiser | what the sweep found | loss, two seeds | seconds |", "|---|---|---|---|"]
    for name in sorted(sweeps, key=lambda name: sweeps[name]["trials"][0][-1]):
        point = ", ".join(
            f"{field.removeprefix('optim.')} {value:g}" for field, value in sweeps[name]["winner"].items()
        )
        lines.append(f"| {name} | {point} | {sweeps[name]['trials'][0][-1]:.4f} | {sweeps[name]['seconds']:.0f} |")
    blocks = {"sweeps": [sweep["seconds"] for sweep in sweeps.values()]}
    blocks |= {name: [seconds for _, seconds in list_runs(read(name))] for name in ("optimizers", "ideas", "null")}
    hours = (f"{name} {sum(seconds) / 3600:.2f} ({len(seconds)})" for name, seconds in blocks.items())
    lines += ["", f"core-hours (and how many): {', '.join(hours)}", ""]
    places = {name: float(place) for place, name in enumerate(PREDICTED)}
    for width in WIDTHS:
        lines += report_steps(width, list(OVER), {"track 3's": TRACK_3, "the predicted": places})
    lines += report_widths()
    lines += report_steps(WIDTHS[0], [*OVER, *NEARER], {"track 3's": NEARER_TRACK_3})
    for width in WIDTHS[:2]:  # the order of four of track 3, with SOAP as it is there
        four = ["adamw", "muon", "shampoo", WIDER]
        lines += report_steps(width, four, {})
        if len(losses_at(width, four)[0]) > 1:
            first, *others = (draw[WIDER] / draw["muon"] for draw in bootstrap(width, four))
            low, high = np.percentile(others, [2.5, 97.5])
            lines += [f"{WIDER}, by Muon's steps: {first:.2f} ({low:.2f} to {high:.2f})", ""]
    runs = {
        name: read("optimizers").get(str(WIDTHS[0]), {}).get(name, {}).get(str(LONGER), {}) for name in NEARER_TRACK_3
    }
    if all(len(by_seed) == LONGER_SEEDS for by_seed in runs.values()):
        losses = {name: np.array([loss for loss, _ in by_seed.values()]) for name, by_seed in runs.items()}
        lines += [
            f"width {WIDTHS[0]}, {LONGER} steps, {LONGER_SEEDS} seeds",
            "",
            "| optimiser | loss (sd) |",
            "|---|---|",
        ]
        lines += [f"| {name} | {loss.mean():.4f} ({loss.std(ddof=1):.4f}) |" for name, loss in losses.items()]
        agreed = agree(list(losses.values()), np.array(list(NEARER_TRACK_3.values())))
        lines += ["", f"rank correlation of the losses with track 3's {len(losses)}: {agreed}", ""]
    tables = {f"ideas, {STEPS[-1]} steps": compare_ideas()}
    for setting in ({"steps": LONGER}, *({"width": width} for width in WIDTHS[1:])):
        tables[key_of("ideas", **setting)] = compare_ideas(FURTHER_IDEAS, **setting)
    for title, found in tables.items():
        if not found:
            continue
        lines += ["", f"{title}, {len(found[0].losses)} seeds", ""]
        lines += ["| idea | difference | here | at scale | by |", "|---|---|---|---|---|"]
        for row in found:
            sign, source = IDEAS[row.variant][1:]
            lines.append(
                f"| {row.variant} | {row.difference:+.4f} ± {row.margin:.4f} | {row.verdict} | {sign} | {source} |"
            )
        signs = [(row.difference < 0) == (IDEAS[row.variant][1] == "+") for row in found if IDEAS[row.variant][1]]
        share, low, high = agreement(signs)
        lines += ["", f"signs that agree: {sum(signs)} of {len(signs)}, {share:.2f} ({low:.2f} to {high:.2f})"]
    for rule, counts in count_false().items():
        all_baselines = f"with {len(counts)} baselines {counts.mean():.1f} ({counts.min()} to {counts.max()})"
        lines += ["", f"null edits accepted, {rule}: {counts[0]} of {NULL_EDITS}, {all_baselines}"]
    if first := [run[0] for seed, run in read("null").get("baseline", {}).items() if int(seed) % NULL_SEEDS == 0]:
        gain = np.mean(first) - min(first)
        lines += [
            "",
            f"the lowest of {len(first)} single null runs is {gain:.4f} below their mean, sd {np.std(first, ddof=1):.4f}",
        ]
    return "\n".join(lines)


def main() -> None:
    """Run a block, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("block", choices=("sweeps", "optimizers", "nearer", "longer", "ideas", "null", "report"))
    parser.add_argument("--text", help="file of Tiny Shakespeare")
    parser.add_argument("--width", type=int, choices=WIDTHS, default=WIDTHS[0])
    parser.add_argument("--on", help="local:N or ray, as for `jaxgpt study`. None means this process")
    options = parser.parse_args()
    if options.block == "report":
        print(report())
        return
    if not options.text:
        parser.error("--text is needed: a file of Tiny Shakespeare")
    jaxgpt.configure_jax()
    text, workers = str(Path(options.text).resolve()), Workers(on=options.on)
    if options.block in ("sweeps", "nearer"):
        run_sweeps(OVER if options.block == "sweeps" else NEARER, text, workers)
    with open_executor(workers, RUNS) as executor:
        if options.block == "optimizers":
            run_optimizers(list(OVER), options.width, text, executor)
        elif options.block == "nearer":
            run_optimizers(list(NEARER) if options.width == WIDTHS[0] else [WIDER], options.width, text, executor)
        elif options.block == "ideas":
            run_ideas(options.width, text, executor)
        elif options.block in ("longer", "null"):
            {"longer": run_longer, "null": run_null}[options.block](text, executor)


if __name__ == "__main__":
    sys.exit(main())
