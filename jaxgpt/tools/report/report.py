"""A run's report: what it learnt, how fast, what it writes, and what of that it has by heart."""

from __future__ import annotations

import dataclasses
import math
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, from_dict, to_dict
from jaxgpt.config.validate import check_count
from jaxgpt.data.tokens import Dataset, Tokens
from jaxgpt.errors import UserError
from jaxgpt.files import read_json, render_json
from jaxgpt.parallel.flops import count_parameters
from jaxgpt.run import Run, load
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.metadata import CHANGEABLE, Record, changed_data, read_record
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.reopen import reopen_dataset
from jaxgpt.tools.report.memorization import Corpus, Novelty, novelty
from jaxgpt.tools.report.views import report_page
from jaxgpt.tools.study.curve_check import Band, as_band, judge

MOST_TEXT = 2**26  # characters of a corpus that are looked in, from its beginning
LARGEST_BAND = 2**20  # bytes of a band's file
# Fields that do not change where a curve lies, or that the data's fingerprint tells better, by how their names begin.
FREE = (*CHANGEABLE, "train.seed")


def report(run: Run, *, samples: int = 4, tokens: int = 400) -> tuple[dict[str, Any], str]:
    """(what `summary.json` holds, the page) of a run.

    samples, tokens: texts that are written to be compared with the training text, and how long each is.
    """
    samples, tokens = check_count("samples", samples), check_count("tokens", tokens)
    record, lines = read_record(run.directory), read_metrics(run.directory / "metrics.jsonl")
    training = [(line["step"], _number(line.get("loss"))) for line in lines if "loss" in line]
    validation = [(line["step"], _number(line.get("val_loss"))) for line in lines if "val_loss" in line]
    band, why_no_band = band_for(record)
    verdict = judge(validation, training, band)
    finite = [(loss, step) for step, loss in validation if math.isfinite(loss)]
    best = min(finite, default=(None, None))
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    skipped = [line["step"] for line in lines if "skipped" in line]
    dataset, why_no_text = _dataset(run, record)
    through_time = _through_time(run, tokens=min(tokens, 200))
    found, beside, why = _by_heart(run, dataset, why_no_text, samples, tokens)
    summary: dict[str, Any] = {
        "run": str(run.directory),
        "experiment": run.experiment.name,
        "verdict": verdict.words,
        "judged": dataclasses.asdict(verdict),
        "steps": {"planned": run.experiment.train.steps, "logged": max((line["step"] for line in lines), default=0)},
        "validation_loss": {"best": best[0], "at": best[1], "last": finite[-1][0] if finite else None},
        "training_loss": training[-1][1] if training and math.isfinite(training[-1][1]) else None,
        "skipped_steps": skipped,
        "band": None if band is None else dataclasses.asdict(band),
        "why_no_band": why_no_band,
        "throughput": {
            "tokens_per_second": float(np.median(rates)) if rates else None,
            "least": min(rates, default=None),
            "most": max(rates, default=None),
            "mfu": next((line["mfu"] for line in reversed(lines) if line.get("mfu") is not None), None),
            "seconds": max((line["seconds"] for line in lines if line.get("seconds")), default=None),
        },
        "parameters": count_parameters(run.model.shapes()),
        "device": record.device,
        "samples": through_time,
        "memorisation": None if found is None or beside is None else _told(found, beside, samples),
        "why_no_memorisation": why,
        "configuration": to_dict(run.experiment),
    }
    return summary, report_page(summary, lines, changed=_changed(run.experiment))


def band_for(record: Record) -> tuple[Band | None, str]:
    """The band that is shipped for this very experiment on these very data; or None, and why."""
    file = bands().joinpath(f"{record.experiment.name}.json")
    if not file.is_file():
        return None, f"None is shipped for {record.experiment.name}."
    with resources.as_file(file) as path:
        held = read_json(path, LARGEST_BAND)
    differing = differing_fields(record.experiment, from_dict(Experiment, held["experiment"], ""))
    if differing:
        return None, f"The one that is shipped has another configuration: {', '.join(differing[:6])}."
    if changed_data(record.data, held["data"]):
        return None, "The one that is shipped is of another text."
    return as_band(held["band"]), ""


