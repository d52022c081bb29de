"""Write the tables of README.md from the first lines of the docstrings: `python experiments/readme.py`."""

import ast
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "README.md"
BEGIN, END = "<!-- by readme.py: begin -->\n", "<!-- by readme.py: end -->\n"
GROUPS = {
    "Train a model": "minimal sancho_mini shakespeare_char speedrun_shakespeare speedrun_shakespeare_long gpt2_124m "
    "finetune_quijote chat_sft orders transformer_2017/train post/chat_from_nothing",
    "Compare, with seeds": "study_activation study_attention_scale study_norm_position learning_rate_transfer "
    "scaling_laws induction_heads records laptop/run laptop/base laptop/entries laptop/optimizers laptop/forecasts "
    "autoresearch/night autoresearch/measure autoresearch/real autoresearch/mutator",
    "Look inside, measure, and train on": "interpretability/inspect_run baselines bands core memorisation speculative "
    "post/dpo post/distillation post/grpo_arithmetic post/length_hacking "
    "post/mismatch post/sampler_gap",
    "Tools and benchmarks": "track python_questions readme step_cost benchmarks/training benchmarks/speedrun "
    "benchmarks/compilation benchmarks/startup benchmarks/data benchmarks/sampling benchmarks/published "
    "benchmarks/serving benchmarks/structured benchmarks/interop benchmarks/interventions benchmarks/parallel "
    "benchmarks/products benchmarks/gpu benchmarks/gpu_forms benchmarks/roofline benchmarks/decode_roofline "
    "benchmarks/traffic benchmarks/published_steps benchmarks/fused_loss",
}
# As the docstrings, the results, the log or RECORDS.md state them. A file without one has no time in the table.
TIMES = """
minimal: half a minute; sancho_mini: 180 s; shakespeare_char: 75 s; speedrun_shakespeare: 8.1 s;
speedrun_shakespeare_long: 216 s; chat_sft: 175 s; orders: 165 s; transformer_2017/train: 262 s;
post/chat_from_nothing: 30 minutes; learning_rate_transfer: 75 minutes; scaling_laws: 30 minutes;
induction_heads: 8.6 minutes; laptop/run: 12 hours; laptop/base: 18.5 s, one core;
autoresearch/measure: half a minute; autoresearch/real: 18 minutes, one core;
laptop/entries: 15.9 and 25.0 s, one core; interpretability/inspect_run: half a minute; speculative: seconds;
post/dpo: 44 s and 24 s; post/grpo_arithmetic: 114 to 135 s; post/length_hacking: 74 to 85 s;
step_cost: 2 to 7 minutes; benchmarks/gpu: 12 minutes of a GPU
"""


def render() -> str:
    """Return the page with its tables as they should be. Raises `ValueError` if a file of this folder is in none."""
    names, times = " ".join(GROUPS.values()).split(), dict(each.strip().split(": ") for each in TIMES.split(";"))
    if missing := {path.stem for path in HERE.glob("*.py")} - {*names}:
        raise ValueError(f"no group of {__file__} has {', '.join(sorted(missing))}")
    lines = list[str]()
    for title, files in GROUPS.items():
        lines += ["", f"## {title}", "", "| file | what it is for | time |", "|---|---|---|"]
        for name in files.split():
            text = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
            first, *_ = text.splitlines()
            lines.append(f"| [`{name}.py`](../experiments/{name}.py) | {first} | {times.get(name, '')} |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join([*lines, "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
