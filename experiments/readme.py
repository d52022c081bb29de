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
    "scaling_laws induction_heads records laptop/run laptop/base laptop/entries laptop/optimizers laptop/forecasts",
