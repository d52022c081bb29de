"""Weights out: a run becomes a directory that transformers, vLLM and llama.cpp's converters open."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_json
from jaxgpt.interop.card import model_card
from jaxgpt.interop.families import family_for
from jaxgpt.interop.params import to_tensors
from jaxgpt.interop.source import BESIDE_TOKENIZER, KEPT, LARGEST_CONFIG
from jaxgpt.interop.tokenizers import tokenizer_config, tokenizer_json
from jaxgpt.interop.weights import SHARD, write
from jaxgpt.paths import find_run
from jaxgpt.record import read_record
from jaxgpt.run import Run, load
from jaxgpt.sample.weights import unrolled


def export_hf(run: str | Path | None, out: str | Path, *, dtype: DTypeLike | None = None, shard: int = SHARD) -> Path:
    """Write config.json, safetensors, the tokenizer and a model card; AutoModelForCausalLM and AutoTokenizer open it.

    run: None: the newest under `runs/`. dtype: of the tensors; None: as in the run. shard: bytes of a file, at most.
    In memory is the model and one tensor more. Raises `UserError` before anything is written, for an architecture
    that no family on the Hub has among others; see `interop.families`.
    """
    directory, place = find_run(run), Path(out)
    if is_there(place, "Name another place with --out.") and (not place.is_dir() or any(place.iterdir())):
        raise UserError(f"{place} is there and not empty: name another place with --out")
    record = read_record(directory)
    original = _original(directory)
    family = family_for(record.model, original.get("model_type"))
    found = load(directory)
    model, params = unrolled(found.model, found.params)
    tensors = to_tensors(params, family, model.config, dtype)
    stored_as = np.dtype(next(iter(tensors.values())).dtype).name
    config = (original or _special(found)) | family.write(model.config) | {"dtype": stored_as, "torch_dtype": stored_as}
    try:
        place.mkdir(parents=True, exist_ok=True)
        write(place, tensors, shard)
        _write_json(place / "config.json", config)
        _write_tokenizer(place, directory, found)
        _write_generation(place, directory, found)
        (place / "README.md").write_text(model_card(directory, found, family, record), encoding="utf-8")
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


def _write_tokenizer(place: Path, directory: Path, run: Run) -> None:
    text = tokenizer_json(run.tokenizer)
    if text is None:
        return
    (place / "tokenizer.json").write_text(text, encoding="utf-8")
    for name in BESIDE_TOKENIZER:
        if (directory / name).exists():
            shutil.copyfile(directory / name, place / name)
    path = place / BESIDE_TOKENIZER[0]
    said = read_json(path, LARGEST_CONFIG) if path.exists() else {}
    if not isinstance(said, dict) or "tokenizer_class" not in said:  # else it is whole, and stays as it is
        usual = tokenizer_config(run.tokenizer, run.model.config.block_size)
        _write_json(path, usual | said if isinstance(said, dict) else usual)


def _write_generation(place: Path, directory: Path, run: Run) -> None:
    kept = directory / KEPT / "generation_config.json"
    if kept.exists():
        shutil.copyfile(kept, place / kept.name)
    else:
        _write_json(place / "generation_config.json", _special(run))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
