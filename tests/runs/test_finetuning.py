"""The way that docs/finetuning.md describes: from a model in Hugging Face's format and conversations to a better one."""

import dataclasses
import json
import re

import pytest

import jaxgpt
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.experiment import TrainConfig
from jaxgpt.hf.families import LLAMA
from jaxgpt.hf.source import tokenizer_json
from jaxgpt.hf.weights import to_tensors, write
from jaxgpt.model import GPTConfig
from jaxgpt.presets import finetune
from jaxgpt.runs.pretrained import open_weights
from jaxgpt.tools.convert import export_hf, import_model
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from jaxgpt.training import introduction, open_training
from tests.helpers import chat_file, make_model

CONTEXT = 131_072
# Llama 3.2, but small.
SHAPE = dict(vocab_size=256, block_size=CONTEXT, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, mlp_dim=32, bias=False)
LLAMA3 = dict(
    rope_scaling="llama3", rope_theta=5e5, rope_factor=32.0, rope_low_freq_factor=1.0, rope_original_context=8192
)
CONFIG = GPTConfig(**SHAPE, **LLAMA3, position="rope", norm="rmsnorm", activation="swiglu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A directory as the Hub has them."""
    directory = tmp_path_factory.mktemp("hub") / "llama"
    directory.mkdir()
    write(directory, to_tensors(make_model(CONFIG)[1], LLAMA, CONFIG))
    (directory / "config.json").write_text(json.dumps(LLAMA.write(CONFIG)))
    (directory / "tokenizer.json").write_text(tokenizer_json(ByteTokenizer()))
    return directory


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return chat_file(tmp_path_factory.mktemp("chats"))


def tuning(base, path, **fields):
    train = TrainConfig(init_from=str(base), steps=2, batch_size=4)
    return dataclasses.replace(finetune(), data=DataConfig(path=str(path)), train=train, **fields)


def test_an_open_context_is_what_the_data_need(base, chats, text_file, tmp_path):
    """A context of 131,072 tokens fits no card. What is chosen instead is said, and what is given stays."""
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text() * 12)
    longest = max(len(line) for line in chats.read_text().splitlines())
    found = {}
    for name, path, fields in (
        ("chats", chats, {}),
        ("text", text, {}),
        ("given", chats, {"model": GPTConfig(block_size=2048)}),
    ):
        session = open_training(tuning(base, path, **fields), tmp_path / "run", None)
        found[name] = session.experiment.model.block_size
        said = list(introduction(session, 0))
        cut = f"the weights' context of {CONTEXT} tokens is cut to {found[name]}: --model.block-size {CONTEXT} keeps it"
        assert cut in said
        no_template = any(line.startswith("the tokenizer has no chat template: a turn is written as") for line in said)
        assert no_template == (path == chats)
    assert found["chats"] % 64 == 0 and 64 < found["chats"] < longest and found["text"] == 1024
    assert found["given"] == 2048


def test_the_base_is_scored_and_an_export_has_its_context(base, chats, tmp_path, capsys):
    """Before any step the validation loss is what `evaluate` says of the held-out conversations; rows are short."""
    import_model(str(base), tmp_path / "base")
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("\n".join(chats.read_text().splitlines()[-4:]))
    found = evaluate_run(jaxgpt.load(tmp_path / "base"), str(held_out))
    assert found["stride"] < 256 and found["left_out"] == found["shortened"] == 0
    tuned = jaxgpt.fit(tuning(base, chats), tmp_path / "run")
    said = re.search(r"validation loss of these weights, before the first step: ([\d.]+)", capsys.readouterr().err)
    assert float(said[1]) == pytest.approx(found["loss"], abs=1e-4)
    assert tuned.model.config.block_size < 256
    assert open_weights(str(export_hf(tuned.directory, tmp_path / "out"))).config.block_size == CONTEXT
