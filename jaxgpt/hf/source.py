"""Open a model in Hugging Face's format, on disk or on the Hub, and make the tokenizer files of such a model."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config.validate import short
from jaxgpt.data.template import LARGEST_CONFIG, TEMPLATE_FILES, read_object
from jaxgpt.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    IdTokenizer,
    Tokenizer,
    find_start_token,
    load_tokenizer,
)
from jaxgpt.errors import UserError, first_line
from jaxgpt.files import Json, is_there, read_bytes, read_json, write_whole
from jaxgpt.hf.families import get_family
from jaxgpt.hf.family import Family
from jaxgpt.hf.weights import Tensors, check, list_tensors
from jaxgpt.model import GPTConfig

# Files that an export copies. In a run directory those of the tokenizer are by tokenizer.json, where a chat finds its
# template, and the others in a folder.
BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", *TEMPLATE_FILES.values())
HF_FOLDER = "hf"
IN_HF_FOLDER = ("config.json", "generation_config.json")
README = "README.md"  # kept there too
# Files to download: no pickled weights, none for other frameworks, no copies in folders.
WANTED = [*IN_HF_FOLDER, README, *BESIDE_TOKENIZER, "tokenizer.json", "adapter_config.json"]
WANTED += ["*.safetensors", "*.safetensors.index.json"]
UNWANTED = [f"*/{name}" for name in WANTED if "/" not in name]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
PLAIN_TOKEN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)  # an added token's options
PADDING = 1024  # ids beyond the tokenizer's that do not cause a warning: vocabularies are rounded up


class Source(NamedTuple):
    """A model to import: its directory, architecture and tokenizer, and where its tensors are."""

    directory: Path
    family: Family
    config: GPTConfig
    tokenizer: Tokenizer
    tensors: Tensors


def find_directory(name: str, wanted: Sequence[str] = WANTED, *, downloads: bool = True) -> Path:
    """Return the directory of a model, downloaded from the Hub if needed. Raises `UserError` if it is not available.

    name: a directory, or an id on the Hub. wanted: files. downloads: False takes what huggingface_hub's cache has, for a
    name from the record of a run.
    """
    path = Path(name)
    if is_there(path, "Give a directory with config.json, tokenizer.json and .safetensors files."):
        if path.is_dir():
            return path
        remedy = "give a directory with config.json, or the run that `jaxgpt import` makes of a .gguf"
        raise UserError(f"{path} is a file: {remedy}")
    if not HUB_ID.fullmatch(name):
        raise UserError(f"no directory at {path}: give one, or an id on the Hub, such as openai-community/gpt2")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"no directory at {path}. To download a model: python -m pip install 'jaxgpt[hf]'") from None
    try:
        files = {"allow_patterns": list(wanted), "ignore_patterns": UNWANTED}
        return Path(snapshot_download(name, local_files_only=not downloads, **files))
    except (OSError, ValueError) as e:  # also errors of the Hub
        remedy = f"Where there is a network: hf download {name} --local-dir DIR, and give that directory instead"
        why = first_line(e)[:200] if downloads else "it was never downloaded here"
        raise UserError(f"{name} is not available: {why}. {remedy}") from None


def open_source(name: str, tokenizer: str | None = None, *, downloads: bool = True) -> Source:
    """Open a model and check it, before any tensor is read. Raises `UserError` if a part is missing, damaged or unknown.

    name, downloads: see `find_directory`. tokenizer: a tokenizer.json, by default of the directory, or "ids" for none.
    """
    directory = find_directory(name, downloads=downloads)
    path = directory / "config.json"
    if (directory / "adapter_config.json").exists():
        raise UserError(f"{directory} has an adapter and no whole model: merge it by merge_and_unload of PEFT")
    hf = read_json(path, LARGEST_CONFIG)
    if not isinstance(hf, dict):
        raise UserError(f"{path} holds no object: download it again")
    tensors = list_tensors(directory)
    try:
        family = get_family(hf)
        config = family.read(hf)
        check(tensors, family, config)
    except UserError as e:
        raise UserError(f"{directory}: {e}") from None
    if unknown := family.unknown_keys(hf):
        said = f"{short(unknown)}, which jaxgpt does not know: if one changes the logits, they are wrong"
        warnings.warn(f"{path} has {said}", UserWarning, stacklevel=2)
    file = str(directory / "tokenizer.json") if tokenizer is None else tokenizer
    if tokenizer is None and not Path(file).exists():
        given = "--tokenizer FILE (--data.tokenizer FILE for training), or `ids` as FILE for none"
        raise UserError(f"{directory} has no tokenizer.json: give another with {given}")
    found = load_named_tokenizer(file, config)
    return Source(directory=directory, family=family, config=config, tokenizer=found, tensors=tensors)


def load_named_tokenizer(name: str, config: GPTConfig) -> Tokenizer:
    """Load the tokenizer of a model: a tokenizer.json, or "ids" for none. Raises `UserError` if it has too many ids."""
    if name == "ids":
        return IdTokenizer(config.vocab_size or 0)
    tokenizer = load_tokenizer(name)
    check_vocabulary(tokenizer, name, config)
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, name: str | Path, config: GPTConfig) -> None:
    """Raise `UserError` if a tokenizer has more ids than the model. name: its file."""
    size, ids = config.vocab_size or 0, tokenizer.vocab_size
    both = f"{name} has ids up to {ids - 1:,}, the model a vocab_size of {size:,}"
    if ids > size:
        raise UserError(f"{both}: it is not this model's tokenizer. Give the right one with --tokenizer FILE")
    if ids + PADDING < size:
        warnings.warn(f"{both}: is it this model's tokenizer?", UserWarning, stacklevel=4)


def end_tokens(run: Path) -> list[int]:
    """Return the end tokens in the files of an imported model. The list is empty for other runs."""
    for name in reversed(IN_HF_FOLDER):  # generation_config.json takes precedence
        ends = read_object(run / HF_FOLDER / name).get("eos_token_id")
        if ends is not None:
            return [end for end in (ends if isinstance(ends, list) else [ends]) if type(end) is int]
    return []


def keep_companions(source: Path, run: Path) -> None:
    """Copy the files that accompany the weights into a run directory. source: the directory of a model or a run."""
    copy_files(source, run, BESIDE_TOKENIZER)
    of = source / HF_FOLDER if (source / "experiment.json").exists() else source
    copy_files(of, run / HF_FOLDER, (*IN_HF_FOLDER, README))


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files with these names that are there."""
    for name in names:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(target / name, read_bytes(source / name, LARGEST_CONFIG))


