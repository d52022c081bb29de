"""Summarise a run: losses, speed, samples, and how much of them is memorised. `report.js` draws the page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences, to_dict
from jaxgpt.config.validate import Count, Size, check_count
from jaxgpt.data.pipeline import Tokens
from jaxgpt.errors import UserError
from jaxgpt.files import new_file, render_json, write_whole
from jaxgpt.parallel.device import count_parameters
from jaxgpt.run import Run, load, load_run
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.directory import find_run
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.runs.training import reopen_dataset
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers

RISE = 0.01  # relative rise above the best validation loss that counts as worse
MOST_TEXT = 2**26  # leading tokens of the training text that are searched for memorised text
LENGTHS = (5, 10, 20, 50)  # n of the n-grams, in characters
SHOWN = 5  # longest overlaps that are reported
SAMPLED = 200  # most tokens of each checkpoint's sample
# Curves of the page, and their names in metrics.jsonl.
CURVES = {
    "training": "loss",
    "validation": "val_loss",
    "rates": "tokens_per_second",
    "learning_rates": "learning_rate",
    "grad_norms": "grad_norm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Result of `report`: what was written, and where."""

    page: Path
    summary: dict[str, Any]  # content of `summary.json`
    html: str

    def to_json(self) -> dict[str, Any]:
        """Return the summary."""
        return self.summary

    def __str__(self) -> str:
        size = f"{len(self.html.encode()) / 1e3:,.0f} kB"
        return f"{self.summary['experiment']}: {self.summary['verdict']}\n{self.page}: {size}; open it in a browser"


def report(
    run: str | Path | None, *, out: str | None = None, force: bool = False, samples: Count = 4, tokens: Size = 400
) -> Report:
    """Summarise a run as an HTML page and JSON.

    The page has losses, speed and samples, and how much of the samples is memorised.

    Args:
        run: run directory; None: the newest under runs/
        out: the directory for report.html and summary.json; None: the run directory
        force: overwrite files that exist
        samples: number of texts to generate and to compare with the training text
        tokens: tokens per text
    """
    directory = find_run(run)
    folder = directory if out is None else Path(out)
    page = new_file(str(folder / "report.html"), force=force)
    new_file(str(folder / "summary.json"), force=force or page.exists())  # it belongs to the page that is replaced
    summary, html = make_report(load(directory), samples=samples, tokens=tokens)
    write_whole(page, html)
    write_whole(folder / "summary.json", render_json(summary, indent=1, ensure_ascii=False) + "\n")
    return Report(page=page, summary=summary, html=html)


def make_report(run: Run, *, samples: int = 4, tokens: int = 400) -> tuple[dict[str, Any], str]:
    """Return (the content of `summary.json`, the HTML page) of a run; see `report`."""
    samples, tokens = check_count("samples", samples), check_count("tokens", tokens)
    lines = read_metrics(run.directory / "metrics.jsonl")
    curves = {  # (step, value); null, which was not finite, becomes nan
        curve: [(line["step"], math.nan if line[name] is None else line[name]) for line in lines if name in line]
        for curve, name in CURVES.items()
    }
    training, validation = curves["training"], curves["validation"]
    finite = [(loss, step) for step, loss in validation if math.isfinite(loss)]
    learning, since = judge_learning(validation, training)
    verdict = f"{learning} from the start" if since is None else f"{learning} since step {since:,}"
    best, at = min(finite, default=(None, None))
    rates = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    try:
        memorization, why_no_memorization = _measure_memorization(run, samples, tokens), ""
    except UserError as e:
        memorization, why_no_memorization = None, f"Not measured: {e}"
    summary: dict[str, Any] = {
        "run": str(run.directory),
        "experiment": run.experiment.name,
        "verdict": {"yes": "learning", "unknown": "too few validations to judge"}.get(learning, verdict),
        "judged": {"learning": learning, "learning_since": since},
        "steps": {"planned": run.experiment.train.steps, "logged": max((line["step"] for line in lines), default=0)},
        "validation_loss": {"best": best, "at": at, "last": finite[-1][0] if finite else None},
        "training_loss": training[-1][1] if training and math.isfinite(training[-1][1]) else None,
        "skipped_steps": [line["step"] for line in lines if "skipped" in line],
        "throughput": {
            "tokens_per_second": float(np.median(rates)) if rates else None,
            "least": min(rates, default=None),
            "most": max(rates, default=None),
            "mfu": next((line["mfu"] for line in reversed(lines) if line.get("mfu") is not None), None),
            "seconds": max((line["seconds"] for line in lines if line.get("seconds")), default=None),
        },
        "parameters": count_parameters(run.model.shapes()),
        "device": run.metadata.device,
        "samples": _sample_checkpoints(run, min(tokens, SAMPLED)),
        "memorisation": memorization,
        "why_no_memorisation": why_no_memorization,
        "configuration": to_dict(run.experiment),
    }
    changed = differences(run.experiment, Experiment(name=run.experiment.name))
    data: dict[str, Any] = {
        "title": f"Report of {run.experiment.name}",
        "summary": {name: x for name, x in summary.items() if name != "configuration"},
    }
    for curve, points in curves.items():
        data[curve] = [[step, round_numbers(x, 6)] for step, x in points if not math.isnan(x)]
    data["configuration"] = [
        [f"{part}.{name}", value, f"{part}.{name}" in changed]
        for part, values in summary["configuration"].items()
        if isinstance(values, dict)
        for name, value in values.items()
    ]
    return summary, render_html(["report"], data, Arrays())