def bands() -> Traversable:
    """The directory of those that are shipped."""
    return resources.files("jaxgpt.tools.study").joinpath("bands")


def band_file(record: Record, band: Band, made: dict[str, Any]) -> str:
    """What `bands/NAME.json` holds."""
    held = {
        "experiment": to_dict(record.experiment),
        "data": record.data,
        "made": made,
        "band": dataclasses.asdict(band),
    }
    return render_json(held, indent=1) + "\n"


def differing_fields(ours: Experiment, theirs: Experiment) -> list[str]:
    """Of those that decide where a curve lies."""
    return [name for name in differences(ours, theirs) if not name.startswith(FREE)]


def _changed(experiment: Experiment) -> list[str]:
    """Fields that are not at their default."""
    return list(differences(experiment, Experiment(name=experiment.name)))


def _number(value: Any) -> float:
    """Of metrics.jsonl, where what is not finite is null."""
    return math.nan if value is None else float(value)


def _dataset(run: Run, record: Record) -> tuple[Dataset | None, str]:
    if record.imported is not None:
        return None, "The model was imported, without its text."
    if run.experiment.data.is_packed:
        return None, "It was trained on conversations or pairs, not on one text."
    try:
        return reopen_dataset(run.directory, record, run.experiment.data, remedy="put that text back"), ""
    except UserError as e:  # a run that was copied to another machine
        return None, f"Its training text could not be read: {e}"


def _through_time(run: Run, tokens: int) -> list[dict[str, Any]]:
    """What each checkpoint that is kept writes, from the same prompt and the same seed."""
    checkpoints = open_checkpoints(run.directory)
    steps = checkpoints.steps()
    checkpoints.close()
    found, prompt = [], run.experiment.train.sample_prompt
    chat = run.experiment.data.is_chat
    for step in steps:
        try:
            at = load(run.directory, which=step)
            text = at.sample(prompt, max_new_tokens=tokens, seed=0, chat=chat)
        except UserError as e:  # a damaged one, or a prompt that its text has no letters for
            text = f"({e})"
        found.append(
            {"step": step, "prompt": prompt, "text": text, "val_loss": run.val_loss if step == run.step else None}
        )
    return found


def _by_heart(
    run: Run, dataset: Dataset | None, why: str, samples: int, tokens: int
) -> tuple[Novelty | None, Novelty | None, str]:
    """(of what the run writes, of as much held-out text, why neither)."""
    if dataset is None or not isinstance(dataset.train, Tokens) or not isinstance(dataset.val, Tokens):
        return None, None, why or "There is no text to compare with."
    decode = run.tokenizer.decode
    try:
        corpus = Corpus(decode(dataset.train.read(0, min(len(dataset.train), MOST_TEXT))))
    except UserError as e:  # without the package for it
        return None, None, f"It was not looked for: {e}"
    prompt = run.experiment.train.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError:
        prompt = ""
    written = [str(run.sample(prompt, max_new_tokens=tokens, seed=seed)) for seed in range(samples)]
    starts = np.linspace(0, max(len(dataset.val) - tokens, 0), samples).astype(int)
    held = [decode(dataset.val.read(int(start), min(tokens, len(dataset.val)))) for start in starts]
    return novelty(corpus, written), novelty(corpus, held), ""


def _told(found: Novelty, beside: Novelty, samples: int) -> dict[str, Any]:
    def one(n: Novelty) -> dict[str, Any]:
        return dataclasses.asdict(n) | {"novel": {str(length): share for length, share in n.novel.items()}}

    return {"samples": samples, "written": one(found), "held_out": one(beside)}
