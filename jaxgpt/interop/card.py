"""The README of an exported model: what it is, and how it came about."""

from __future__ import annotations

import math
from pathlib import Path

from jaxgpt.flops import count_parameters
from jaxgpt.interop.family import Family
from jaxgpt.metrics import read_metrics
from jaxgpt.record import Record
from jaxgpt.run import Run


def model_card(directory: Path, run: Run, family: Family, record: Record) -> str:
    """In Markdown, with the head that the Hub reads."""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- jaxgpt",
        f"- {family.model_type}",
        "---",
        "",
        f"# {run.experiment.name}",
        "",
        f"A `{family.architecture}` of {count_parameters(run.params):,} parameters, "
        f"{run.model.config.block_size:,} tokens of context and {run.model.config.vocab_size:,} token ids, "
        "written by jaxgpt.",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        'model = AutoModelForCausalLM.from_pretrained("DIR")',
        "```",
        "",
        "## How it came about",
        "",
        *(_imported(record) if record.imported else _trained(directory, run, record)),
    ]
    return "\n".join(lines) + "\n"


def _imported(record: Record) -> list[str]:
    assert record.imported is not None
    return [f"The weights are those of `{record.imported.get('from')}`, unchanged."]


def _trained(directory: Path, run: Run, record: Record) -> list[str]:
    experiment, data = run.experiment, record.data
    tokens = experiment.train.batch_size * experiment.model.block_size
    seconds = max((x["seconds"] for x in read_metrics(directory / "metrics.jsonl") if x.get("seconds")), default=None)
    text = Path(experiment.data.path).name if experiment.data.path else f"the corpus `{experiment.data.corpus}`"
    size = f", {data['train_tokens']:,} tokens of it" if isinstance(data.get("train_tokens"), int) else ""
    said = [
        f"- Text: {text}{size}; tokenizer `{Path(experiment.data.tokenizer).name}`.",
        f"- Training: step {run.step:,} of {experiment.train.steps:,}, {run.step * tokens:,} tokens seen, "
        f"{experiment.optim.name}, learning rate {experiment.optim.learning_rate:g}.",
    ]
    if seconds is not None:
        said.append(f"- Time: {seconds:,.0f} s, on {record.device}.")
    if run.val_loss is not None:
        said.append(
            f"- Validation loss: {run.val_loss:.4f} nats per token (perplexity {math.exp(min(run.val_loss, 700)):.2f})."
        )
    if record.command is not None:
        said.append(f"- Command: `{record.command}`")
    return said