def judge_learning(
    validation: Sequence[tuple[int, float]], training: Sequence[tuple[int, float]]
) -> tuple[str, int | None]:
    """Judge a run by its losses, each (step, nats per token).

    Over-fitting: the validation loss is above its best by more than 1%, and by more than any rise from which the second
    half of the curve has recovered, while the training loss has kept falling. Diverging: the training loss has risen
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

    def smooth(step: int) -> float:
        """Return the median of a tenth of the training losses, around a step."""
        width = max(len(training) // 20, 1)
        at = int(np.argmin([abs(s - step) for s, _ in training]))
        return float(np.median([loss for _, loss in training[max(at - width, 0) : at + width + 1]]))

    return ("over-fitting" if smooth(last_step) <= smooth(best_step) else "diverging"), best_step


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


def _measure_memorization(run: Run, samples: int, tokens: int) -> dict[str, Any]:
    """Compare generated texts, and as much held-out text, with the training text. Raises `UserError` without it."""
    if run.metadata.imported is not None:
        raise UserError("the model was imported without its training text.")
    if run.experiment.data.is_packed:
        raise UserError("the run was trained on conversations or pairs, not on a text.")
    try:
        dataset = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back")
    except UserError as e:  # a run that was copied to another machine
        raise UserError(f"the training text could not be read: {e}") from None
    train, val, decode = dataset.train, dataset.val, run.tokenizer.decode
    if not isinstance(train, Tokens) or not isinstance(val, Tokens):
        raise UserError("the run was trained on a mixture, not on a text.")
    corpus = SuffixArray(decode(train.read(0, min(len(train), MOST_TEXT))))
    prompt = run.experiment.train.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError:
        prompt = ""
    generated = [str(run.sample(prompt, max_new_tokens=tokens, seed=seed)) for seed in range(samples)]
    starts = np.linspace(0, max(len(val) - tokens, 0), samples).astype(int)
    held_out = [decode(val.read(int(start), min(tokens, len(val)))) for start in starts]
    parts = {"written": generated, "held_out": held_out}
    return {"samples": samples} | {name: measure_novelty(corpus, texts) for name, texts in parts.items()}


class SuffixArray:
    """Index of a corpus for substring search (Manber and Myers 1993; libdivsufsort)."""

    def __init__(self, text: str):
        try:
            import pydivsufsort
        except ImportError:
            raise UserError("this needs the pydivsufsort package: python -m pip install 'jaxgpt[report]'") from None
        self._search, self.bytes = pydivsufsort.sa_search, text.encode()
        self._suffixes = pydivsufsort.divsufsort(self.bytes) if text else None

    def find(self, piece: str) -> int | None:
        """Return the offset, in bytes, of an occurrence of a string in the corpus; None if there is none."""
        if self._suffixes is None:
            return None
        count, at = self._search(self.bytes, self._suffixes, piece.encode())
        return int(self._suffixes[at]) if count > 0 else None

    def match_lengths(self, text: str) -> np.ndarray:
        """Return the length of the longest match that begins at each character: characters, int64 [len(text)].

        The match at the next character is at most one shorter, so its search starts from that length.
        """
        lengths, grown = np.zeros(len(text), np.int64), 0
        for i in range(len(text)):
            grown = max(grown - 1, 0)
            while i + grown < len(text) and self.find(text[i : i + grown + 1]) is not None:
                grown += 1
            lengths[i] = grown
        return lengths


def measure_novelty(corpus: SuffixArray, texts: Sequence[str]) -> dict[str, Any]:
    """Compare texts, each separately, with a corpus.

    Returns:
        characters, the total length of the texts; overlaps, the longest substrings that occur in the corpus, none part
        of another, each with `at`, the offset of one occurrence in characters; novel, for each n the share of the
        texts' n-grams that do not occur in the corpus, or None without n-grams.
    """
    overlaps: set[tuple[int, str]] = set()
    seen: dict[int, list[bool]] = {n: [] for n in LENGTHS}
    for text in texts:
        lengths = corpus.match_lengths(text)
        for n in LENGTHS:
            seen[n] += (lengths[: max(len(text) - n + 1, 0)] >= n).tolist()
        # A match that ends where the one before it ends is part of that one.
        before = np.concatenate([[0], lengths - 1])[:-1]
        for i in np.flatnonzero((lengths > before) & (lengths > 0)):
            overlaps.add((-int(lengths[i]), text[i : i + lengths[i]]))
    return {
        "characters": sum(map(len, texts)),
        "overlaps": [
            {"text": text, "at": len(corpus.bytes[: corpus.find(text)].decode())}
            for _, text in sorted(overlaps)[:SHOWN]
        ],
        "novel": {str(n): 1.0 - float(np.mean(found)) if found else None for n, found in seen.items()},
    }
