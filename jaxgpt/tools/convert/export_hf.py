"""Export a run in Hugging Face's format, which transformers and vLLM read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxgpt.data.chat.conversations import find_end_of_turn
from jaxgpt.data.chat.template import ChatTemplate, Turns
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes, read_json, render_json, write_whole
from jaxgpt.hf.families import find_family
from jaxgpt.hf.family import Family
from jaxgpt.hf.params import to_tensors
from jaxgpt.hf.safetensors_files import SHARD, write
from jaxgpt.hf.source import BESIDE_TOKENIZER, HF_FOLDER, LARGEST_CONFIG
from jaxgpt.hf.tokenizers import tokenizer_config, tokenizer_json
from jaxgpt.parallel.device import count_parameters
from jaxgpt.run import Run, load_run
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.sample.quantize import unstack_layers


def export_hf(run: str | Path | None, out: str | Path, *, dtype: DTypeLike | None = None, shard: int = SHARD) -> Path:
    """Write config.json, safetensors, the tokenizer and a model card, for AutoModelForCausalLM and AutoTokenizer.

    Holds the model and one more tensor in memory.

    Args:
        run: directory of the run. None means the newest under `runs/`.
        out: the directory to write, absent or empty.
        dtype: of the tensors. None means that of the run.
        shard: most bytes of a file.

    Returns:
        The directory.

    Raises:
        UserError: no family on the Hub has the run's architecture (see `jaxgpt.hf.families`; nothing is written then),
            or `out` cannot be written.
    """
    directory, out = find_run(run), Path(out)
    if is_there(out, "Name another directory with --out.") and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: name another directory with --out")
    metadata = read_metadata(directory)
    imported = _read_object(directory / HF_FOLDER / "config.json")  # of an imported model; else empty
    family = find_family(metadata.model, imported.get("model_type"))
    loaded = load_run(metadata)
    template = loaded.prompt_format.template if loaded.experiment.data.is_chat else None
    model, params = unstack_layers(loaded.model, loaded.params)
    tensors = to_tensors(params, family, model.config, dtype)
    stored_as = np.dtype(next(iter(tensors.values())).dtype).name
    config = (imported or _special_ids(loaded)) | family.write(model.config)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write(out, tensors, shard)
        _write_json(out / "config.json", config | {"dtype": stored_as, "torch_dtype": stored_as})
        _write_tokenizer(out, loaded, template)
        _write_generation(out, loaded, template)
        write_whole(out / "README.md", _model_card(loaded, family))
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e.strerror}. Name another directory with --out.") from None
    return out


def _special_ids(run: Run) -> dict[str, Any]:
    end = run.tokenizer.end_of_text
    return {"bos_token_id": next(iter(run.tokenizer.prefix), end), "eos_token_id": end}


def _write_tokenizer(out: Path, run: Run, template: ChatTemplate | None) -> None:
    text = tokenizer_json(run.tokenizer)
    if text is None:
        return
    write_whole(out / "tokenizer.json", text)
    for name in BESIDE_TOKENIZER:
        if (run.directory / name).exists():
            write_whole(out / name, read_bytes(run.directory / name, LARGEST_CONFIG))
    path = out / BESIDE_TOKENIZER[0]
    values = original = _read_object(path)
    if "tokenizer_class" not in values:  # otherwise the file is complete
        values = tokenizer_config(run.tokenizer, run.model.config.block_size) | values
    if isinstance(template, Turns):  # our own template: other libraries need it in Jinja
        values = values | {"chat_template": template.jinja()}
    if values != original:
        _write_json(path, values)


def _write_generation(out: Path, run: Run, template: ChatTemplate | None) -> None:
    original = run.directory / HF_FOLDER / "generation_config.json"
    if template is None and original.exists():
        write_whole(out / original.name, read_bytes(original, LARGEST_CONFIG))
        return
    values = _special_ids(run) | _read_object(original)
    if template is not None:  # the model has learnt to end its turns with `turn`
        ends, turn = values["eos_token_id"], find_end_of_turn(template, run.tokenizer)
        others = [end for end in (ends if isinstance(ends, list) else [ends]) if end not in (None, turn)]
        values = values | {"eos_token_id": [*others, turn]}
    _write_json(out / original.name, values)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is none."""
    values = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    return values if isinstance(values, dict) else {}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, render_json(values, indent=2, ensure_ascii=False) + "\n")


def _model_card(run: Run, family: Family) -> str:
    """Return README.md with the metadata header that the Hub reads."""
    config, imported = run.model.config, run.metadata.imported
    origin = [f"The weights are those of `{imported.get('from')}`, unchanged."] if imported else _training_facts(run)
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- jaxgpt
- {family.model_type}
---

# {run.experiment.name}

A `{family.architecture}` of {count_parameters(run.params):,} parameters, {config.block_size:,} tokens of context \
and {config.vocab_size:,} token ids, written by jaxgpt.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIR")
model = AutoModelForCausalLM.from_pretrained("DIR")
```

## Origin

""" + "".join(f"{line}\n" for line in origin)


def _training_facts(run: Run) -> list[str]:
    metadata, experiment, data = run.metadata, run.experiment, run.metadata.data
    tokens = experiment.train.batch_size * experiment.model.block_size
    seconds = [line["seconds"] for line in read_metrics(run.directory / "metrics.jsonl") if line.get("seconds")]
    text = Path(experiment.data.path).name if experiment.data.path else f"the corpus `{experiment.data.corpus}`"
    size = f", {data['train_tokens']:,} tokens of it" if isinstance(data.get("train_tokens"), int) else ""
    facts = []
    if experiment.train.init_from is not None:
        lora = experiment.lora
        adapters = (
            "" if lora.rank is None else f", by adapters of rank {lora.rank} for {', '.join(lora.targets)}, merged in"
        )
        facts.append(f"- Starting from `{experiment.train.init_from}`{adapters}.")
    facts += [
        f"- Text: {text}{size}; tokenizer `{Path(metadata.given.data.tokenizer).name}`.",
        f"- Training: step {run.step:,} of {experiment.train.steps:,}, {run.step * tokens:,} tokens seen, "
        f"{experiment.optim.name}, learning rate {experiment.optim.learning_rate:g}.",
    ]
    if seconds:
        facts.append(f"- Time: {max(seconds):,.0f} s, on {metadata.device}.")
    if run.val_loss is not None:
        perplexity = math.exp(min(run.val_loss, 700))
        facts.append(f"- Validation loss: {run.val_loss:.4f} nats per token (perplexity {perplexity:.2f}).")
    if metadata.command is not None:
        facts.append(f"- Command: `{metadata.command}`")
    return facts
