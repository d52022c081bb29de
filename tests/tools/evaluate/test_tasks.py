"""lm-evaluation-harness itself, on tasks that are made here, compared with the run on the same continuations."""

import json

import numpy as np
import pytest

from jaxgpt.sample.score import pair_ids
from tests.conftest import REPOSITORY
from tests.helpers import check_command, needs, script

SAME = 1e-4  # nats: float32 sums of other batches

TASK = """\
dataset_path: json
dataset_kwargs: {data_files: {validation: DIRECTORY/q.jsonl}}
validation_split: validation
doc_to_text: "{{ctx}}"
"""
TASKS = {
    "choice": """\
output_type: multiple_choice
doc_to_target: label
doc_to_choice: endings
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},
              {metric: acc_norm, aggregation: mean, higher_is_better: true}]
""",
    "written": """\
output_type: generate_until
doc_to_target: "{{endings[label]}}"
generation_kwargs: {until: ["l"], max_gen_toks: 9, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "whole": """\
output_type: loglikelihood_rolling
doc_to_target: "{{ctx}} {{endings[label]}} and some more"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
""",
}
LINES = [
    {"ctx": "of", "endings": ["q", "ala", "gehtlemeñ"], "label": 2},
    {"ctx": "that keep a", "endings": ["lañce", "x", "q"], "label": 0},
    {"ctx": "oñe of those", "endings": ["zzz", "iñ a ñame", "xq"], "label": 2},
    {"ctx": "that", "endings": ["ñ", "q", "la"], "label": 0},
]

SCRIPT = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
import jaxgpt
from jaxgpt.errors import UserError
from jaxgpt.tools.evaluate.tasks import JaxGPT, sampling_options
assert sampling_options({}) == {"max_new_tokens": 256, "stop": [], "greedy": True}
try:
    sampling_options({"num_beams": 3})
except UserError as e:
    assert "num_beams: jaxgpt knows only until" in str(e)
else:
    raise AssertionError
run, directory, *tasks = sys.argv[1:]
manager = TaskManager(include_path=directory, include_defaults=False)
model = JaxGPT(jaxgpt.load(run), batch_size=2)
found = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager, bootstrap_iters=10)
resps = {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
print(json.dumps({"results": found["results"], "resps": resps}))
"""


needs_lm_eval = needs("lm_eval", "eval")  # half a minute to import, a minute in all: hence slow


def write_tasks(directory):
    (directory / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for name, rest in TASKS.items():
        (directory / f"{name}.yaml").write_text(f"task: {name}\n{TASK.replace('DIRECTORY', str(directory))}{rest}")


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.filterwarnings("ignore:prompt 0 has")  # more tokens than fit
def test_the_harness_gets_what_the_run_says_of_the_same_texts(run, tmp_path):
    write_tasks(tmp_path)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = check_command("-c", SCRIPT, str(run.directory), str(tmp_path), *TASKS, cwd=tmp_path, **offline)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"results"')))
    results = found["results"]
    # For each question a list of requests, each with one answer, in words.
    answers = {task: [a for requests in each for (a,) in requests] for task, each in found["resps"].items()}

    def continuations(endings):
        pairs = [(line["ctx"], f" {ending}") for line in LINES for ending in endings(line)]
        return run.loglikelihood([pair_ids(run.tokenizer, *pair) for pair in pairs])

    # Endings, whose length for acc_norm is in characters.
    ours = continuations(lambda line: line["endings"])
    expected = pytest.approx([o.logprob for o in ours], abs=SAME)
    assert [float(logprob) for logprob, _ in answers["choice"]] == expected
    assert [str(greedy) for _, greedy in answers["choice"]] == [str(o.is_greedy) for o in ours]
    logprobs_NK = np.array([o.logprob for o in ours]).reshape(len(LINES), 3)
    characters_NK = np.array([[len(ending) for ending in line["endings"]] for line in LINES])
    right_N = [line["label"] for line in LINES]
    acc, acc_norm = (np.mean(x.argmax(1) == right_N) for x in (logprobs_NK, logprobs_NK / characters_NK))
    assert results["choice"]["acc,none"] == acc and results["choice"]["acc_norm,none"] == acc_norm
    assert acc != acc_norm  # so that one cannot pass for the other

    written = [run.sample(line["ctx"], max_new_tokens=9, stop=["l"], greedy=True) for line in LINES]
    assert answers["written"] == written and any(len(text) < 9 for text in written)

    # Whole texts have the sum of windows that touch; the last one reaches back as far as it can.
    C = run.model.config.block_size
    for line, (total,) in zip(LINES, found["resps"]["whole"], strict=True):
        ids = run.tokenizer.encode(f"{line['ctx']} {line['endings'][line['label']]} and some more").tolist()
        at = range(0, len(ids), C)
        pairs = [(ids[i - 1 : i] or [ord("\n")], ids[i : i + C]) for i in at]
        pairs[-1] = ids[len(ids) - C - 1 : at[-1]], ids[at[-1] :]
        assert float(*total) == pytest.approx(sum(x.logprob for x in run.loglikelihood(pairs)), abs=SAME)


# The command and the callback, in one process.
COMMAND = """
import dataclasses, json, sys
from pathlib import Path
import jaxgpt
from jaxgpt.cli.main import main
run, directory, page = sys.argv[1:]
main(["evaluate", run, "--tasks", "choice,written", "--include-path", directory, "--limit", "3", "--json"])
main(["evaluate", run, "--tasks", "choice", "--include-path", directory, "--num-fewshot", "1"])
for wrong in (["--tasks", "choices"], ["--tasks", "choice", "--stride", "2"], ["--limit", "3"]):
    try:
        main(["evaluate", run, "--include-path", directory, *wrong])
    except SystemExit as e:
        assert e.code == 2
    else:
        raise AssertionError
names = {}
exec(page.split("```python\\n")[1].split("```")[0], names)
names |= {"RUN": Path(directory) / "during", "EVERY": 2, "WHAT": {"tasks": ["choice"], "include_path": directory}}
before = jaxgpt.load(run).experiment
short = jaxgpt.TrainConfig(steps=5, checkpoint_every=1, eval_every=4, batch_size=4, sample_tokens=0)
fitted = dataclasses.replace(before, train=short)
jaxgpt.fit(fitted, names["RUN"], callbacks=names["callbacks"], progress=False)
"""


@pytest.mark.slow
@needs_lm_eval
@pytest.mark.filterwarnings("ignore:prompt 0 has")
def test_tasks_are_scored_by_the_command_and_while_a_run_trains(run, tmp_path):
    write_tasks(tmp_path)
    page = (REPOSITORY / "docs" / "evaluation.md").read_text(encoding="utf-8")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = check_command("-c", COMMAND, str(run.directory), str(tmp_path), page, cwd=tmp_path, **offline)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    scores = {(row["task"], row["shots"]): row["value"] for row in found["tasks"] if row["metric"] != "acc"}
    assert list(scores) == [("choice", 0), ("written", 0)]
    three = [score * 3 for score in scores.values()]  # of three questions
    assert three == pytest.approx(np.round(three))
    assert "| choice | 1 | acc_norm | " in done.stdout
    assert "unknown task 'choices' (did you mean choice?)" in done.stderr and "need --tasks" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "during/tasks.jsonl").read_text().splitlines()]
    assert [(line["step"], line["tasks"][0]["task"]) for line in lines] == [(2, "choice"), (4, "choice")]


def test_core_is_the_mean_of_the_scores_above_chance():
    """By acc_norm, where a task has it; one task with two numbers of shots counts twice."""
    values = [
        ("hellaswag", 0, "acc", 0.9),
        ("hellaswag", 0, "acc_norm", 0.4),
        ("hellaswag", 10, "acc_norm", 0.55),
        ("coqa", 0, "em", 0.25),
        ("coqa", 0, "f1", 0.9),
        ("boolq", 10, "acc", 0.43),
    ]
    rows = [dict(zip(("task", "shots", "metric", "value"), each, strict=True)) for each in values]
    centred = [0.15 / 0.75, 0.3 / 0.75, 0.25, -0.19 / 0.38]
    assert script("core").core_score(rows) == pytest.approx(np.mean(centred))
