"""An invariant of conversations: a run is prompted with the tokens that it was trained on."""

import hashlib
import json

import pytest

from jaxgpt.data.conversations import read_messages
from jaxgpt.data.dataset import DataConfig, open_data
from jaxgpt.data.template import CHATML, PLAIN, fingerprint
from tests.data.test_template import GOLDEN
from tests.helpers import begin_with, chat_file, recorded_run

T = 256


def tokenizer_json(begin=(), special=True):
    """Of bytes, with ChatML's tokens or without any, which begins a text with these."""
    held = json.loads(json.dumps(GOLDEN["tokenizers"]["bytes"]))
    ids = {token["content"]: token["id"] for token in held["added_tokens"]}
    if begin:
        held["post_processor"] = begin_with({token: ids[token] for token in begin})
    if not special:
        for name in ("<|im_start|>", "<|im_end|>"):
            held["added_tokens"] = [t for t in held["added_tokens"] if t["content"] != name]
    return json.dumps(held)


BEGINNINGS = [(), ("<s>",), ("<s>", "<|system|>")]  # tokens that a tokenizer begins texts with


@pytest.mark.parametrize("begin", BEGINNINGS)
@pytest.mark.parametrize("kind", ["chatml", "plain", "marked", "instruct"])
def test_conversations_are_asked_as_they_were_learnt(tmp_path, kind, begin):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(begin, special=kind != "plain"))
    if kind in GOLDEN["templates"] and kind != "chatml":
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps(GOLDEN["tokens"] | {"chat_template": GOLDEN["templates"][kind]})
        )
    config = DataConfig(path=str(chat_file(tmp_path)), tokenizer=str(tmp_path / "tokenizer.json"))
    dataset = open_data(config, block_size=T)
    run = recorded_run(tmp_path / "run", config, dataset, block_size=T)
    texts = [messages for _, messages, _ in read_messages(config.path)][:36]
    prompts = run.prompt_format.encode([messages[0]["content"] for messages in texts], chat=True)
    for number, prompt in enumerate(prompts):
        ids, answers = dataset.train.read(number)
        assert ids[: answers.argmax()].tolist() == prompt and int(ids[-1]) in run.prompt_format.stop_tokens(chat=True)
    own = kind in ("marked", "instruct")  # it writes its own
    first = [run.tokenizer.specials["<s>"]] if own else list(run.tokenizer.prefix)
    assert prompts[0][: len(first)] == first and prompts[0][len(first)] not in run.tokenizer.prefix


def test_without_such_a_token_everything_is_what_it_always_was(tmp_path):
    """Templates and data by their SHA-256, as experiment.json has had them: runs that are there go on."""
    assert fingerprint(CHATML) == "d0040cb544013248b89c116147d655a1be2dc04f0d713f4999642b1a20fe379e"
    assert fingerprint(PLAIN) == "c1c3b15308915f46a931fe54525fe8b0871860f2da8b381bf3cb040753efea65"
    (tmp_path / "t.txt").write_text("En un lugar\nde la Mancha\n" * 40)
    for path, tokenizer, expected in (
        (chat_file(tmp_path), "byte", "0809f0f366912ee412f533616c1830b99d12815e3ba5994a8dc61dcce22b7499"),
        (tmp_path / "chat.jsonl", "char", "e0382fff18efed966189a9a9ceba949f46d01350fe23ce44aca6743ae7ee4f66"),
        (tmp_path / "t.txt", "byte", "40ca933ac88c38c95e628b4fdc81cff09c4ac673880e3d69ec736e721cc94357"),
        (tmp_path / "t.txt", "char", "2020b669de10a8d2114cd4a209eea937f05aca4e8d10c1f2f6f1be6ee5c8b362"),
    ):
        found = open_data(
            DataConfig(path=str(path), tokenizer=tokenizer), block_size=16 if path.suffix != ".jsonl" else 112
        )
        assert hashlib.sha256(json.dumps(found.fingerprint, sort_keys=True).encode()).hexdigest() == expected
