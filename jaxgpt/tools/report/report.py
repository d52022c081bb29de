"""Summarise a run: losses, speed, samples, and how much of them is memorised. `report.js` draws the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences
from jaxgpt.config.validate import check_count
from jaxgpt.data.pipeline import Tokens
from jaxgpt.errors import UserError
from jaxgpt.parallel.flops import count_parameters
from jaxgpt.run import Run, load_run
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.runs.resume import reopen_dataset
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers
from jaxgpt.tools.report.curve_check import check_curve
from jaxgpt.tools.report.memorization import SuffixArray, measure_novelty
from jaxgpt.tools.report.reference_band import find_band

MOST_TEXT = 2**26  # leading tokens of the training text that are searched for memorised text


def make_report(run: Run, *, samples: int = 4, tokens: int = 400) -> tuple[dict[str, Any], str]:
    """Return (the content of `summary.json`, the HTML page) of a run.

    Args:
        run: the run to summarise.
        samples: the number of texts to generate and to compare with the training text.
        tokens: the length of each.
    """
    samples, tokens = check_count("samples", samples), check_count("tokens", tokens)
    lines = read_metrics(run.directory / "metrics.jsonl")
    training, finite = _curve(lines, "loss"), finite_values(lines, "val_loss")
    band, why_no_band = find_band(run.metadata)
    check = check_curve(_curve(lines, "val_loss"), training, band)
    best = min(((loss, step) for step, loss in finite), default=(None, None))
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    memorization, why_no_memorization = _measure_memorization(run, samples, tokens)
    summary: dict[str, Any] = {
        "run": str(run.directory),
        "experiment": run.experiment.name,
        "verdict": check.words,
        "judged": dataclasses.asdict(check),
        "steps": {"planned": run.experiment.train.steps, "logged": max((line["step"] for line in lines), default=0)},
        "validation_loss": {"best": best[0], "at": best[1], "last": finite[-1][1] if finite else None},
        "training_loss": training[-1][1] if training and math.isfinite(training[-1][1]) else None,
        "skipped_steps": [line["step"] for line in lines if "skipped" in line],
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
        "samples": _sample_checkpoints(run, tokens=min(tokens, 200)),
        "memorisation": memorization,
        "why_no_memorisation": why_no_memorization,
        "configuration": dataclasses.asdict(run.experiment),
    }
    return summary, _render_page(run.experiment, summary, lines)


def _curve(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, value) of the lines of metrics.jsonl with this value; null, which was not finite, becomes nan."""
    return [(line["step"], math.nan if line[name] is None else line[name]) for line in lines if name in line]


def _sample_checkpoints(run: Run, tokens: int) -> list[dict[str, Any]]:
    """Sample from each checkpoint, with the same prompt and the same seed."""
    checkpoints = open_checkpoints(run.directory)
    steps = checkpoints.steps()
    checkpoints.close()
    samples, prompt = [], run.experiment.train.sample_prompt
    for step in steps:
        try:
            at_step = load_run(run.metadata, which=step)
            text = at_step.sample(prompt, max_new_tokens=tokens, seed=0, chat=run.experiment.data.is_chat)
        except UserError as e:  # a damaged checkpoint, or a prompt that the tokenizer cannot encode
            text = f"({e})"
        val_loss = run.val_loss if step == run.step else None
        samples.append({"step": step, "prompt": prompt, "text": text, "val_loss": val_loss})
    return samples


def _measure_memorization(run: Run, samples: int, tokens: int) -> tuple[dict[str, Any] | None, str]:
    """Compare generated texts, and as much held-out text, with the training text; or return None and the reason."""
    if run.metadata.imported is not None:
        return None, "Not measured: the model was imported without its training text."
    if run.experiment.data.is_packed:
        return None, "Not measured: the run was trained on conversations or pairs, not on a text."
    try:
        dataset = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back")
    except UserError as e:  # a run that was copied to another machine
        return None, f"Not measured: the training text could not be read: {e}"
    train, val, decode = dataset.train, dataset.val, run.tokenizer.decode
    assert isinstance(train, Tokens) and isinstance(val, Tokens), "the data are a text"
    try:
        corpus = SuffixArray(decode(train.read(0, min(len(train), MOST_TEXT))))
    except UserError as e:  # the package for it is missing
        return None, f"Not measured: {e}"
    prompt = run.experiment.train.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError:
        prompt = ""
    generated = [str(run.sample(prompt, max_new_tokens=tokens, seed=seed)) for seed in range(samples)]
    starts = np.linspace(0, max(len(val) - tokens, 0), samples).astype(int)
    held_out = [decode(val.read(int(start), min(tokens, len(val)))) for start in starts]
    parts = {"written": generated, "held_out": held_out}
    return {"samples": samples} | {name: measure_novelty(corpus, texts) for name, texts in parts.items()}, ""


def _render_page(experiment: Experiment, summary: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Return one self-contained HTML file. `lines` are those of metrics.jsonl."""
    changed = list(differences(experiment, Experiment(name=experiment.name)))

    def points(name: str) -> list[list[Any]]:
        return [[line["step"], round_numbers(line[name], 6)] for line in lines if line.get(name) is not None]

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
    return render_html(["report/report"], data["title"], data, Arrays())
