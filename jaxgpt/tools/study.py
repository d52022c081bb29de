"""Train variants of an experiment with several seeds and report which differ by more than noise."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxgpt.config.serialize import differences
from jaxgpt.config.validate import check_count, short, short_repr
from jaxgpt.config.words import replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, Say, render_json
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.parallel.multihost import initialize
from jaxgpt.runs.bucket import HeldElsewhere
from jaxgpt.runs.directory import fetch_run, is_run, read_metadata
from jaxgpt.runs.pretrained import resolve_init_from
from jaxgpt.runs.resume import describe_data_changes
from jaxgpt.statistics import CONFIDENCE, count_pairs_needed, holm_levels, mean_interval, paired_p_values
from jaxgpt.tools.executor import Workers, open_executor
from jaxgpt.tools.grid import Curve, cell, finite_losses, format_table, train_grid, write_result

STUDY = "study.json"  # the result, next to the directories of the variants: the same whatever trains them
SECONDS = "study-seconds.json"  # what depends on the machine: the comparison at equal seconds, and the devices
# Fields that determine the validation data.
METRIC = """data.corpus data.path data.val_fraction train.eval_tokens
    data.tokenizer data.bpe_vocab_size""".split()
DISAGREEMENT = 0.1  # nats per token, and fraction: seeds with losses that differ by more than both have no average
DETECT = 0.01  # the difference of validation losses that `seeds_needed` seeds find


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """One variant compared with the first, at the same number of tokens or seconds."""

    variant: str
    losses: list[float | None]  # by seed, None if it diverged, NaN if it failed
    mean: float | None = None  # None, here and below, if a run diverged or the seeds disagree
    deviation: float | None = None  # standard deviation over the seeds, None for fewer than two
    difference: float | None = None  # mean over seeds of (loss - loss of the first variant with the same seed)
    margin: float | None = None  # half-width of the difference's interval with confidence 1 - level (Student's t)
    p_value: float | None = None  # by the paired t-test
    level: float | None = None  # Holm's procedure tests the difference at this level
    seeds_needed: int | None = None  # seeds that find a difference of `DETECT` with this spread in 80% of studies
    verdict: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A comparison of all variants."""

    at: float  # tokens or seconds of the shortest run
    rows: list[Comparison]  # none if some run had no validation until then
    __repr__ = short_repr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Result of a study."""

    tokens: Table
    seconds: Table
    seeds: int
    unit: str = ObjectiveConfig.unit  # what the validation losses are
    devices: list[str] = dataclasses.field(default_factory=list)  # kinds of devices that trained the runs
    __repr__ = short_repr

    def __str__(self) -> str:
        head = ["variant", "mean", "standard deviation", "difference from the first", "verdict"]
        head.append(f"seeds to see {DETECT}")
        parts, tests = [], 0
        for axis, unit, table in (("tokens", "tokens", self.tokens), ("seconds", "s", self.seconds)):
            at = f"{table.at:,.0f} {unit}" if table.at >= 100 else f"{table.at:.3g} {unit}"
            if not table.rows:
                parts.append(f"at equal {axis}: not all runs were validated within {at}, the length of the shortest")
                continue
            cells = []
            for row in table.rows:
                mean, deviation = cell(row.mean, "{:.4f}"), cell(row.deviation, "{:.4f}")
                difference = cell(row.difference, "{:+.4f}") + cell(row.margin, " ± {:.4f}")
                needed = cell(row.seeds_needed, "{:,}")
                cells.append([row.variant, mean, deviation, difference, row.verdict, needed])
                tests += row.p_value is not None
            parts += [
                f"validation loss ({self.unit}) at equal {axis}, {at}, over {self.seeds} seeds",
                format_table(head, cells),
            ]
        if tests:
            parts.append(
                f"Better and worse are corrected for {tests} comparisons (Holm): if nothing differs, at most 5% of "
                "studies find a difference."
            )
        if len(self.devices) > 1:
            parts.append(
                f"Devices of different kinds took part, which round sums differently: {', '.join(self.devices)}"
            )
        return "\n\n".join(parts)


def run_study(
    variants: Mapping[str, Experiment],
    directory: Path,
    *,
    seeds: int,
    say: Say = lambda text: None,
    workers: Workers = Workers(),  # noqa: B008, it is frozen
) -> Study | None:
    """Train or resume every variant with seeds 0, 1, ... in subdirectories, compare them, and write `study.json`.

    All variants are trained with one seed before the next seed, so that a change in the machine's speed affects all
    alike, and an interrupted study has complete rounds. The study may be run by several processes at once: whoever finds
    all runs complete returns it, and the others return None.

    Args:
        variants: the experiments by name. The others are compared with the first.
        directory: directory of the study.
        seeds: number of runs per variant.
        say: is given lines about the progress.
        workers: where the runs are trained. By default in this process, one after another.

    Raises:
        UserError: the variants cannot be compared, see `check_comparable`.
    """
    check_comparable(variants)
    seeds = check_count("seeds", seeds)
    if any(experiment.train.init_from is not None for experiment in variants.values()):
        _check_same_tokens(variants, directory)
    grid = [
        (
            f"seed {seed}, {name}",
            replace_fields(experiment, {"train.seed": seed, "train.sample_tokens": 0}),
            directory / slug(name) / f"seed-{seed}",
        )
        for seed in range(seeds)
        for name, experiment in variants.items()
    ]
    try:
        with open_executor(workers, directory) as executor:
            curves = train_grid(grid, say, executor, waits=False)
    except HeldElsewhere as e:
        say(str(e))
        return None
    unit = next(iter(variants.values())).objective.unit
    apart = DISAGREEMENT if unit == ObjectiveConfig.unit else math.inf
    by_variant = {name: curves[i :: len(variants)] for i, name in enumerate(variants)}
    devices = sorted({curve.device for curve in curves} - {""})
    found = Study(**compare(by_variant, apart=apart), seeds=seeds, unit=unit, devices=devices)
    content = dataclasses.asdict(found)
    of_machines = {name: content.pop(name) for name in ("seconds", "devices")}
    for file, part in ((STUDY, content), (SECONDS, of_machines)):
        write_result(directory, file, render_json(part, indent=1, ensure_ascii=False) + "\n")
    return found


def check_comparable(variants: Mapping[str, Experiment]) -> None:
    """Raise `UserError` unless all variants have the same validation data and different directories."""
    if len(variants) < 2:
        raise UserError(f"a study needs at least two variants, got {len(variants)}: {', '.join(variants) or 'none'}")
    first, *others = variants
    for name in others:
        units = [variants[v].objective.unit for v in (first, name)]
        if units[0] != units[1]:
            raise _no_comparison(first, name, f"they validate in {' and '.join(units)}", "kind of objective")
        for field, (ours, theirs) in differences(variants[first], variants[name]).items():
            if field in METRIC:
                raise _no_comparison(first, name, f"{field} is {short(ours)} and {short(theirs)}", "value")
    places = [".", "..", STUDY, SECONDS, *(slug(name).casefold() for name in variants)]
    if twice := [name for name in variants if places.count(slug(name).casefold()) > 1]:
        raise UserError(f"variants {', '.join(map(repr, twice))} have no directory of their own: give them other names")


def _check_same_tokens(variants: Mapping[str, Experiment], directory: Path) -> None:
    """Raise `UserError` unless all variants validate on the same tokens, with the tokenizers of their weights."""
    data: dict[str, Json] = {}
    first = next(iter(variants))
    for name, experiment in variants.items():
        run = fetch_run(directory / slug(name) / "seed-0")
        if is_run(run):
            data[name] = read_metadata(run).data
        else:
            initialize(experiment.parallel)
            full, _ = resolve_init_from(experiment)
            data[name] = full.data.open_dataset(full.model).fingerprint
        if changed := describe_data_changes(data[first], data[name]):
            raise _no_comparison(first, name, ", ".join(changed[:8]), "data and the tokenizer of the weights")


def _no_comparison(first: str, name: str, differing: str, remedy: str) -> UserError:
    return UserError(
        f"variants {first!r} and {name!r} do not share a metric: {differing}. Losses per token on different texts or "
        f"tokens cannot be compared: give both the same {remedy}"
    )


def slug(name: str) -> str:
    """Return the directory name of a variant."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-") or "variant"


