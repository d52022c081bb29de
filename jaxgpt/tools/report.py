"""Summarise a run: losses, speed and samples. `report.js` draws the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.serialize import differences, to_dict
from jaxgpt.config.validate import Size, check_count
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result, new_file, render_json, write_whole
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import Run, load, load_run
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.directory import find_run
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers, write_page

RISE = 0.01  # relative rise above the best validation loss that counts as worse
UNPLOTTED = {"step", "tokens", "mfu", "seconds", "skipped", "val_losses"}  # what a line of the log has, and no curve


def report(run: str | Path | None, *, out: str | None = None, force: bool = False, tokens: Size = 200) -> Result:
    """Summarise a run as an HTML page and JSON.

    The page has losses, speed, and a sample of each checkpoint.

    Args:
        run: run directory, by default the newest under runs/
        out: the directory for report.html and summary.json, by default the run directory
        force: overwrite files that exist
        tokens: tokens per sample
    """
    directory = find_run(run)
    folder = directory if out is None else Path(out)
    page = new_file(str(folder / "report.html"), force=force)
    new_file(str(folder / "summary.json"), force=force or page.exists())  # it belongs to the page that is replaced
    summary, html = make_report(load(directory), tokens=tokens)
    written = write_page(page, html)
    write_whole(folder / "summary.json", render_json(summary, indent=1, ensure_ascii=False) + "\n")
    return Result(summary, f"{summary['experiment']}: {summary['verdict']}\n{written}")


def make_report(run: Run, *, tokens: int = 200) -> tuple[dict[str, Any], str]:
    """Return (the content of `summary.json`, the HTML page) of a run: see `report`."""
    lines = read_metrics(run.directory / "metrics.jsonl")
    names = dict.fromkeys(name for line in lines for name in line if name not in UNPLOTTED)
    curves = {name: finite_values(lines, name) for name in names}
    validation, rates = curves.get("val_loss", []), [rate for _, rate in curves.get("tokens_per_second", [])]
    best, at = min(((loss, step) for step, loss in validation), default=(None, None))
    seconds, mfus = finite_values(lines, "seconds"), finite_values(lines, "mfu")
    summary: dict[str, Any] = {
        "run": str(run.directory),
        "experiment": run.experiment.name,
        "verdict": _describe(*judge_learning(_every_loss(lines, "val_loss"), _every_loss(lines, "loss"))),
        "steps": {"planned": run.experiment.train.steps, "logged": max((line["step"] for line in lines), default=0)},
        "validation_loss": {"best": best, "at": at, "last": validation[-1][1] if validation else None},
        "skipped_steps": [line["step"] for line in lines if "skipped" in line],
        "throughput": {
            "tokens_per_second": float(np.median(rates)) if rates else None,
            "least": min(rates, default=None),
            "most": max(rates, default=None),
            "mfu": mfus[-1][1] if mfus else None,
            "seconds": max((value for _, value in seconds), default=None),
        },
        "parameters": count_parameters(run.model.shapes()),
        "device": run.metadata.device,
        "samples": _sample_checkpoints(run, check_count("tokens", tokens)),
    }
    configuration = to_dict(run.experiment)
    changed = differences(run.experiment, Experiment(name=run.experiment.name))
    data: dict[str, Any] = {
        "title": f"Report of {run.experiment.name}",
        "summary": summary,
        "unit": run.experiment.objective.unit,
        "curves": {name: [[step, round_numbers(x, 6)] for step, x in curve] for name, curve in curves.items()},
        "configuration": [
            [f"{part}.{name}", value, f"{part}.{name}" in changed]
            for part, values in configuration.items()
            if isinstance(values, dict)
            for name, value in values.items()
        ],
    }
    return summary | {"configuration": configuration}, render_html(["report"], data, Arrays())


def _every_loss(lines: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return (step, loss) of each line that has this loss, nan where the log has null for one that was not finite."""
    return [(line["step"], math.nan if line[name] is None else line[name]) for line in lines if name in line]


def _describe(learning: str, since: int | None) -> str:
    """Return what `judge_learning` found, in words."""
    if learning in ("over-fitting", "diverging"):
        return f"{learning} from the start" if since is None else f"{learning} since step {since:,}"
    return {"yes": "learning", "unknown": "too few validations to judge"}[learning]


def judge_learning(
    validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]
) -> tuple[str, int | None]:
    """Judge a run by its losses, each (step, loss).

    Over-fitting: the validation loss is above its best by more than 1%, and by more than any rise from which the second
    half of the curve has recovered. The training loss has kept falling meanwhile. Diverging: the training loss has risen
    too, or a loss is not finite. The training losses, each of one batch, are smoothed over a tenth of them.

    Returns:
        "yes", "over-fitting", "diverging" or "unknown", and the step of the best validation loss if it got worse.
    """
    if any(not math.isfinite(loss) for _, loss in (*validation, *training)):
        finite = [(loss, step) for step, loss in validation if math.isfinite(loss)]
        return "diverging", min(finite)[1] if finite else None
    if len(validation) < 2:
        return "unknown", None
    best_step, best = min(validation, key=lambda point: point[1])
    last_step, last = validation[-1]
    # Another rise may be as large as one from which the curve's second half has recovered.
    half, swing = [loss for step, loss in validation if 2 * step >= last_step], RISE
    for i, loss in enumerate(half[:-1]):
        lowest = min(half[: i + 1])
        if lowest > 0 and min(half[i + 1 :]) <= lowest * (1 + RISE):
            swing = max(swing, loss / lowest - 1)
    if last - best <= swing * best or not training:
        return "yes", None
    steps, losses = zip(*training, strict=True)
    width = max(len(training) // 20, 1)
    places = (int(np.argmin(np.abs(np.subtract(steps, step)))) for step in (best_step, last_step))
    before, after = (np.median(losses[max(at - width, 0) : at + width + 1]) for at in places)
    return ("over-fitting" if after <= before else "diverging"), best_step


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
        samples.append({"step": step, "prompt": prompt, "text": text})
    return samples
