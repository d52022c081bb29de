"""Evaluate a run on the field's tasks by their names in lm-evaluation-harness.

With other options of the harness, pass it an instance: `lm_eval.simple_evaluate(model=JaxGPT(run), tasks=[...])`.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxgpt.config.serialize import suggest
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.run import Run
from jaxgpt.sample import FILTERS
from jaxgpt.sample.score import pair_ids
from jaxgpt.tools.grid import format_table

MAX_NEW_TOKENS = 256  # the harness's own default
# The names in tasks for the maximum number of tokens to generate. The harness reads the first that is given.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


class JaxGPT(LM):
    """A run as a model of the harness. Texts that its tokenizer cannot encode raise `UserError`."""

    def __init__(self, run: Run, *, batch_size: int | None = None):
        """Take a run. batch_size: texts that are scored or generated together, by default as many as in training."""
        super().__init__()
        self.run = run
        self.batch_size = batch_size or run.experiment.train.batch_size

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (log-probability, is it greedy?) of each continuation. A request has (context, continuation)."""
        pairs = [pair_ids(self.run.tokenizer, *request.args) for request in requests]
        return [tuple(found) for found in self.run.loglikelihood(pairs, batch_size=self.batch_size)]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in the harness's disjoint windows. A request has (text,)."""
        windows = []  # (index of the request, pair)
        for number, request in enumerate(requests):
            first, ids = pair_ids(self.run.tokenizer, "", *request.args)
            rolling = get_rolling_token_windows(ids, first[-1], self.run.model.config.block_size, 1)
            (_, begins), *others = map(make_disjoint_window, rolling)
            windows += [(number, pair) for pair in [(first, begins), *others]]
        found = self.run.loglikelihood([pair for _, pair in windows], batch_size=self.batch_size)
        totals = [0.0] * len(requests)
        for (number, _), likelihood in zip(windows, found, strict=True):
            totals[number] += likelihood.logprob
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to a stop string. A request has (context, options)."""
        groups = defaultdict[str, list[int]](list)  # by options: indices of the requests that have them
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(number)
        texts: dict[int, str] = {}
        for options, numbers in groups.items():
            prompts = [requests[number].args[0] for number in numbers]
            found = self.run.sample(prompts, slots=self.batch_size, **sampling_options(json.loads(options)))
            texts |= zip(numbers, found, strict=True)
        return [texts[number] for number in range(len(requests))]


def sampling_options(options: Json) -> Json:
    """Translate a task's generation_kwargs to options of `Run.sample`. The default is greedy decoding.

    Raises `UserError` for options without a counterpart, since ignoring them would change the text.
    """
    known = ("until", "do_sample", *LIMITS, *FILTERS)
    if unknown := [name for name in options if name not in known]:
        raise UserError(f"generation_kwargs has {', '.join(unknown)}: jaxgpt knows only {', '.join(known)}")
    until = options.get("until") or []
    limits = [options[name] for name in LIMITS if options.get(name) is not None]
    filters = {name: options[name] for name in FILTERS if name in options}
    do_sample = options.get("do_sample", bool(options.get("temperature")))
    return {
        "max_new_tokens": limits[0] if limits else MAX_NEW_TOKENS,
        "stop": [stop for stop in ([until] if isinstance(until, str) else until) if stop],
        **(filters if do_sample else {"greedy": True}),
    }


# The harness's index of tasks takes seconds, since it reads thousands of files.
make_task_manager = functools.cache(TaskManager)


def evaluate_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    batch_size: int | None = None,
) -> Json:
    """Return what a run scores on tasks of the harness.

    Args:
        tasks: names of tasks or of groups.
        limit: questions of each task. None means all.
        num_fewshot: solved examples before each question. None means the task's own number.
        include_path: a directory with task files (.yaml) of your own.
        batch_size: texts that are scored together. None means the batch size of the run's training.

    Returns:
        a dictionary. Under "tasks" it has the task, shots, metric, value and stderr of each task and metric.

    Raises:
        UserError: if there is no such task or directory, or its questions cannot be loaded.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"include_path={include_path}: needs a directory with task files (.yaml)")
    manager = make_task_manager(include_path=include_path)
    names = list(dict.fromkeys(tasks))
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"unknown task {name!r}{suggest(name, manager.all_tasks)}: lm_eval ls tasks lists all")
    model = JaxGPT(run, batch_size=batch_size)
    try:
        found = simple_evaluate(
            model, tasks=names, num_fewshot=num_fewshot, limit=limit, task_manager=manager, log_samples=False
        )
    except OSError as e:
        raise UserError(f"the questions of {', '.join(names)} cannot be loaded: {e}") from None
    rows = []
    for task, metrics in found["results"].items():
        keys = {key.partition(",")[0]: key for key in metrics if "," in key and "_stderr," not in key}
        for metric, key in keys.items():
            error = metrics.get(key.replace(",", "_stderr,"))  # a number, or "N/A"
            row = {"task": task, "shots": found["n-shot"].get(task), "metric": metric, "value": metrics[key]}
            rows.append(row | {"stderr": error if isinstance(error, float) else None})
    return {"tasks": rows}


def format_tasks(found: Json) -> str:
    """Return the results of `evaluate_tasks` as a table."""
    head = ["task", "shots", "metric", "value", "stderr"]
    rows = [[f"{x:.4f}" if isinstance(x, float) else str(x) for x in row.values()] for row in found["tasks"]]
    return format_table(head, rows)
