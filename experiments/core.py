"""How much does a run know? One number for it: CORE of DataComp-LM, from 20 of its 22 tasks.

Question    how far above chance does a run answer, over tasks of knowledge, reading, reasoning and symbols?
Reference   Li et al. 2024, arXiv:2406.11794. Tasks, shots and percent right by chance are from
            github.com/mlfoundations/dclm at 361714b, eval/mmlu_and_lowvar.yaml and eval_meta_data_v1.csv.
Command     python experiments/core.py RUN [--limit N]   -> a table, and the mean. Needs `pip install "jaxgpt[eval]"`.
Hardware    any one device. The harness downloads the questions.
Method      each task runs in lm-evaluation-harness with CORE's number of shots. Its score is centred,
            (score - chance) / (1 - chance), and CORE is the mean. The harness lacks two tasks: Jeopardy, and SQuAD
            without unanswerable questions. Its prompts differ from DCLM's, and answers are compared per character where
            DCLM compares per token. So a figure compares with others made here, and not with published ones.
Result      no run of this repository has been scored on all of it yet.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence

import jaxgpt

TASKS = (  # task, shots, percent right by chance
    ("hellaswag", 0, 25),
    ("hellaswag", 10, 25),
    ("arc_easy", 10, 25),
    ("arc_challenge", 10, 25),
    ("copa", 0, 50),
    ("commonsense_qa", 10, 20),
    ("piqa", 10, 50),
    ("openbookqa", 0, 25),
    ("lambada_openai", 0, 0),
    ("wsc273", 0, 50),
    ("winogrande", 0, 50),
    ("agieval_lsat_ar", 3, 20),
    ("coqa", 0, 0),
    ("boolq", 10, 62),
    ("bigbench_qa_wikidata_generate_until", 10, 0),
    ("bigbench_dyck_languages_generate_until", 10, 0),
    ("bigbench_cs_algorithms_generate_until", 10, 0),
    ("bigbench_operators_generate_until", 10, 0),
    ("bigbench_repeat_copy_logic_generate_until", 10, 0),
    ("bigbench_language_identification_multiple_choice", 10, 9.1),
)
SCORES = ("acc_norm", "acc", "exact_match", "em")  # the score of a task is the first that it has


def core_score(rows: Sequence[dict]) -> float:
    """Return the mean of the centred scores. rows: of `evaluate_tasks`, for tasks of the table."""
    chances = {task: percent / 100 for task, _, percent in TASKS}
    measured = defaultdict(dict)
    for row in rows:
        measured[row["task"], row["shots"]][row["metric"]] = row["value"]
    centred = []
    for (task, _), metrics in measured.items():
        score = next(metrics[name] for name in SCORES if name in metrics)
        centred.append((score - chances[task]) / (1 - chances[task]))
    return sum(centred) / len(centred)


def main() -> None:
    """Score a run on each task, and print the table and the mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's directory")
    parser.add_argument("--limit", type=int, help="questions of each task; all by default")
    args = parser.parse_args()
    from jaxgpt.tools.evaluate.tasks import evaluate_tasks, format_tasks  # needs lm-eval, and seconds

    rows = []
    try:
        run = jaxgpt.load(args.run)
        for shots in sorted({shots for _, shots, _ in TASKS}):
            names = [task for task, its_shots, _ in TASKS if its_shots == shots]
            rows += evaluate_tasks(run, names, num_fewshot=shots, limit=args.limit)["tasks"]
    except jaxgpt.UserError as error:
        parser.exit(2, f"{error}\n")
    print(format_tasks({"tasks": rows}))
    print(f"CORE {core_score(rows):.4f}, over {len(TASKS)} of its 22 tasks")


if __name__ == "__main__":
    main()
