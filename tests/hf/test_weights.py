"""Weights: which tensors are read from the files of a model, and which are refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxgpt.errors import UserError
from jaxgpt.hf.families import GPT2
from jaxgpt.hf.weights import INDEX, ONE, list_tensors, read_params
from tests.bad_models import CONFIG, tensors_of

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save(directory, files, index=None):
    """files: name -> tensors. index: tensor -> file, of those that it names."""
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"weight_map": index}))


def test_of_a_tensor_that_is_there_twice_the_index_chooses(tmp_path):
    files = {name: {"a": np.float32([name == SECOND]), name[6:11]: np.ones(1, np.float32)} for name in (FIRST, SECOND)}
    save(tmp_path, files, {"a": SECOND, "00001": FIRST, "00002": SECOND})
    found = list_tensors(tmp_path)
    assert found.keys() == {"a", "00001", "00002"}
    assert found["a"].read() == [1.0]


def test_one_file_goes_before_an_index_of_an_earlier_save(tmp_path):
    """As in transformers 5.24; and the files of other formats are nobody's weights."""
    save(tmp_path, {FIRST: {"a": np.zeros(1, np.float32)}, ONE: {"a": np.ones(1, np.float32)}}, {"a": FIRST})
    assert list_tensors(tmp_path)["a"].read() == [1.0]
    (tmp_path / INDEX).unlink()
    (tmp_path / ONE).rename(tmp_path / "mine.safetensors")
    (tmp_path / FIRST).rename(tmp_path / "consolidated.safetensors")
    assert list_tensors(tmp_path)["a"].read() == [1.0]


def model(directory, **changed):
    """A GPT-2 of zeros, but for `changed`. Returns (what is stored, its family, its configuration)."""
    config = GPT2.read(CONFIG)
    save(directory, {ONE: tensors_of(config) | changed})
    return list_tensors(directory), GPT2, config


def test_an_output_matrix_that_is_not_the_embedding_it_is_tied_to_is_refused(tmp_path):
    embedding = np.float32(np.arange(480) % 100).reshape(60, 8)
    both = {"transformer.wte.weight": embedding, "lm_head.weight": embedding.astype("bfloat16")}
    params = read_params(*model(tmp_path, **both))
    assert "lm_head" not in params
    np.testing.assert_array_equal(params["wte"]["embedding"], embedding)
    both["lm_head.weight"] = embedding + np.float32(np.arange(60) == 59)[:, None]
    with pytest.raises(UserError, match="lm_head.weight differs from transformer.wte.weight.*tie_word_embeddings"):
        read_params(*model(tmp_path, **both))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_that_are_none_are_told_with_their_tensors(tmp_path, dtype):
    broken = [np.array([-6e4, 6e4, *5 * [0.0], x], np.float32).astype(dtype) for x in (np.nan, -np.inf, 1.0)]
    broken = {f"transformer.{name}.bias": x for name, x in zip(["h.0.ln_1", "h.1.ln_1", "ln_f"], broken, strict=True)}
    with pytest.warns(
        UserWarning, match=r"^transformer.h.0.ln_1.bias, transformer.h.1.ln_1.bias, 2 in all have NaN or infinite"
    ):
        read_params(*model(tmp_path, **broken))
