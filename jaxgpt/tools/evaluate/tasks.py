"""Evaluate a run on the field's tasks by their names in lm-evaluation-harness, and on CORE."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import suggest
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.tools.evaluate.lm_eval_model import JaxGPT
from jaxgpt.tools.grid import format_table

# CORE of DataComp-LM (arXiv:2406.11794): task, shots, and percent right by chance, from github.com/mlfoundations/dclm at
# 361714b, eval/mmlu_and_lowvar.yaml and eval_meta_data_v1.csv. The harness has 20 of the 22: not jeopardy, nor SQuAD
# without its questions that have no answer.
_CORE = """
hellaswag 0 25, hellaswag 10 25, arc_easy 10 25, arc_challenge 10 25, copa 0 50, commonsense_qa 10 20, piqa 10 50,
openbookqa 0 25, lambada_openai 0 0, wsc273 0 50, winogrande 0 50, agieval_lsat_ar 3 20, coqa 0 0, boolq 10 62,
bigbench_qa_wikidata_generate_until 10 0, bigbench_dyck_languages_generate_until 10 0,
bigbench_cs_algorithms_generate_until 10 0, bigbench_operators_generate_until 10 0,
bigbench_repeat_copy_logic_generate_until 10 0, bigbench_language_identification_multiple_choice 10 9.1
"""
CORE: dict[tuple[str, int | None], float] = {
    (task, int(shots)): float(chance) / 100 for task, shots, chance in map(str.split, _CORE.split(","))
}
SCORES = ("acc_norm", "acc", "exact_match", "em")  # the score of a task for CORE is the first that it has


@functools.cache
def _task_manager(include_path: str | None) -> Any:
    """Return the harness's index of tasks, which takes seconds: it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include_path)


def evaluate_tasks(
    run: Run,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """Return what a run scores on tasks of the harness.

    Args:
        tasks: names of tasks or of groups. "core" stands for the tasks of CORE, each with its own number of shots.
        limit: questions of each task. None means all.
        num_fewshot: solved examples before each question. None means the task's own number.
        include_path: a directory with task files (.yaml) of your own.
        batch_size: texts that are scored together. None means the batch size of the run's training.

    Returns:
        a dictionary. Under "tasks" it has the task, shots, metric, value and stderr of each task and metric. Under "core"
        it has the mean of (score - chance) / (1 - chance) over the tasks of CORE that the harness has, or None if not asked for.

    Raises:
        UserError: if there is no such task or directory, or its questions cannot be loaded.
    """
    from lm_eval import simple_evaluate

    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"include_path={include_path}: needs a directory with task files (.yaml)")
    manager = _task_manager(include_path)
    asked: dict[int | None, list[str]] = defaultdict(list)
    for name, shots in [(n, s) for task in tasks for n, s in (CORE if task == "core" else [(task, num_fewshot)])]:
        if name not in manager.all_tasks:
            listed = "python -m jaxgpt.tools.evaluate.lm_eval_model ls tasks lists all"
            raise UserError(f"unknown task {name!r}{suggest(name, manager.all_tasks)}: {listed}")
        asked[shots] += [name] * (name not in asked[shots])
    model, rows, centered = JaxGPT(run, batch_size=batch_size), [], []
    for shots, names in asked.items():
        try:
            found = simple_evaluate(
                model, tasks=names, num_fewshot=shots, limit=limit, task_manager=manager, log_samples=False
            )
        except OSError as e:
            raise UserError(f"the questions of {', '.join(names)} cannot be loaded: {e}") from None
        for task, metrics in found["results"].items():
            keys = {key.partition(",")[0]: key for key in metrics if "," in key and "_stderr," not in key}
            for metric, key in keys.items():
                error = metrics.get(key.replace(",", "_stderr,"))
                error = error if isinstance(error, float) else None  # or "N/A"
                row = {"task": task, "shots": found["n-shot"].get(task), "metric": metric}
                rows.append({**row, "value": metrics[key], "stderr": error})
            if "core" in tasks and (task, shots) in CORE:
                score, chance = metrics[next(keys[name] for name in SCORES if name in keys)], CORE[task, shots]
                centered.append((score - chance) / (1 - chance))
    return {"tasks": rows, "core": sum(centered) / len(centered) if centered else None}


def format_tasks(found: dict[str, Any]) -> str:
    """Return the results of `evaluate_tasks` as a table."""
    head = ["task", "shots", "metric", "value", "stderr"]
    rows = [
        [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in head]
        for row in found["tasks"]
    ]
    core = "" if found["core"] is None else f"\nCORE {found['core']:.4f}, over {len(CORE)} of its 22 tasks"
    return format_table(head, rows) + core
