"""How many questions a run answers: of some endings the likeliest, or a text's last word."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from jaxgpt.config import Task
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.sample.score import Likelihood, pair_ids
from jaxgpt.tools.evaluate.questions import Question


def evaluate_task(
    run: Run, task: Task, questions: Sequence[Question], *, batch_size: int | None = None
) -> dict[str, Any]:
    """What a run makes of questions, which `read_questions` reads from a file.

    Returns task, n (questions), truncated (of which the context was cut from the left, to fit in block_size) and acc,
    the fraction answered. Of hellaswag and arc the answer is the likeliest ending; acc_norm takes the likeliest per
    character instead, since long endings are less likely. Of lambada it is that greedy decoding would write the last
    word; perplexity is that of the word. Each has its standard error, acc_stderr and so on (None for one question).
    batch_size: endings that are read together; None: the run's, in training. Raises `UserError` with file and line
        where the tokenizer cannot spell a question.
    """
    pairs = ids_of(run, questions)
    found = run.likelihoods([pair for each in pairs for pair in each], batch_size=batch_size)
    answers = list(_grouped(found, questions))
    if unknown := sum(any(math.isnan(ending.logprob) for ending in endings) for endings in answers):
        said = f"{unknown} of {len(questions)} questions have no answer: the model's logits are not finite"
        warnings.warn(said, UserWarning, stacklevel=2)
    long = [any(len(before) + len(new) > run.model.config.block_size + 1 for before, new in each) for each in pairs]
    results: dict[str, Any] = {"task": task, "n": len(questions), "truncated": sum(long)}
    if task == "lambada":
        return (
            results
            | _mean("acc", [ending.greedy for (ending,) in answers])
            | _perplexity([ending.logprob for (ending,) in answers])
        )
    right = [q.answer for q in questions]
    likeliest = [np.argmax([e.logprob for e in endings]) for endings in answers]
    per_character = [
        np.argmax([e.logprob / len(text) for e, text in zip(endings, q.endings, strict=True)])
        for endings, q in zip(answers, questions, strict=True)
    ]
    return results | _mean("acc", np.equal(likeliest, right)) | _mean("acc_norm", np.equal(per_character, right))


def task_table(found: dict[str, Any]) -> str:
    """What `evaluate_task` found, for a reader: each figure with its standard error."""
    cut = f", {found['truncated']:,} of them with their contexts cut to fit" if found["truncated"] else ""
    lines = [f"{found['task']}: {found['n']:,} questions{cut}"]
    for name in (name for name in ("acc", "acc_norm", "perplexity") if name in found):
        error = found[f"{name}_stderr"]
        lines.append(f"{name} {found[name]:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return "\n".join(lines)


def ids_of(run: Run, questions: Sequence[Question]) -> list[list[tuple[list[int], list[int]]]]:
    """Context and ending of each ending of each question, as ids. Raises `UserError` with file and line."""
    pairs = []
    for question in questions:
        try:
            pairs.append([pair_ids(run.tokenizer, question.context, f" {ending}") for ending in question.endings])
        except UserError as e:
            raise UserError(f"{question.where}: {e}") from None
    return pairs


def _grouped(found: Sequence[Likelihood], questions: Sequence[Question]) -> Iterator[list[Likelihood]]:
    rest = iter(found)
    return (list(islice(rest, len(question.endings))) for question in questions)


def _mean(name: str, values: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """With its standard error, from the sample's own spread."""
    return {name: float(np.mean(values)), f"{name}_stderr": _error(values)}


def _perplexity(logprobs: Sequence[float]) -> dict[str, float | None]:
    with np.errstate(over="ignore", invalid="ignore"):
        perplexity = float(np.exp(-np.mean(logprobs)))
        error = _error(logprobs)  # to first order, an error of the exponent is a relative one of the power
    return {"perplexity": perplexity, "perplexity_stderr": None if error is None else perplexity * error}


def _error(values: Sequence[float] | np.ndarray) -> float | None:
    return None if len(values) < 2 else float(np.std(values, ddof=1)) / math.sqrt(len(values))
