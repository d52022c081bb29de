"""The server over the engine of a model."""

import concurrent.futures
import dataclasses
import json
import re

import pytest

from jaxgpt.data.dataset import DataConfig, open_data
from tests.gguf.test_tokenizers import sentencepiece
from tests.helpers import make_model, recorded_run
from tests.serve.conftest import BLOCK, CHAT, HELLO, FakeEngine

PROMPTS = ["In a village", "x", "the lance-rack, an old buckler, a lean hack", "né"]


def question(number):
    """One of many requests, each with other parameters."""
    filters = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05}]
    more = [{}, {"repetition_penalty": 1.2}, {"stop": "e"}, {"frequency_penalty": 1.5, "logit_bias": {"101": 3}}]
    body = {"prompt": PROMPTS[number % 4][: 1 + number % 40], "max_tokens": 1 + number % 30, "seed": number}
    return body | {"logprobs": number % 4} | filters[number % 5] | more[number % 4]


def test_a_seed_gives_the_text_of_sample(real, byte_run):
    texts = byte_run.sample(PROMPTS[:1] * 3, seed=7, max_new_tokens=16, top_k=20)
    asked = dict(prompt=PROMPTS[0], n=3, seed=7, max_tokens=16, top_k=20)
    assert [choice["text"] for choice in real.choices(**asked)] == texts and len({*texts}) == 3
    assert real.choices(**asked, stream=True) == real.choices(**asked)
    text = byte_run.sample("hello", chat=True, seed=3, max_new_tokens=20)
    asked = dict(messages=HELLO, seed=3, max_tokens=20)
    for stream in (False, True):
        assert [choice["text"] for choice in real.choices(CHAT, **asked, stream=stream)] == [text]


def test_a_completion_begins_with_its_space_where_tokens_have_theirs_before_them(faked, text_file, tmp_path):
    """As in Llama 2's and Mistral's vocabularies, whose decoders drop the first space of a text."""
    parts = sentencepiece(spaced=True).parts() | {"post_processor": None}
    parts["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    config = DataConfig(path=str(text_file), tokenizer=str(tmp_path / "tokenizer.json"))
    run = recorded_run(tmp_path / "run", config, open_data(config, block_size=96), block_size=96)
    run = dataclasses.replace(run, params=make_model(run.model.config)[1]).for_decoding()
    client = faked(FakeEngine(answer=[parts["model"]["vocab"]["▁and"]]), run=run)
    for prompt, text, offsets in (("dent lance", " and and", [0, 4]), ("", "and and", [0, 3])):
        (choice,) = client.ask(prompt=prompt, max_tokens=2, logprobs=1).json()["choices"]
        assert choice["text"] == text and choice["logprobs"]["text_offset"] == offsets
        assert choice["logprobs"]["tokens"] == [" and"] * 2
    assert client.choices(prompt="dent lance", max_tokens=2, echo=True)[0]["text"] == "dent lance and and"


@pytest.mark.parametrize("number", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_requests_at_once_give_the_same_bits_as_each_alone(real, number):
    alone = [real.choices(**question(each)) for each in range(number)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda each: real.choices(**question(each)), range(number)))
    assert together == alone


def test_prompt_logprobs_are_those_of_score(real, byte_run):
    (choice,) = real.ask(prompt=PROMPTS[2], echo=True, max_tokens=0, logprobs=1).json()["choices"]
    (expected,) = byte_run.score([PROMPTS[2]])
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None and found[1:] == pytest.approx(expected.logprobs[1:], rel=1e-5)
    # As lm-evaluation-harness finds out whether a token is the most probable.
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert all(b >= p for b, p in zip(best, found[1:], strict=True))


def test_nothing_is_compiled_after_the_warm_up(real):
    for number in range(8):
        real.choices(**question(number) | {"echo": bool(number % 2)})
    real.choices(prompt=[[1, 2], [3] * 40], n=2, seed=2**32 - 1, max_tokens=3)
    assert real.sample("compilations_total") == 0


SQUIRE = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,9}$"}, "rides": {"enum": ["ass", "horse"]}},
    "required": ["name", "rides"],
    "additionalProperties": False,
}


def test_structured_output_matches_however_it_is_asked_for(real):
    """The model has random parameters. Clients without a grammar get their bits, and nothing is compiled."""
    wanted = {"json_schema": {"name": "squire", "schema": SQUIRE, "strict": True}, "type": "json_schema"}
    asked = {"messages": HELLO, "max_tokens": 60, "n": 2}
    free = real.choices(**question(1))
    ways = [{"response_format": wanted}, {"structured_outputs": {"json": SQUIRE}}]
    ways += [{"structured_outputs": {"json": json.dumps(SQUIRE)}}, {"response_format": wanted, "stream": True}]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = [pool.submit(real.choices, CHAT, **asked, **way) for way in ways]
        assert real.choices(**question(1)) == free
    for choices in (future.result() for future in found):
        assert len(choices) == 2
        for choice in choices:
            assert choice["finish"] == "stop" and json.loads(choice["text"])["rides"] in ("ass", "horse"), choice
    schema = {"type": "json_object", "schema": {"const": "42"}}  # as llama.cpp has it
    patterns = [
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["ja", "nein"]}}, "ja|nein"),
    ]
    for how, pattern in [*patterns, ({"response_format": schema}, '"42"')]:
        (choice,) = real.choices(prompt="x", max_tokens=20, **how, logprobs=5)
        assert re.fullmatch(pattern, choice["text"]) and choice["finish"] == "stop"
        assert min(choice["logprobs"]) >= -9999  # OpenAI's least, also of what a grammar bans
    assert real.sample("compilations_total") == 0


def test_a_bias_bans(real):
    (choice,) = real.choices(prompt="a", max_tokens=40, temperature=0, logit_bias={str(i): -100 for i in range(32)})
    assert min(choice["text"]) >= " "


def test_the_context_ends_a_completion(real):
    body = real.ask(prompt="a" * (BLOCK - 4), max_tokens=64, temperature=0).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 5


def test_usage_tells_what_was_not_computed_again(real):
    """Also of a completion that ends with its first burst."""
    body = dict(prompt="b" * 96, max_tokens=1)
    real.ask(**body)
    assert real.ask(**body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
