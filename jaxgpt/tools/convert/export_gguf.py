"""Export a run as a GGUF file, which llama.cpp and ollama run."""

from __future__ import annotations

import warnings
from pathlib import Path

from jaxgpt.data.conversations import find_end_of_turn
from jaxgpt.data.template import Jinja
from jaxgpt.errors import UserError
from jaxgpt.files import is_there
from jaxgpt.gguf.file import parse_dtype, write_gguf
from jaxgpt.gguf.model import to_gguf
from jaxgpt.gguf.tokenizers import tokenizer_fields
from jaxgpt.hf.families import find_family
from jaxgpt.hf.source import end_tokens
from jaxgpt.run import Run, load_run
from jaxgpt.runs.find import find_run
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.sample.quantize import unstack_layers


def export_gguf(run: str | Path | None, out: str | Path, *, dtype: str | None = None) -> Path:
    """Write the parameters, the architecture, the tokenizer and its chat template as one file.

    Holds the model and one more tensor in memory.

    Args:
        run: directory of the run. None means the newest under `runs/`.
        out: the file to write, which must not exist.
        dtype: of the matrices: float32, float16, bfloat16 or q8_0. None means that of the run. Norms, biases and learned
            positions are float32.

    Returns:
        The file.

    Raises:
        UserError: llama.cpp has no such architecture or tokenizer (nothing is written then), or `out` cannot be written.
    """
    dtype, directory, out = parse_dtype(dtype), find_run(run), Path(out)
    if is_there(out, "Name another file with --out."):
        raise UserError(f"{out} exists: name another file with --out")
    metadata = read_metadata(directory)
    imported = (metadata.imported or {}).get("model_type")
    family = find_family(metadata.model, imported).model_type
    loaded = load_run(metadata)
    model, params = unstack_layers(loaded.model, loaded.params)
    config = model.config
    assert config.vocab_size is not None
    fields, tensors = to_gguf(params, config, family)
    if config.activation in ("gelu", "geglu"):
        warnings.warn(
            f"activation={config.activation}: llama.cpp computes GELU by tanh, not by erf; the two differ by up to 5e-4",
            stacklevel=2,
        )
    fields |= {"general.name": loaded.experiment.name}
    fields |= tokenizer_fields(
        loaded.tokenizer, config.vocab_size, chat_template=_chat_template(loaded), ends=_find_ends(loaded)
    )
    try:
        write_gguf(out, fields, tensors, dtype)
    except OSError as e:
        raise UserError(f"cannot write {out}: {e.strerror}. Name another file with --out.") from None
    return out


def _chat_template(run: Run) -> str | None:
    """Return the tokenizer's own template, or ours if the run was trained on conversations."""
    template = run.prompt_format.template
    if isinstance(template, Jinja):
        return template.source
    return template.jinja() if run.experiment.data.is_chat else None


def _find_ends(run: Run) -> list[int]:
    """Return the ids that end a text, that of a chat's turns last. Empty means the tokenizer's own."""
    ends = end_tokens(run.directory)
    if not run.experiment.data.is_chat:
        return ends
    if not ends and run.tokenizer.end_of_text is not None:
        ends = [run.tokenizer.end_of_text]
    turn = find_end_of_turn(run.prompt_format.template, run.tokenizer)
    return [*(end for end in ends if end != turn), turn]
