"""Train variants of an experiment with several seeds and report which differ by more than noise."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.cluster.multihost import initialize
from jaxgpt.config import Experiment, differences
from jaxgpt.config.validate import check_count, short
from jaxgpt.data.dataset import prepare_for
from jaxgpt.errors import UserError
from jaxgpt.runs.find import is_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.runs.resume import describe_data_changes
from jaxgpt.session import fit
from jaxgpt.statistics import mean_interval
from jaxgpt.tools.curves import Curve, train_or_resume

STUDY = "study.json"  # the result, next to the directories of the variants
# Fields that determine the validation data.
METRIC = ("data.corpus", "data.path", "data.val_fraction", "train.eval_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """One variant compared with the first, at the same number of tokens or seconds."""

    variant: str
    losses: list[float | None]  # by seed; None: diverged
    mean: float | None  # over seeds that did not diverge
    deviation: float | None  # standard deviation over these seeds; None: fewer than two
    difference: float | None  # mean over seeds of (loss - loss of the first variant with the same seed)
    margin: float | None  # half-width of the 95% confidence interval of the difference (Student's t)
    verdict: str


def run_study(
    variants: Mapping[str, Experiment],
    directory: Path,
    *,
    seeds: int = 5,
    say: Callable[[str], None] = lambda text: None,
    fit_one: Callable[..., Any] = fit,
) -> dict[str, Any]:
    """Train or resume every variant with seeds 0, 1, ... in subdirectories, and compare them.

    All variants are trained with one seed before the next seed, so that a change in the machine's speed affects all
    alike, and an interrupted study has complete rounds.

    Args:
        variants: the experiments by name. The others are compared with the first.
        directory: directory of the study.
        seeds: number of runs per variant.
        say: receives a line of text for each run.
        fit_one: trains a run as `jaxgpt.fit` does.

    Returns:
        "tokens" and "seconds", each with "at", the point of comparison, and "rows", the fields of a `Comparison` for
        each variant; "seeds", as given.

    Raises:
        UserError: the variants cannot be compared, see `check_comparable`.
    """
    check_comparable(variants)
    seeds = check_count("seeds", seeds)
    if any(experiment.train.init_from is not None for experiment in variants.values()):
        _check_same_tokens(variants, directory)
    curves: dict[str, list[Curve]] = {name: [] for name in variants}
    for seed in range(seeds):
        for name, experiment in variants.items():
            train = dataclasses.replace(experiment.train, seed=seed, sample_tokens=0)
            seeded = dataclasses.replace(experiment, train=train)
            curve = train_or_resume(seeded, directory / slug(name) / f"seed-{seed}", fit_one)
            curves[name].append(curve)
            result = f"{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s" if curve.losses else "diverged"
            say(f"seed {seed}, {name}: {result}")
    return compare(curves) | {"seeds": seeds}


def check_comparable(variants: Mapping[str, Experiment]) -> None:
    """Raise `UserError` unless all variants have the same validation data and different directories."""
    if len(variants) < 2:
        raise UserError(f"a study needs at least two variants, got {len(variants)}: {', '.join(variants) or 'none'}")
    first, *others = variants
    for name in others:
        metric = METRIC
        if all(variants[v].train.init_from is None for v in (first, name)):  # else the tokenizer is that of the weights
            bpe = ("data.bpe_vocab_size",) if variants[first].data.tokenizer == "bpe" else ()
            metric = (*METRIC, "data.tokenizer", *bpe)
        for field, (ours, theirs) in differences(variants[first], variants[name]).items():
            if field in metric:
                raise UserError(
                    f"variants {first!r} and {name!r} do not share a metric: {field} is {short(ours)} and "
                    f"{short(theirs)}. Losses per token on different texts or tokens cannot be compared: "
                    "give both the same value"
                )
    slugs = [slug(name) for name in variants]
    for name in variants:
        if slug(name) in (".", "..") or slug(name).casefold() == STUDY.casefold():
            raise UserError(
                f"variant {name!r} cannot have the directory {slug(name)}, which is reserved: give it another name"
            )
    if twice := [name for name in variants if slugs.count(slug(name)) > 1]:
        raise UserError(f"variants {', '.join(map(repr, twice))} would share a directory: give them other names")


def _check_same_tokens(variants: Mapping[str, Experiment], directory: Path) -> None:
    """Raise `UserError` unless all variants validate on the same tokens, with the tokenizers of their weights."""
    first, *others = variants
    data = {
        name: _data_fingerprint(experiment, directory / slug(name) / "seed-0") for name, experiment in variants.items()
    }
    for name in others:
        if changed := describe_data_changes(data[first], data[name]):
            raise UserError(
                f"variants {first!r} and {name!r} do not share a metric: {', '.join(changed[:8])}. Losses per token on "
                "different texts or tokens cannot be compared: give both the same data and the tokenizer of the weights"
            )


def _data_fingerprint(experiment: Experiment, directory: Path) -> dict[str, Any]:
    """Return the fingerprint of a variant's data, from its run if there is one."""
    if is_run(directory):
        return read_metadata(directory).data
    initialize(experiment.parallel)
    full, _ = resolve_init_from(experiment)
    return prepare_for(full.model, full.data).fingerprint


