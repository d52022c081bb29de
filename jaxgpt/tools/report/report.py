"""A run's report: what it learnt, how fast, what it writes, and what of that it has by heart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, to_dict
from jaxgpt.config.validate import check_count
from jaxgpt.data.tokens import Dataset, Tokens
from jaxgpt.errors import UserError
from jaxgpt.parallel.flops import count_parameters
from jaxgpt.run import Run, load
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.reopen import reopen_dataset
from jaxgpt.tools.html_page import Arrays, page, rounded
from jaxgpt.tools.report.curve_check import check_curve
from jaxgpt.tools.report.memorization import Corpus, Novelty, novelty
from jaxgpt.tools.report.reference_band import find_band

MOST_TEXT = 2**26  # characters of a corpus that are looked in, from its beginning


def report(run: Run, *, samples: int = 4, tokens: int = 400) -> tuple[dict[str, Any], str]:
    """(what `summary.json` holds, the page) of a run.

    samples, tokens: texts that are written to be compared with the training text, and how long each is.
    """
    samples, tokens = check_count("samples", samples), check_count("tokens", tokens)
    lines = read_metrics(run.directory / "metrics.jsonl")
    training = [(line["step"], _number(line.get("loss"))) for line in lines if "loss" in line]
    validation = [(line["step"], _number(line.get("val_loss"))) for line in lines if "val_loss" in line]
    band, why_no_band = find_band(run.metadata)
    check = check_curve(validation, training, band)
    finite = [(loss, step) for step, loss in validation if math.isfinite(loss)]
    best = min(finite, default=(None, None))
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    skipped = [line["step"] for line in lines if "skipped" in line]
    dataset, why_no_text = _dataset(run)
    through_time = _through_time(run, tokens=min(tokens, 200))
    found, beside, why = _by_heart(run, dataset, why_no_text, samples, tokens)
    summary: dict[str, Any] = {
        "run": str(run.directory),
        "experiment": run.experiment.name,
        "verdict": check.words,
        "judged": dataclasses.asdict(check),
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
        "device": run.metadata.device,
        "samples": through_time,
        "memorisation": None if found is None or beside is None else _told(found, beside, samples),
        "why_no_memorisation": why,
        "configuration": to_dict(run.experiment),
    }
    return summary, _report_page(
        summary, lines, changed=list(differences(run.experiment, Experiment(name=run.experiment.name)))
    )


def _number(value: Any) -> float:
    """Of metrics.jsonl, where what is not finite is null."""
    return math.nan if value is None else float(value)


def _dataset(run: Run) -> tuple[Dataset | None, str]:
    if run.metadata.imported is not None:
        return None, "The model was imported, without its text."
    if run.experiment.data.is_packed:
        return None, "It was trained on conversations or pairs, not on one text."
    try:
        return reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back"), ""
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


def _report_page(summary: dict[str, Any], lines: Sequence[dict[str, Any]], changed: Sequence[str]) -> str:
    """Return one self-contained HTML file. lines: of metrics.jsonl. changed: fields that are not at their default."""

    def points(name: str) -> list[list[Any]]:
        return [[line["step"], rounded(line[name], 6)] for line in lines if line.get(name) is not None]

    configuration = [
        [f"{part}.{name}", value, f"{part}.{name}" in changed]
        for part, values in summary["configuration"].items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]
    data = {
        "title": f"Report of {summary['experiment']}",
        "summary": {name: value for name, value in summary.items() if name != "configuration"},
        "training": points("loss"),
        "validation": points("val_loss"),
        "rates": points("tokens_per_second"),
        "learning_rates": points("learning_rate"),
        "grad_norms": points("grad_norm"),
        "configuration": configuration,
    }
    return page("report/report", data["title"], data, Arrays())
