"""List damaged models in Hugging Face's format, with the message for each: part of the table of bad inputs."""

import json
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxgpt.hf.families import GPT2
from jaxgpt.hf.family import their_shape
from jaxgpt.hf.weights import hold, shapes_of, write
from jaxgpt.model import GPTConfig

CONFIG = {"model_type": "gpt2", "vocab_size": 60, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}

# Directories under models/, with what is said.
MODELS = [
    ("nowhere", "no directory at models/nowhere"),
    ("file", "models/file is a file: give the directory"),
    ("empty", "has no config.json"),
    ("adapter", "has an adapter of 'gpt2', no whole model. Merge it, and give import OUT: python -c"),
    ("no_weights", "has no .safetensors files: download model.safetensors"),
    ("consolidated", "has no .safetensors files but consolidated.safetensors, whose tensors have other names"),
    ("pickled", "has only pickled weights (pytorch_model.bin), which could run any code"),
    ("damaged", "config.json is damaged"),
    (
        "mixed",
        "model_type=['gpt2'] is not supported: jaxgpt reads gpt2, llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3",
    ),
    ("images", "model_type='gemma3' is not supported (of its parts only the model of text, as gemma3_text): jaxgpt"),
    ("no_width", "config.json: it has no n_embd"),
    ("huge_width", "n_embd=1152921504606846976"),
    ("odd_heads", "n_embd=8 is not divisible by n_head=3"),
    ("activation", "activation_function='swish': needs one of gelu_new"),
    ("quantised", "its weights are quantised"),
    ("all_at_once", "missing transformer.h.0-1.ln_2.bias; unknown adapter; transformer.wpe.weight is [4, 8]"),
    ("integers", "transformer.wpe.weight holds I32, jaxgpt reads F32, F16, BF16"),
    ("cut", "model.safetensors is not a valid safetensors file"),
    ("long_head", "model.safetensors is not a valid safetensors file"),
    ("enormous", "model.safetensors is not a valid safetensors file"),
    ("pipe", "model.safetensors is a pipe: give a regular file"),
    ("two_files", "has 2 .safetensors files and no model.safetensors.index.json"),
    ("index_dots", "names '../good/model.safetensors': it must name a .safetensors file next to it"),
    ("index_pickle", "names 'model.bin': it must name a .safetensors file"),
    ("index_gone", "model-2.safetensors is missing, but model.safetensors.index.json needs it"),
    ("tokenizer_large", "tokenizer.json has ids up to 77, the model a vocab_size of 60"),
]


def prepare_models(place: Path) -> None:
    root = place / "models"
    root.mkdir()
    (root / "file").write_text("x")
    (root / "empty").mkdir()
    good = tensors_of(GPT2.read(CONFIG))
    _model(root / "good", CONFIG, good)
    for name, changed in {
        "mixed": {"model_type": ["gpt2"]},
        "images": {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        "huge_width": {"n_embd": 2**60},
        "odd_heads": {"n_head": 3},
        "activation": {"activation_function": "swish"},
        "quantised": {"quantization_config": {"bits": 4}},
    }.items():
        _model(root / name, CONFIG | changed)
    _model(root / "no_width", {key: value for key, value in CONFIG.items() if key != "n_embd"})
    for name in (
        "damaged",
        "adapter",
        "consolidated",
        "no_weights",
        "pickled",
        "integers",
        "cut",
        "long_head",
        "enormous",
        "pipe",
        "two_files",
    ):
        _model(root / name, CONFIG)
    (root / "damaged/config.json").write_text('{"model_type": "gp')
    (root / "adapter/adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    save_file(good, root / "adapter/adapter_model.safetensors")
    save_file(good, root / "consolidated/consolidated.safetensors")
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
        "long_head": (2**60).to_bytes(8, "little") + b'{"a":',
        "enormous": len(head).to_bytes(8, "little") + head + bytes(64),
    }.items():
        (root / name / "model.safetensors").write_bytes(raw)
    os.mkfifo(root / "pipe/model.safetensors")
    for name in ("a.safetensors", "b.safetensors"):
        (root / "two_files" / name).write_bytes(whole)
    for name, file in {
        "index_dots": "../good/model.safetensors",
        "index_pickle": "model.bin",
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