def compare(curves: Mapping[str, Sequence[Curve]], *, apart: float = DISAGREEMENT) -> dict[str, Table]:
    """Compare all variants at the tokens, and at the seconds, of the shortest run, by linear interpolation.

    apart: see `compare_losses`.
    """
    points: dict[str, float] = {}
    losses: dict[str, dict[str, list[float | None]]] = {}
    complete = [curve for seeds in curves.values() for curve in seeds if curve.losses]
    for axis in ("tokens", "seconds"):
        at = points[axis] = min((getattr(curve, axis)[-1] for curve in complete), default=0)
        # A run has no loss before its first validation.
        known = at >= max((getattr(curve, axis)[0] for curve in complete), default=math.inf)
        losses[axis] = {
            name: [float(np.interp(at, getattr(c, axis), c.losses)) if c.losses else c.last for c in seeds]
            for name, seeds in (curves if known else {}).items()
        }
    return {axis: Table(at=points[axis], rows=rows) for axis, rows in compare_losses(losses, apart=apart).items()}


def compare_losses(
    tables: Mapping[str, Mapping[str, Sequence[float | None]]], *, apart: float = DISAGREEMENT
) -> dict[str, list[Comparison]]:
    """Compare each variant with the first, paired by seed. All comparisons of all tables are one family of tests.

    The tables share its error equally (Bonferroni), so that none depends on another. Within one it is Holm's procedure.

    Args:
        tables: losses by seed of each variant, for each table. None means that the run diverged, NaN that it failed.
        apart: the difference, and the fraction, from which the losses of a variant's seeds have no average.
    """
    rows: dict[tuple[str, str], Comparison] = {}
    family: dict[tuple[str, str], np.ndarray] = {}
    for table, losses in tables.items():
        notes = {name: _describe_failures(by_seed, apart) for name, by_seed in losses.items()}
        first = next(iter(losses), "")
        for name, by_seed in losses.items():
            regular, x = not notes[name], np.array(by_seed, np.float64)
            rows[table, name] = Comparison(
                variant=name,
                losses=list(by_seed),
                mean=float(x.mean()) if regular else None,
                deviation=float(x.std(ddof=1)) if regular and len(x) > 1 else None,
                verdict=notes[name] or ("the first" if name == first else f"the first: {notes[first]}"),
            )
            if name != first and regular and not notes[first]:
                family[table, name] = x - np.array(losses[first], np.float64)
    several = [x for x in family.values() if len(x) > 1]  # all or none, since all have the same seeds
    p_values = dict(zip(family, paired_p_values(several) if several else np.ones(len(family)), strict=True))
    for table in tables:
        mine = [key for key in family if key[0] == table]
        share = (1 - CONFIDENCE) / len(tables)
        levels = holm_levels([p_values[key] for key in mine], share)
        for key, level in zip(mine, levels, strict=True):
            row, x, p = rows[key], family[key], p_values[key]
            row.difference, row.verdict = float(x.mean()), "one seed: no interval"
            if several:
                row.margin = float(mean_interval(x, 1 - level).margin)
                row.p_value, row.level = float(p), float(level)
                row.seeds_needed = count_pairs_needed(x.std(ddof=1), DETECT, level=(1 - CONFIDENCE) / len(family))
                row.verdict = "no more than noise" if p > level else "better" if row.difference < 0 else "worse"
    return {table: [rows[table, name] for name in losses] for table, losses in tables.items()}


def _describe_failures(losses: Sequence[float | None], apart: float) -> str:
    """Return why the losses of a variant have no meaningful average, or an empty text."""
    finite = finite_losses(losses)
    if None in losses:
        return f"{losses.count(None)} of {len(losses)} diverged"
    if len(finite) < len(losses):
        return f"{len(losses) - len(finite)} of {len(losses)} failed"
    if max(finite) - min(finite) > apart * max(1.0, min(finite)):
        return f"seeds disagree: {min(finite):.4f} to {max(finite):.4f}"
    return ""