def slug(name: str) -> str:
    """Return the directory name of a variant."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "variant"


def compare(curves: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """Compare all variants at the tokens, and at the seconds, of the shortest run, by linear interpolation."""
    found: dict[str, Any] = {}
    complete = [curve for seeds in curves.values() for curve in seeds if curve.losses]
    for axis in ("tokens", "seconds"):
        at = min((getattr(curve, axis)[-1] for curve in complete), default=0)
        # A run has no loss before its first validation.
        is_known = at >= max((getattr(curve, axis)[0] for curve in complete), default=math.inf)
        losses = {name: [_loss_at(curve, axis, at) for curve in seeds] for name, seeds in curves.items()}
        rows = [dataclasses.asdict(row) for row in compare_losses(losses)] if is_known else []
        found[axis] = {"at": at, "rows": rows}
    return found


def _loss_at(curve: Curve, axis: str, at: float) -> float | None:
    return float(np.interp(at, getattr(curve, axis), curve.losses)) if curve.losses else None


def compare_losses(losses: Mapping[str, Sequence[float | None]]) -> list[Comparison]:
    """Compare each variant with the first, paired by seed."""
    first, *_ = losses
    rows = []
    for name, by_seed in losses.items():
        finite = [x for x in by_seed if x is not None]
        pairs = zip(by_seed, losses[first], strict=True)
        paired = [x - y for x, y in pairs if x is not None and y is not None]
        difference, margin = (None, None) if name == first else confidence_interval(paired)
        rows.append(
            Comparison(
                variant=name,
                losses=list(by_seed),
                mean=float(np.mean(finite)) if finite else None,
                deviation=float(np.std(finite, ddof=1)) if len(finite) > 1 else None,
                difference=difference,
                margin=margin,
                verdict=_verdict(name == first, len(by_seed) - len(finite), difference, margin),
            )
        )
    return rows


def confidence_interval(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return (mean, half-width of its 95% confidence interval) of paired differences, None if there are too few."""
    n = len(differences)
    if n < 2:
        return (differences[0] if n else None), None
    mean, margin = mean_interval(differences)
    return float(mean), float(margin)


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
    """Return the result of `run_study` as tables in Markdown."""
    tables = []
    for axis, unit in (("tokens", "tokens"), ("seconds", "s")):
        at, rows = found[axis]["at"], found[axis]["rows"]
        if not rows:
            tables.append(
                f"at equal {axis}: not all runs were validated within {_count(at)} {unit}, the length of the shortest"
            )
            continue
        lines = [
            f"validation loss at equal {axis}, {_count(at)} {unit}, over {found['seeds']} seeds",
            "",
            "| variant | mean | standard deviation | difference from the first (95%) | verdict |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            difference = "" if row["difference"] is None else f"{row['difference']:+.4f}"
            difference += "" if row["margin"] is None else f" ± {row['margin']:.4f}"
            mean, deviation = ("" if x is None else f"{x:.4f}" for x in (row["mean"], row["deviation"]))
            lines.append(f"| {row['variant']} | {mean} | {deviation} | {difference} | {row['verdict']} |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
