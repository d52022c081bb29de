"""A study: variants of an experiment, each trained with several seeds, and which of them differ by more than noise."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.multihost import initialize
from jaxgpt.config import Experiment
from jaxgpt.config.validate import check_count, short
from jaxgpt.data.dataset import prepare_for
from jaxgpt.errors import UserError
from jaxgpt.files import write_whole
from jaxgpt.runs.find import is_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.metrics import read_metrics, validations
from jaxgpt.runs.pretrained import begun
from jaxgpt.runs.resume import describe_data_changes
from jaxgpt.session import Diverged, fit

STUDY = "study.json"  # beside the directories of the variants: what came out
DIVERGED = "diverged.txt"  # in the directory of a run that no longer learnt: why
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Validation losses of one run, in nats per token, and when each was measured. None of it: the run diverged."""

    tokens: list[int]
    seconds: list[float]  # of its steps, without compilation and validation, which the first run of a kind has more of
    losses: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One variant beside the first one, all at the same number of tokens or of seconds."""

    variant: str
    losses: list[float | None]  # by seed; None: diverged
    mean: float | None  # over the seeds that did not diverge
    deviation: float | None  # standard deviation of those; None: fewer than two
    difference: float | None  # mean over seeds of loss - the first variant's with the same seed
    margin: float | None  # half of the interval that holds the difference with 95% confidence, by Student's t
    verdict: str


def run_study(
    variants: Mapping[str, Experiment],
    directory: Path,
    *,
    seeds: int = 5,
    say: Callable[[str], None] = lambda text: None,
    fit_one: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Train every variant with seeds 0, 1, ... in directories below, or go on where it was left -> what came out.

    Seeds come first and variants within them, so that what the machine does in the meantime meets all alike, and a
    study that is cut short has whole rounds. Returns "tokens" and "seconds", each with "at", where all were compared,
    and the "rows". Raises `UserError` where variants cannot be compared: see `check_comparable`.
    fit_one: trains a run as `jaxgpt.fit` does. None means `jaxgpt.fit`.
    """
    check_comparable(variants)
    seeds = check_count("seeds", seeds)
    if any(experiment.train.init_from is not None for experiment in variants.values()):
        _check_same_tokens(variants, directory)
    curves: dict[str, list[Curve]] = {name: [] for name in variants}
    for seed in range(seeds):
        for name, experiment in variants.items():
            place = directory / slug(name) / f"seed-{seed}"
            train = dataclasses.replace(experiment.train, seed=seed, sample_tokens=0)
            curve = _train_or_resume(dataclasses.replace(experiment, train=train), place, fit_one or fit)
            curves[name].append(curve)
            told = f"{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s" if curve.losses else "diverged"
            say(f"seed {seed}, {name}: {told}")
    return compare(curves) | {"seeds": seeds}


def check_comparable(variants: Mapping[str, Experiment]) -> None:
    """Raise `UserError` unless all variants have the same validation loss to be compared by, and names of their own."""
    if len(variants) < 2:
        raise UserError(f"a study needs at least two variants, got {len(variants)}: {', '.join(variants) or 'none'}")
    first, *others = variants
    for name in others:
        fields = ["corpus", "path", "val_fraction"]
        if all(variants[v].train.init_from is None for v in (first, name)):  # else the weights bring their tokenizer
            fields += ["tokenizer", "bpe_vocab_size"]
        for field in fields:
            ours, theirs = (getattr(variants[v].data, field) for v in (first, name))
            if ours != theirs and (field != "bpe_vocab_size" or variants[first].data.tokenizer == "bpe"):
                raise UserError(
                    f"variants {first!r} and {name!r} do not share a metric: data.{field} is {short(ours)} and {short(theirs)}. "
                    "Losses per token of different texts or tokens cannot be compared: give both the same data"
                )
        ours, theirs = (variants[v].train.eval_tokens for v in (first, name))
        if ours != theirs:
            raise UserError(
                f"variants {first!r} and {name!r} do not share a metric: train.eval_tokens is {ours} and {theirs}. Give both the same"
            )
    for name in variants:
        if slug(name) in (".", "..") or slug(name).casefold() == STUDY.casefold():
            raise UserError(
                f"variant {name!r} would be the directory {slug(name)}, which is not its own: give it another name"
            )
    slugs = [slug(name) for name in variants]
    if twice := [name for name in variants if slugs.count(slug(name)) > 1]:
        raise UserError(f"variants {', '.join(map(repr, twice))} would share a directory: give them other names")


def _check_same_tokens(variants: Mapping[str, Experiment], directory: Path) -> None:
    """Raise `UserError` unless all variants have the same tokens to validate on, in the tokenizer of their weights."""
    first, *others = variants
    data = {
        name: _data_fingerprint(experiment, directory / slug(name) / "seed-0") for name, experiment in variants.items()
    }
    for name in others:
        if changed := describe_data_changes(data[first], data[name]):
            raise UserError(
                f"variants {first!r} and {name!r} do not share a metric: {', '.join(changed[:8])}. Losses per token of different "
                "texts or tokens cannot be compared: give both the same data, and the tokenizer of the weights"
            )


def _data_fingerprint(experiment: Experiment, directory: Path) -> dict[str, Any]:
    """Return the fingerprint of a variant's data: that of its run, if it has begun."""
    if is_run(directory):
        return read_metadata(directory).data
    initialize(experiment.parallel)
    full, _ = begun(experiment)
    return prepare_for(full.model, full.data).fingerprint


def slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "variant"


def _train_or_resume(experiment: Experiment, directory: Path, fit_one: Callable[..., Any]) -> Curve:
    """The curve of a run, trained as far as it is not yet."""
    diverged = directory / DIVERGED
    if diverged.exists():
        return Curve(tokens=[], seconds=[], losses=[])
    if not _is_done(directory, experiment.train.steps):
        try:
            fit_one(experiment, directory, progress=False)
        except Diverged as e:
            write_whole(diverged, f"{e}\n")
            return Curve(tokens=[], seconds=[], losses=[])
    return read_curve(directory, read_metadata(directory).experiment)


def _is_done(directory: Path, steps: int) -> bool:
    validated = validations(read_metrics(directory / "metrics.jsonl")) if is_run(directory) else []
    return bool(validated) and validated[-1][0] >= steps


def read_curve(directory: Path, experiment: Experiment) -> Curve:
    """Of a run that logs the rate of its steps, from which their time follows without that of compilation.

    experiment: as it was trained, whose context may be shorter than the one that was asked for.
    """
    lines = read_metrics(directory / "metrics.jsonl")
    validated = validations(lines)
    rated = [(line["tokens"], line["tokens_per_second"]) for line in lines if line.get("tokens_per_second")]
    if not rated or not validated:
        return Curve(tokens=[], seconds=[], losses=[])
    tokens, rates = (np.array(x, float) for x in zip(*rated, strict=True))
    took = np.cumsum(np.diff(tokens, prepend=0.0) / rates)
    per_step = experiment.train.batch_size * experiment.model.block_size
    at = [step * per_step for step, _ in validated]
    return Curve(
        tokens=at,
        seconds=np.interp(at, [0.0, *tokens], [0.0, *took]).tolist(),
        losses=[loss for _, loss in validated],
    )


def compare(curves: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """All variants at the tokens, and at the seconds, that every run reached; between two validations by a line."""
    found: dict[str, Any] = {}
    whole = [curve for those in curves.values() for curve in those if curve.losses]
    for axis in ("tokens", "seconds"):
        at = min((getattr(curve, axis)[-1] for curve in whole), default=0)
        # Where one was first measured, at the earliest: before that nothing is known of it.
        known = at >= max((getattr(curve, axis)[0] for curve in whole), default=math.inf)

        def loss(curve: Curve, axis: str = axis, at: float = at) -> float | None:
            return float(np.interp(at, getattr(curve, axis), curve.losses)) if curve.losses else None

        losses = {name: [loss(curve) for curve in those] for name, those in curves.items()}
        found[axis] = {"at": at, "rows": [dataclasses.asdict(row) for row in compare_losses(losses)] if known else []}
    return found


def compare_losses(losses: Mapping[str, Sequence[float | None]]) -> list[Row]:
    """Each variant beside the first, seed by seed."""
    first, *_ = losses
    rows = []
    for name, of_seeds in losses.items():
        finite = [x for x in of_seeds if x is not None]
        pairs = zip(of_seeds, losses[first], strict=True)
        differences = [x - y for x, y in pairs if x is not None and y is not None]
        difference, margin = (None, None) if name == first else confidence_interval(differences)
        rows.append(
            Row(
                variant=name,
                losses=list(of_seeds),
                mean=float(np.mean(finite)) if finite else None,
                deviation=float(np.std(finite, ddof=1)) if len(finite) > 1 else None,
                difference=difference,
                margin=margin,
                verdict=_verdict(name == first, len(of_seeds) - len(finite), difference, margin),
            )
        )
    return rows


def confidence_interval(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (mean, half of the 95% confidence interval of it) of paired differences; None: too few."""
    n = len(differences)
    if n < 2:
        return (differences[0] if n else None), None
    from scipy.stats import sem, t  # jax depends on scipy; 2 s to import

    return float(np.mean(differences)), float(t.ppf((1 + CONFIDENCE) / 2, n - 1) * sem(differences))


def _verdict(is_first: bool, diverged: int, difference: float | None, margin: float | None) -> str:
    if diverged:
        return f"{diverged} of its runs diverged"
    if is_first:
        return "the first"
    if difference is None:
        return "the first diverged"
    if margin is None:
        return "one seed: no interval"
    if abs(difference) <= margin:
        return "no more than noise"
    return "better" if difference < 0 else "worse"


def _count(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def format_study(found: Mapping[str, Any]) -> str:
    """What `run_study` found, for a reader."""
    tables = []
    for axis, unit in (("tokens", "tokens"), ("seconds", "s")):
        at, rows = found[axis]["at"], found[axis]["rows"]
        if not rows:
            tables.append(f"at equal {axis}: not all were measured within {_count(at)} {unit}, the shortest run")
            continue
        lines = [
            f"validation loss at equal {axis}, {_count(at)} {unit}, of {found['seeds']} seeds",
            "",
            "| variant | mean | standard deviation | difference to the first (95%) | verdict |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            difference = "" if row["difference"] is None else f"{row['difference']:+.4f}"
            difference += "" if row["margin"] is None else f" ± {row['margin']:.4f}"
            mean, deviation = ("" if x is None else f"{x:.4f}" for x in (row["mean"], row["deviation"]))
            lines.append(f"| {row['variant']} | {mean} | {deviation} | {difference} | {row['verdict']} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
