"""Open a model in Hugging Face's format, on disk or on the Hub, and make the tokenizer files of such a model."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import short
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, IdTokenizer, Tokenizer, load_tokenizer
from jaxgpt.errors import UserError, first_line
from jaxgpt.files import is_there, read_bytes, read_json, write_whole
from jaxgpt.hf.families import get_family
from jaxgpt.hf.family import Family
from jaxgpt.hf.weights import Tensor, check, list_tensors

LARGEST_CONFIG = 2**24  # bytes of a config.json
# Files that an export copies. In a run directory those of the tokenizer are next to tokenizer.json, where a chat finds
# its template, and the others in a folder.
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
HF_FOLDER = "hf"
IN_HF_FOLDER = ("config.json", "generation_config.json")
# Files to download: no pickled weights, none for other frameworks, no copies in folders.
WANTED = [*IN_HF_FOLDER, "*.safetensors", "*.safetensors.index.json", "tokenizer.json", *BESIDE_TOKENIZER]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
PADDING = 1024  # ids beyond the tokenizer's that do not cause a warning: vocabularies are rounded up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model to import: its directory, architecture and tokenizer, and where its tensors are."""

    directory: Path
    family: Family
    config: GPTConfig
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]


def find_directory(name: str) -> Path:
    """Return the directory of a model, downloaded from the Hub if needed. Raises `UserError` if it is not available.

    name: a directory, or an id on the Hub, for which the directory is that of huggingface_hub's cache.
    """
    path = Path(name)
    if is_there(path, "Give a directory with config.json, tokenizer.json and .safetensors files."):
        if path.is_dir():
            return path
        if path.suffix == ".gguf":
            raise UserError(f"{path} is a file: make it a run with `jaxgpt import {path} --run-dir DIR`, and give that")
        raise UserError(f"{path} is a file: give the directory that has config.json and tokenizer.json")
    if not HUB_ID.fullmatch(name):
        raise UserError(
            f"no directory at {path}, and not an id on the Hub, such as openai-community/gpt2: give one of the two"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(f"no directory at {path}. To download a model: python -m pip install 'jaxgpt[hf]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns="*/*"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as e:
        raise UserError(
            f"no directory at {path}, and {name} could not be downloaded: {first_line(e)[:200]}. Download it where "
            f"there is a network (hf download {name} --local-dir DIR) and give that directory instead."
        ) from None


def open_source(name: str, tokenizer: str | None = None) -> Source:
    """Open a model and check it, before any tensor is read.

    Args:
        name: a directory, or an id on the Hub.
        tokenizer: path of a tokenizer.json, or "ids" for none. None means the one in the directory.

    Raises:
        UserError: something is missing, damaged or unknown.
    """
    directory = find_directory(name)
    path = directory / "config.json"
    if not path.exists():
        raise UserError(f"{directory} has no config.json: give a directory that save_pretrained or a download made")
    hf = read_json(path, LARGEST_CONFIG)
    if not isinstance(hf, dict):
        raise UserError(f"{path} holds {type(hf).__name__}, needs an object: download it again")
    try:
        family = get_family(hf)
        config = family.read(hf)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    if unknown := family.unknown_keys(hf):
        warnings.warn(
            f"{path} has keys that jaxgpt does not know, {short(unknown)}: if one of them changes the logits, "
            "the imported model is wrong",
            UserWarning,
            stacklevel=2,
        )
    if tokenizer is None and not (directory / "tokenizer.json").exists():
        raise UserError(
            f"{directory} has no tokenizer.json. If it has other tokenizer files, transformers converts them: "
            f"AutoTokenizer.from_pretrained('{directory}').save_pretrained('{directory}'). Or give another "
            "tokenizer with --tokenizer FILE (--data.tokenizer FILE for training), or `ids` as FILE for none"
        )
    found = load_named_tokenizer(str(directory / "tokenizer.json") if tokenizer is None else tokenizer, config)
    tensors = list_tensors(directory)
    try:
        check(tensors, family, config)
    except UserError as e:
        raise UserError(f"{directory}: {e}") from None
    return Source(directory=directory, family=family, config=config, tokenizer=found, tensors=tensors)


def load_named_tokenizer(name: str, config: GPTConfig) -> Tokenizer:
    """Load the tokenizer of a model: a tokenizer.json, or "ids" for none. Raises `UserError` if it has too many ids."""
    assert config.vocab_size is not None
    if name == "ids":
        return IdTokenizer(config.vocab_size)
    tokenizer = load_tokenizer(name)
    check_vocabulary(tokenizer, name, config)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, name: str | Path, config: GPTConfig) -> None:
    """Raise `UserError` if a tokenizer has more ids than the model. name: of its file."""
    assert config.vocab_size is not None
    over = config.vocab_size - tokenizer.vocab_size
    both = f"{name} has ids up to {tokenizer.vocab_size - 1:,}, the model a vocab_size of {config.vocab_size:,}"
    if over < 0:
        raise UserError(f"{both}: it is not this model's tokenizer. Give the right one with --tokenizer FILE")
    if over > PADDING:
        warnings.warn(f"{both}: is it this model's tokenizer?", UserWarning, stacklevel=4)


def end_tokens(run: Path) -> list[int]:
    """Return the end tokens in the files of an imported model; an empty list for other runs."""
    for name in reversed(IN_HF_FOLDER):  # generation_config.json takes precedence
        path = run / HF_FOLDER / name
        values = read_json(path, LARGEST_CONFIG) if path.exists() else None
        ends = values.get("eos_token_id") if isinstance(values, dict) else None
        if ends is not None:
            return [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
    return []


def keep_companions(source: Path, run: Path) -> None:
    """Copy the files that accompany the weights into a run directory. source: a model's directory, or a run's."""
    copy_files(source, run, BESIDE_TOKENIZER)
    copy_files(source / HF_FOLDER if (source / "experiment.json").exists() else source, run / HF_FOLDER, IN_HF_FOLDER)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files with these names that are there."""
    for name in names:
        if (source / name).is_file():
            target.mkdir(exist_ok=True)
            write_whole(target / name, read_bytes(source / name, LARGEST_CONFIG))


def tokenizer_json(tokenizer: Tokenizer) -> str | None:
    """Return the text of tokenizer.json, or None for a run that has ids and no tokenizer."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        # Each character is a word. An unknown one is an error, as in ours: there is no token for it.
        return _render(
            model={"type": "WordLevel", "vocab": {c: i for i, c in enumerate(tokenizer.characters)}, "unk_token": ""},
            pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
            decoder={"type": "Fuse"},
        )
    if isinstance(tokenizer, ByteTokenizer):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        return _render(
            model={"type": "BPE", "vocab": {name: byte for byte, name in enumerate(list_byte_names())}, "merges": []},
            pre_tokenizer=byte_level,
            decoder=byte_level,
        )
    return None


def _render(**parts: Any) -> str:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    return json.dumps(empty | {"post_processor": None} | parts, ensure_ascii=False, indent=2) + "\n"


def list_byte_names() -> list[str]:
    """Return the character for each byte in byte-level vocabularies (GPT-2, Radford et al. 2019).

    A visible character stands for itself, other bytes have the characters from U+0100 on.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def tokenizer_config(tokenizer: Tokenizer, block_size: int) -> dict[str, Any]:
    """Return the tokenizer_config.json that transformers' AutoTokenizer needs next to tokenizer.json."""
    tokens = {"eos_token": tokenizer.end_of_text, "bos_token": next(iter(tokenizer.prefix), None)}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,  # true would drop spaces before punctuation when decoding
        **{name: tokenizer.decode([token]) for name, token in tokens.items() if token is not None},
    }
