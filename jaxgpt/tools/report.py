"""Summarise a run: losses, speed and samples. `report.js` draws the page."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxgpt.config.serialize import differences, to_dict
from jaxgpt.config.validate import Size, check_count
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, Result, new_file
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import Run, load, load_run
from jaxgpt.runs.bucket import name_of
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.directory import find_run
from jaxgpt.runs.metrics import finite_values, read_metrics
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers, write_page

UNPLOTTED = {"step", "tokens", "mfu", "seconds", "skipped", "val_losses"}  # what a line of the log has, and no curve


def report(run: str | Path | None, *, out: str | None = None, force: bool = False, tokens: Size = 200) -> Result:
    """Summarise a run as an HTML page.

    The page has a curve of each logged metric, and a sample of each checkpoint.

    Args:
        run: run directory, by default the newest under runs/
        out: the file to write, by default report.html in the run directory, or here for a run in a bucket
        force: overwrite a file that exists
        tokens: tokens per sample
    """
    directory = find_run(run)
    place = directory if name_of(directory) == str(directory) else Path()
    page = new_file(out or str(place / "report.html"), force=force)
    summary, html = make_report(load(directory), tokens=tokens)
    return Result(summary, write_page(page, html))


def make_report(run: Run, *, tokens: int = 200) -> tuple[Json, str]:
    """Return a summary of a run and the HTML page: see `report`."""
    lines = read_metrics(run.directory / "metrics.jsonl")
    names = dict.fromkeys(name for line in lines for name in line if name not in UNPLOTTED)
    curves = {name: finite_values(lines, name) for name in names}
    validation, rates = curves.get("val_loss", []), [rate for _, rate in curves.get("tokens_per_second", [])]
    best, at = min(((loss, step) for step, loss in validation), default=(None, None))
    seconds, mfus = finite_values(lines, "seconds"), finite_values(lines, "mfu")
    summary: Json = {
        "run": name_of(run.directory),
        "experiment": run.experiment.name,
        "steps": {"planned": run.experiment.train.steps, "logged": max((line["step"] for line in lines), default=0)},
        "validation_loss": {"best": best, "at": at, "last": validation[-1][1] if validation else None},
        "skipped_steps": [line["step"] for line in lines if "skipped" in line],
        "throughput": {
            "tokens_per_second": float(np.median(rates)) if rates else None,
            "mfu": mfus[-1][1] if mfus else None,
            "seconds": max((value for _, value in seconds), default=None),
        },
        "parameters": count_parameters(run.model.shapes()),
        "device": run.metadata.device,
        "samples": _sample_checkpoints(run, check_count("tokens", tokens)),
        "configuration": to_dict(run.experiment),
    }
    changed = differences(run.experiment, Experiment(name=run.experiment.name))
    fields = []
    for part, values in summary["configuration"].items():
        if isinstance(values, dict):
            fields += [[f"{part}.{name}", value, f"{part}.{name}" in changed] for name, value in values.items()]
    data: Json = {
        "title": f"Report of {run.experiment.name}",
        "summary": summary,
        "unit": run.experiment.objective.unit,
        "curves": {name: [[step, round_numbers(x, 6)] for step, x in curve] for name, curve in curves.items()},
        "configuration": fields,
    }
    return summary, render_html(["report"], data, Arrays())


def _sample_checkpoints(run: Run, tokens: int) -> list[Json]:
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
