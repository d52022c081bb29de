"""Where a model's files are: a local directory, or the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from jaxgpt.errors import UserError, first_line
from jaxgpt.files import is_there

# Never the pickled weights, nor those of other frameworks beside them.
WANTED = [
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
IGNORED = ["original/*", "onnx/*", "*/*"]  # other copies of the weights, in folders
ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)  # of a model on the Hub


def find_directory(name: str) -> Path:
    """Return the directory itself, or the one in which `huggingface_hub` keeps the model with this id, downloaded if needed.

    Raises `UserError` if it is not available.
    """
    path = Path(name)
    if is_there(path, "Give a directory with config.json, tokenizer.json and .safetensors files."):
        if path.is_dir():
            return path
        raise UserError(f"{path} is a file: give the directory that holds it, with config.json and tokenizer.json")
    by_hand = (
        f"Download it where there is a network (hf download {name} --local-dir DIR) and give that directory instead."
    )
    if not ID.fullmatch(name):
        raise UserError(
            f"no directory at {path}, and an id of a model on the Hub would look like openai-community/gpt2: give one of the two"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(f"no directory at {path}. To download a model: python -m pip install 'jaxgpt[hf]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=IGNORED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as e:
        said = first_line(e)
        raise UserError(
            f"no directory at {path}, and {name} could not be downloaded: {said[:200]}. {by_hand}"
        ) from None
