"""Weights out: a run becomes a directory that transformers, vLLM and llama.cpp's converters open."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxgpt.data.chat.encode import find_end_of_turn
from jaxgpt.data.chat.template import ChatTemplate, Turns
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes, read_json, write_whole
from jaxgpt.hf.families import family_for
from jaxgpt.hf.family import Family
from jaxgpt.hf.params import to_tensors
from jaxgpt.hf.safetensors_files import SHARD, write
from jaxgpt.hf.source import BESIDE_TOKENIZER, KEPT, LARGEST_CONFIG
from jaxgpt.hf.tokenizers import tokenizer_config, tokenizer_json
from jaxgpt.parallel.flops import count_parameters
from jaxgpt.run import Run, load_run
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import RunMetadata, read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.sample.quantize import unrolled


def export_hf(run: str | Path | None, out: str | Path, *, dtype: DTypeLike | None = None, shard: int = SHARD) -> Path:
    """Write config.json, safetensors, the tokenizer and a model card; AutoModelForCausalLM and AutoTokenizer open it.

    run: None: the newest under `runs/`. dtype: of the tensors; None: as in the run. shard: bytes of a file, at most.
    In memory is the model and one tensor more. Raises `UserError` before anything is written, for an architecture
    that no family on the Hub has among others; see `interop.families`.
    """
    directory, place = find_run(run), Path(out)
    if is_there(place, "Name another place with --out.") and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{place} is there and not empty: name another place with --out")
    metadata = read_metadata(directory)
    original = _original(directory)
    family = family_for(metadata.model, original.get("model_type"))
    found = load_run(metadata)
    template = found.prompt_format.template if found.experiment.data.is_chat else None
    model, params = unrolled(found.model, found.params)
    tensors = to_tensors(params, family, model.config, dtype)
    stored_as = np.dtype(next(iter(tensors.values())).dtype).name
    config = (original or _special(found)) | family.write(model.config) | {"dtype": stored_as, "torch_dtype": stored_as}
    try:
        place.mkdir(parents=True, exist_ok=True)
        write(place, tensors, shard)
        _write_json(place / "config.json", config)
        _write_tokenizer(place, directory, found, template)
        _write_generation(place, directory, found, template)
        write_whole(place / "README.md", _model_card(directory, found, family, metadata))
    except OSError as e:
        raise UserError(f"cannot write in {place}: {e.strerror}. Name another place with --out.") from None
    return place


def _original(run: Path) -> dict[str, Any]:
    """The config.json with which an imported model came, and with it all those trained from it; else nothing."""
    path = run / KEPT / "config.json"
    found = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _special(run: Run) -> dict[str, Any]:
    end = run.tokenizer.end_of_text
    return {"bos_token_id": next(iter(run.tokenizer.prefix), end), "eos_token_id": end}


def _write_tokenizer(place: Path, directory: Path, run: Run, template: ChatTemplate | None) -> None:
    text = tokenizer_json(run.tokenizer)
    if text is None:
        return
    write_whole(place / "tokenizer.json", text)
    for name in BESIDE_TOKENIZER:
        if (directory / name).exists():
            write_whole(place / name, read_bytes(directory / name, LARGEST_CONFIG))
    path = place / BESIDE_TOKENIZER[0]
    said = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    values = said if isinstance(said, dict) else {}
    if "tokenizer_class" not in values:  # else it is whole, and stays as it is
        values = tokenizer_config(run.tokenizer, run.model.config.block_size) | values
    if isinstance(template, Turns):  # ours, which nobody else knows
        values = values | {"chat_template": template.jinja()}
    if values != said:
        _write_json(path, values)


def _write_generation(place: Path, directory: Path, run: Run, template: ChatTemplate | None) -> None:
    kept = directory / KEPT / "generation_config.json"
    if template is None and kept.exists():
        write_whole(place / kept.name, read_bytes(kept, LARGEST_CONFIG))
        return
    said = read_json(kept, LARGEST_CONFIG) if kept.exists() else {}
    values = _special(run) | (said if isinstance(said, dict) else {})
    if template is not None:  # who answers has learnt to end there
        ends, turn = values["eos_token_id"], find_end_of_turn(template, run.tokenizer)
        others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, turn)]
        values = values | {"eos_token_id": [*others, turn]}
    _write_json(place / kept.name, values)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _model_card(directory: Path, run: Run, family: Family, metadata: RunMetadata) -> str:
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
        *(_imported(metadata) if metadata.imported else _trained(directory, run, metadata)),
    ]
    return "\n".join(lines) + "\n"


def _imported(metadata: RunMetadata) -> list[str]:
    assert metadata.imported is not None
    return [f"The weights are those of `{metadata.imported.get('from')}`, unchanged."]


def _trained(directory: Path, run: Run, metadata: RunMetadata) -> list[str]:
    experiment, data = run.experiment, metadata.data
    tokens = experiment.train.batch_size * experiment.model.block_size
    seconds = max((x["seconds"] for x in read_metrics(directory / "metrics.jsonl") if x.get("seconds")), default=None)
    text = Path(experiment.data.path).name if experiment.data.path else f"the corpus `{experiment.data.corpus}`"
    size = f", {data['train_tokens']:,} tokens of it" if isinstance(data.get("train_tokens"), int) else ""
    said = []
    if experiment.train.init_from is not None:
        lora = experiment.lora
        how = "" if lora.rank is None else f", by adapters of rank {lora.rank} for {', '.join(lora.targets)}, merged in"
        said.append(f"- Starting from `{experiment.train.init_from}`{how}.")
    said += [
        f"- Text: {text}{size}; tokenizer `{Path(metadata.given.data.tokenizer).name}`.",
        f"- Training: step {run.step:,} of {experiment.train.steps:,}, {run.step * tokens:,} tokens seen, "
        f"{experiment.optim.name}, learning rate {experiment.optim.learning_rate:g}.",
    ]
    if seconds is not None:
        said.append(f"- Time: {seconds:,.0f} s, on {metadata.device}.")
    if run.val_loss is not None:
        said.append(
            f"- Validation loss: {run.val_loss:.4f} nats per token (perplexity {math.exp(min(run.val_loss, 700)):.2f})."
        )
    if metadata.command is not None:
        said.append(f"- Command: `{metadata.command}`")
    return said
