"""Damaged models in Hugging Face's format and in GGUF, part of the directory in which the table of bad inputs runs."""

import json
import struct
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxgpt.hf.families import GPT2
from jaxgpt.hf.family import their_shape
from jaxgpt.hf.weights import shapes_of
from jaxgpt.model import GPTConfig

CONFIG = {"model_type": "gpt2", "vocab_size": 60, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}


def tensors_of(config: GPTConfig) -> dict[str, np.ndarray]:
    shapes = shapes_of(config)
    return {
        row.theirs: np.zeros(their_shape([shapes[path] for path in row.ours], row.layout), np.float32)
        for row in GPT2.expand_rules(config, shapes)
    }


def prepare_models(root: Path) -> None:
    letters = "".join(chr(0x21 + i) for i in range(60))
    for name in ("good", "pickled", "integers", "enormous", "index_dots"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(CONFIG))
        (root / name / "tokenizer.json").write_text(json.dumps({"jaxgpt": "char", "characters": letters}))
    good = tensors_of(GPT2.read(CONFIG))
    save_file(good, root / "good/model.safetensors")
    save_file(good | {"transformer.wpe.weight": np.zeros((16, 8), np.int32)}, root / "integers/model.safetensors")
    (root / "pickled/pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    head = json.dumps({"a": {"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 64]}}).encode()
    (root / "enormous/model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(64))
    index = {"weight_map": {"transformer.wte.weight": "../good/model.safetensors"}}
    (root / "index_dots/model.safetensors.index.json").write_text(json.dumps(index))
    (root / "cut.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
