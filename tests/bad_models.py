"""Models in Hugging Face's format that will not do, and what is said of each: part of the table of bad inputs."""

import json
import shutil
from pathlib import Path

import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.hf.families import GPT2
from jaxgpt.hf.family import their_shape
from jaxgpt.hf.weights import hold, shapes_of, write

CONFIG = {"model_type": "gpt2", "vocab_size": 60, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}

# Directories under models/, with what is said.
MODELS = [
    ("nowhere", "no directory at models/nowhere"),
    ("empty", "has no config.json"),
    ("no_weights", "has no .safetensors files: there are no weights"),
    ("pickled", "has only pickled weights (pytorch_model.bin), which could run any code"),
    ("nan", "NaN is not JSON"),
    (
        "no_type",
        "model_type=None is unknown: needs one of gpt2, llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text",
    ),
    ("no_width", "config.json: it has no n_embd"),
    ("activation", "activation_function='swish': needs one of gelu_new"),
    ("quantised", "its weights are quantised"),
    ("yarn", "rope_type='yarn': needs one of default, linear, llama3"),
    ("layers_list", "layer_types=['full_attention']: needs 2"),
    ("missing", "missing transformer.h.0-1.ln_2.bias, transformer.wpe.weight"),
    ("all_at_once", "missing transformer.ln_f.bias; unknown adapter; transformer.wpe.weight is [4, 8]"),
    ("integers", "transformer.wpe.weight holds I32, needs one of F32, F16, BF16"),
    ("cut", "model.safetensors is not a valid safetensors file"),
    ("enormous", "model.safetensors is not a valid safetensors file"),
    ("two_files", "has 2 .safetensors files and no model.safetensors.index.json"),
    ("index_dots", "names '../good/model.safetensors': needs the name of a .safetensors file next to it"),
    ("index_gone", "model-2.safetensors is missing, but model.safetensors.index.json needs it"),
    ("tokenizer_large", "tokenizer.json has ids up to 77, the model a vocab_size of 60"),
]


def prepare_models(place: Path) -> None:
    root = place / "models"
    root.mkdir()
    (root / "empty").mkdir()
    good = tensors_of(GPT2.read(CONFIG))
    _model(root / "good", CONFIG, good)
    for name, changed in {
        "no_type": {"model_type": None},
        "activation": {"activation_function": "swish"},
        "quantised": {"quantization_config": {"bits": 4}},
    }.items():
        _model(root / name, CONFIG | changed)
    _model(root / "no_width", {key: value for key, value in CONFIG.items() if key != "n_embd"})
    llama = {"model_type": "llama", "vocab_size": 60, "hidden_size": 8, "intermediate_size": 16}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    _model(root / "yarn", llama | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    _model(root / "layers_list", llama | {"model_type": "qwen2", "layer_types": ["full_attention"]})
    for name, raw in {"nan": '{"n_embd": NaN}'}.items():
        _model(root / name, CONFIG)
        (root / name / "config.json").write_text(raw)
    _model(root / "no_weights", CONFIG)
    _model(root / "pickled", CONFIG)
    (root / "pickled/pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")

    small = np.ones(8, np.float32)
    without = {n: x for n, x in good.items() if not n.endswith("ln_2.bias") and "wpe" not in n}
    wrong = {"transformer.wpe.weight": np.ones((4, 8), np.float32), "adapter": small}
    _model(root / "missing", CONFIG, without)
    _model(root / "all_at_once", CONFIG, {n: x for n, x in (good | wrong).items() if "ln_f.bias" not in n})
    _files(root)
    _model(root / "tokenizer_large", CONFIG, good, characters=78)


def _files(root: Path) -> None:
    """Files that are none, heads that lie, and indexes."""
    whole = (root / "good/model.safetensors").read_bytes()

    def head(**tensors) -> bytes:
        raw = json.dumps(tensors).encode()
        return len(raw).to_bytes(8, "little") + raw + bytes(64)

    def tensor(shape, *offsets, dtype="F32") -> dict:
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    for name, raw in {
        "cut": whole[:-100],
        "enormous": head(a=tensor([2**60, 2**60], 0, 64)),
        "integers": whole[:0] + _integers(whole),
    }.items():
        _model(root / name, CONFIG)
        (root / name / "model.safetensors").write_bytes(raw)
    _model(root / "two_files", CONFIG)
    for name in ("a.safetensors", "b.safetensors"):
        (root / "two_files" / name).write_bytes(whole)
    for name, weight_map in {
        "index_dots": {"transformer.wte.weight": "../good/model.safetensors"},
        "index_gone": {"transformer.wte.weight": "model-2.safetensors"},
    }.items():
        shutil.copytree(root / "good", root / name)
        (root / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _integers(whole: bytes) -> bytes:
    """With one tensor said to be of integers as wide as it is."""
    size = int.from_bytes(whole[:8], "little")
    head = json.loads(whole[8 : 8 + size])
    head["transformer.wpe.weight"]["dtype"] = "I32"
    raw = json.dumps(head).encode()
    return len(raw).to_bytes(8, "little") + raw + whole[8 + size :]


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