def special_ids(tokenizer: Tokenizer, end: int | None = None) -> dict[str, int | None]:
    """Return the ids that other programs call bos, eos, pad and unk, or None for a token that is missing.

    end: the id that ends the turns of a chat, if no text has it.
    """
    # A vocabulary of characters or bytes has no id to spare: the token that replaces an empty prompt serves, not special, so
    # that every decoder prints it. Texts have no end, since vLLM stops at the tokenizer's eos, whatever
    # generation_config.json says. U+0003 ends a chat's turns, and is special, so that it is not printed.
    if isinstance(tokenizer, (CharTokenizer, ByteTokenizer)):
        start = find_start_token(tokenizer)[0]
        return {"bos": start, "eos": end, "pad": start if end is None else end, "unk": start}
    last = tokenizer.end_of_text  # the usual choice for a byte-level BPE, as in GPT-2
    return {"bos": next(iter(tokenizer.prefix), last), "eos": last, "pad": last, "unk": last}


def tokenizer_json(tokenizer: Tokenizer, end: int | None = None) -> str | None:
    """Return the text of tokenizer.json, or None for a run that has ids and no tokenizer. end: see `special_ids`."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json()
    if isinstance(tokenizer, CharTokenizer):
        # Each character is a word.
        unknown = tokenizer.decode([find_start_token(tokenizer)[0]])
        vocab = {c: i for i, c in enumerate(tokenizer.characters)}
        return _render(
            model={"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
            pre_tokenizer={"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
            decoder={"type": "Fuse"},
            added_tokens=_added_tokens(tokenizer, end),
        )
    if isinstance(tokenizer, ByteTokenizer):
        added, names = _added_tokens(tokenizer, end), list_byte_names()
        # An added token is found in the text itself, where the name of a byte would be another character.
        spelled = [{"type": "Replace", "pattern": {"String": names[t["id"]]}, "content": t["content"]} for t in added]
        for token in added:
            names[token["id"]] = token["content"]
        return _render(
            model={"type": "BPE", "vocab": {name: byte for byte, name in enumerate(names)}, "merges": []},
            normalizer={"type": "Sequence", "normalizers": [{"type": "ByteLevel"}, *spelled]},
            decoder={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            added_tokens=added,
        )
    return None


def _added_tokens(tokenizer: CharTokenizer | ByteTokenizer, end: int | None) -> list[Json]:
    """Return the added tokens of tokenizer.json, of which the end is special."""
    ids: Any = {*special_ids(tokenizer, end).values()} - {None}
    return [{"id": i, "content": tokenizer.decode([i]), "special": i == end, **PLAIN_TOKEN} for i in sorted(ids)]


def _render(**parts: Any) -> str:
    absent = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return json.dumps({"version": "1.0", **absent, **parts}, ensure_ascii=False, indent=2) + "\n"


def list_byte_names() -> list[str]:
    """Return the character for each byte in GPT-2's vocabulary: itself if it is visible, else one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def tokenizer_config(tokenizer: Tokenizer, block_size: int, end: int | None = None) -> Json:
    """Return the tokenizer_config.json that transformers' AutoTokenizer needs. end: see `special_ids`."""
    # An empty table: without one, transformers 5 makes tokens with a name special, and would drop newlines in decoding.
    added = {} if isinstance(tokenizer, BPETokenizer) else {"added_tokens_decoder": {}}
    return added | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,  # true would drop spaces before punctuation when decoding
        **{f"{t}_token": tokenizer.decode([i]) for t, i in special_ids(tokenizer, end).items() if i is not None},
    }
