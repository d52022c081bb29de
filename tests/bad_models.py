"""Damaged models in Hugging Face's format, part of the directory in which the table of bad inputs runs."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxgpt.hf.families import GPT2
from jaxgpt.hf.family import their_shape
from jaxgpt.hf.weights import hold, shapes_of, write
from jaxgpt.model import GPTConfig

CONFIG = {"model_type": "gpt2", "vocab_size": 60, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


def prepare_models(place: Path) -> None:
    root = place / "models"
    root.mkdir()
    good = tensors_of(GPT2.read(CONFIG))
    _model(root / "good", CONFIG, good)
    for name, changed in {
        "mixed": {"model_type": ["gpt2"]},
        "activation": {"activation_function": "swish"},
    }.items():
        _model(root / name, CONFIG | changed)
    for name in ("adapter", "pickled", "integers", "cut", "enormous"):
        _model(root / name, CONFIG)
    (root / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    save_file(good, root / "adapter/adapter_model.safetensors")
    (root / "pickled/pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    wrong = {"transformer.wpe.weight": np.ones((4, 8), np.float32), "adapter": np.ones(8, np.float32)}
    _model(root / "all_at_once", CONFIG, {n: x for n, x in (good | wrong).items() if not n.endswith("ln_2.bias")})
    _model(root / "tokenizer_large", CONFIG, good, characters=78)

    # Files that are none, heads that lie, and indexes.
    save_file(good | {"transformer.wpe.weight": np.zeros((16, 8), np.int32)}, root / "integers/model.safetensors")
    whole = (root / "good/model.safetensors").read_bytes()
    head = json.dumps({"a": {"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 64]}}).encode()
    for name, raw in {
        "cut": whole[:-100],
        "enormous": len(head).to_bytes(8, "little") + head + bytes(64),
    }.items():
        (root / name / "model.safetensors").write_bytes(raw)
    for name, file in {
        "index_dots": "../good/model.safetensors",
        "index_gone": "model-2.safetensors",
    }.items():
        _model(root / name, CONFIG)
        index = {"weight_map": {"transformer.wte.weight": file}}
        (root / name / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors_of(config: GPTConfig) -> dict[str, np.ndarray]:
    shapes = shapes_of(config)
    return {
        row.theirs: np.zeros(their_shape([shapes[path] for path in row.ours], row.layout), np.float32)
        for row in GPT2.expand_rules(config, shapes)
    }


def _model(directory: Path, config: dict, tensors: dict[str, np.ndarray] | None = None, characters: int = 60) -> None:
    """Without tensors: no file of them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    letters = "".join(chr(0x21 + i) for i in range(characters))
    (directory / "tokenizer.json").write_text(json.dumps({"jaxgpt": "char", "characters": letters}))
    if tensors is not None:
        write(directory, {n: hold(x) for n, x in tensors.items()})
