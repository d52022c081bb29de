"""A run that was trained on conversations gives the same answers in transformers as here."""

import dataclasses
import json

import pytest

import jaxgpt
from jaxgpt.data.conversations import find_end_of_turn, tokenise
from jaxgpt.data.dataset import DataConfig
from jaxgpt.data.template import PLAIN_CHARACTERS, find_template
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, train_bpe
from jaxgpt.tools.convert import export_gguf, export_hf, import_model, write_tokenizer
from tests.conftest import TEXT
from tests.data.test_documents import tokenizer_json
from tests.helpers import chat_file, edit_record, make_model, recorded_run, write_params
from tests.hf.test_in_and_out import MODEL
from tests.hf.test_parity import live

CHATML = {"<|endoftext|>": 0, "<|im_start|>": 260, "<|im_end|>": 261}


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """(a run that has learnt from conversations in ChatML, where it was exported to)."""
    place = tmp_path_factory.mktemp("chat")
    held = json.loads(train_bpe([TEXT], 260).to_json())
    held["added_tokens"] = [held["added_tokens"][0] | {"content": token, "id": i} for token, i in CHATML.items()]
    (place / "tokenizer.json").write_text(json.dumps(held))
    config = DataConfig(path=str(chat_file(place)), tokenizer=str(place / "tokenizer.json"))
    model = dataclasses.replace(MODEL, n_layer=1, block_size=160, vocab_size=262)
    run = recorded_run(place / "run", config, config.open_dataset(model), block_size=160)
    edit_record(run.directory, lambda record: record["experiment"].update(model=dataclasses.asdict(model)))
    write_params(run.directory, make_model(model)[1], 0)
    return jaxgpt.load(run.directory), export_hf(run.directory, place / "out")


@pytest.mark.slow
@live
@pytest.mark.parametrize("kind", ["char", "byte", "bpe", "chatml", "begun"])
def test_transformers_reads_conversations_as_the_run_does(chat, kind, tmp_path):
    """By the template that the tokenizer has gone out with; and stops where a turn does."""
    from transformers import AutoTokenizer, GenerationConfig

    run, out = chat
    system = {"role": "system", "content": "1 and 0?"}
    turns = [{"role": ("user", "assistant")[n % 2], "content": x} for n, x in enumerate(["1 and 2?", "x3", "", " x\n"])]
    if kind != "chatml":
        alphabet = PLAIN_CHARACTERS + "".join(m["content"] for m in (system, *turns))
        known = {"char": CharTokenizer(alphabet), "byte": ByteTokenizer(), "bpe": train_bpe([TEXT], 260)}
        known["begun"] = BPETokenizer(tokenizer_json(("<s>", "<|system|>")))
        run, out = dataclasses.replace(run, tokenizer=known[kind], directory=tmp_path / "none"), tmp_path
        write_tokenizer(out, run, find_template(run.tokenizer, None))
    template, theirs = find_template(run.tokenizer, None), AutoTokenizer.from_pretrained(out)
    for messages in (turns[:1], turns[:2], turns, [system, *turns[:1]], [system, *turns]):
        for prompt in (False, True):
            expected = tokenise(template.write(messages, prompt=prompt), run.tokenizer)[0].tolist()
            found = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert found == expected
    marked = theirs.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
    assert marked["assistant_masks"] == tokenise(template.write(turns), run.tokenizer)[1].astype(int).tolist()
    end = find_end_of_turn(template, run.tokenizer)
    if kind != "bpe":  # where no token has a name, U+0003 among them
        assert theirs.decode([*theirs.encode("a\n1"), end], skip_special_tokens=True) == "a\n1"
    assert GenerationConfig.from_pretrained(out).eos_token_id == {"chatml": [0, end], "begun": [1, end]}.get(
        kind, [end]
    )


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 5}}, [0, 5]),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {"eos_token_id": [7, 0, 10**6, "x"]}}, [0, 7]),
        ({"generation_config.json": {}}, [0]),
    ],
)
def test_an_imported_model_ends_a_text_where_its_files_say(chat, tmp_path, files, ends):
    run = dataclasses.replace(chat[0], metadata=dataclasses.replace(chat[0].metadata, directory=tmp_path))
    (tmp_path / "hf").mkdir()
    for name, values in files.items():
        (tmp_path / "hf" / name).write_text(json.dumps(values))
    assert run.prompt_format.stop_tokens(chat=False) == ends


def test_a_conversation_is_read_the_same_when_it_comes_back(chat, tmp_path):
    run, _ = chat
    import_model(str(export_gguf(run.directory, tmp_path / "m.gguf")), tmp_path / "back")
    back = jaxgpt.load(tmp_path / "back")
    assert back.prompt_format.encode("1 and 2?", chat=True) == run.prompt_format.encode("1 and 2?", chat=True)
    assert back.prompt_format.stop_tokens(chat=True) == run.prompt_format.stop_tokens(chat=True) == [0, 261]
