"""Import a GGUF file as a run directory."""

from __future__ import annotations

from pathlib import Path

from jax.typing import DTypeLike

from jaxgpt.data.template import write_template
from jaxgpt.files import render_json, write_whole
from jaxgpt.gguf.families import FAMILIES
from jaxgpt.gguf.file import Fields
from jaxgpt.gguf.model import open_gguf
from jaxgpt.gguf.tokenizers import read_chat_template, read_ends
from jaxgpt.hf.source import HF_FOLDER, Source
from jaxgpt.tools.convert.import_hf import write_run


def import_gguf(
    path: str | Path, run_dir: str | Path, *, dtype: DTypeLike | None = None, tokenizer: str | None = None
) -> Source:
    """Write a model into a new run directory, for sampling, evaluation and export.

    Holds the model and one more tensor in memory.

    Args:
        path: of the file, with tensors in float32, float16, bfloat16 or q8_0.
        run_dir: the run directory, absent or empty.
        dtype: of the parameters. None means as stored; q8_0 becomes float32.
        tokenizer: path of another tokenizer.json, or "ids" for none. None means the one in the file.

    Raises:
        UserError: the model cannot be read, or `run_dir` is not empty. Nothing is written then.
    """
    source, fields = open_gguf(Path(path), tokenizer)
    model_type = next(name for name, family in FAMILIES.items() if family is source.family)
    write_run(
        source,
        Path(run_dir),
        imported={"from": str(path), "model_type": model_type},
        dtype=dtype,
        write_companions=lambda directory: _write_companions(fields, directory),
    )
    return source


def _write_companions(fields: Fields, directory: Path) -> None:
    """Write the chat template and the ends of texts where a run has them."""
    tokens, template, ends = fields.get("tokenizer.ggml.tokens", []), read_chat_template(fields), read_ends(fields)
    if template is not None:
        ids = {f"{name}_token": fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        named = {name: tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
        write_template(directory, {"chat_template": template, **named})
    if ends:
        (directory / HF_FOLDER).mkdir()
        write_whole(directory / HF_FOLDER / "generation_config.json", render_json({"eos_token_id": ends}) + "\n")
