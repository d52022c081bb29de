"""The server over the engine of a model."""

import concurrent.futures
import dataclasses
import json
import re

import pytest

from jaxgpt.data.dataset import DataConfig, open_data
from tests.helpers import make_model, recorded_run
from tests.sample.test_detokenize import make_pieces
from tests.serve.conftest import BLOCK, CHAT, HELLO, FakeEngine, join_choices, read_events

PROMPTS = ["In a village", "x", "the lance-rack, an old buckler, a lean hack", "né"]


def question(number):
    """One of many requests, each with other parameters."""
    filters = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 1.3}, {"min_p": 0.05}]
    more = [{}, {"repetition_penalty": 1.2}, {"stop": "e"}, {"frequency_penalty": 1.5, "logit_bias": {"101": 3}}]
    body = {"prompt": PROMPTS[number % 4][: 1 + number % 40], "max_tokens": 1 + number % 30, "seed": number}
    return body | {"logprobs": number % 4} | filters[number % 5] | more[number % 4]


def answer(client, body):
    response = client.ask(**body)
    assert response.status_code == 200, response.text
    return response.json()["choices"], response.json()["usage"]["completion_tokens"]


def test_a_seed_gives_the_text_of_sample(real, byte_run):
    for seed, prompt in enumerate(PROMPTS):
        (text,) = byte_run.sample([prompt], seed=seed, max_new_tokens=20)
        assert answer(real, dict(prompt=prompt, seed=seed, max_tokens=20))[0][0]["text"] == text
    text = byte_run.sample("hello", chat=True, seed=3, max_new_tokens=20)
    body = real.ask(CHAT, messages=HELLO, seed=3, max_tokens=20).json()
    assert body["choices"][0]["message"]["content"] == text


def test_a_completion_begins_with_its_space_where_tokens_have_theirs_before_them(faked, text_file, tmp_path):
    """As in Llama 2's and Mistral's vocabularies, whose decoders drop the first space of a text."""
    (tmp_path / "tokenizer.json").write_text(make_pieces("Llama 2").to_json())
    config = DataConfig(path=str(text_file), tokenizer=str(tmp_path / "tokenizer.json"))
    run = recorded_run(tmp_path / "run", config, open_data(config, block_size=BLOCK), block_size=BLOCK)
    run = dataclasses.replace(run, params=make_model(run.model.config)[1]).for_decoding()
    cat = run.tokenizer.parts()["model"]["vocab"]["▁cat"]
    how = {"logit_bias": {cat: 100.0}, "max_new_tokens": 2, "slots": 1, "greedy": True}
    assert run.sample(["hello world", ""], **how) == [" cat cat", "cat cat"]
    assert "".join(run.stream("hello world", **how)) == " cat cat"
    client = faked(FakeEngine(answer=[cat]), run=run)
    for prompt, text, offsets in (("hello world", " cat cat", [0, 4]), ("", "cat cat", [0, 3])):
        (choice,), _ = answer(client, {"prompt": prompt, "max_tokens": 2, "logprobs": 1})
        assert choice["text"] == text and choice["logprobs"]["text_offset"] == offsets
        assert choice["logprobs"]["tokens"] == [" cat"] * 2
    (choice,), _ = answer(client, {"prompt": "hello world", "max_tokens": 2, "echo": True})
    assert choice["text"] == "hello world cat cat"


def test_n_choices_are_the_samples_of_equal_prompts(real, byte_run):
    texts = byte_run.sample(["In a"] * 3, seed=7, max_new_tokens=16, top_k=20)
    choices, _ = answer(real, dict(prompt="In a", n=3, seed=7, max_tokens=16, top_k=20))
    assert [choice["text"] for choice in choices] == texts


@pytest.mark.slow
def test_64_requests_at_once_give_the_same_bits_as_each_alone(real):
    alone = [answer(real, question(number)) for number in range(64)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda number: answer(real, question(number)), range(64)))
    assert together == alone


def test_prompt_logprobs_are_those_of_score(real, byte_run):
    (choice,), _ = answer(real, dict(prompt=PROMPTS[2], echo=True, max_tokens=0, logprobs=1))
    (expected,) = byte_run.score([PROMPTS[2]])
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None and found[1:] == pytest.approx(expected.logprobs[1:], rel=1e-5)
    # As lm-evaluation-harness finds out whether a token is the most probable.
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
    assert all(b >= p for b, p in zip(best, found[1:], strict=True))


def test_nothing_is_compiled_after_the_warm_up(real):
    for number in range(16):
        answer(real, question(number) | {"echo": bool(number % 2)})
    answer(real, dict(prompt=[[1, 2], [3] * 40], n=2, seed=2**32 - 1, max_tokens=3))
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
    free = [answer(real, question(number)) for number in range(4)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        ways = [{"response_format": wanted}, {"guided_json": SQUIRE}, {"structured_outputs": {"json": SQUIRE}}]
        ways += [{"guided_json": json.dumps(SQUIRE)}, {"response_format": wanted, "stream": True}]
        found = [pool.submit(real.ask, CHAT, **asked, **way) for way in ways]
        others = list(pool.map(lambda number: answer(real, question(number)), range(4)))
        found = [future.result() for future in found]
    assert others == free
    for way, response in zip(ways, found, strict=True):
        assert response.status_code == 200, response.text
        choices = join_choices(read_events(response.text) if "stream" in way else [response.json()])
        assert len(choices) == 2
        for choice in choices:
            assert choice["finish"] == "stop" and json.loads(choice["text"])["rides"] in ("ass", "horse"), choice
    for how, pattern in (({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"), ({"guided_choice": ["ja", "nein"]}, "ja|nein")):
        (choice,), _ = answer(real, dict(prompt="x", max_tokens=20, **how))
        assert re.fullmatch(pattern, choice["text"]) and choice["finish_reason"] == "stop"
    body = real.ask(CHAT, messages=HELLO, max_tokens=9, response_format={"type": "json_object"}).json()
    assert body["choices"][0]["message"]["content"].startswith("{")
    assert real.sample("compilations_total") == 0


def test_the_context_ends_a_completion(real):
    (choice,), tokens = answer(real, dict(prompt="a" * (BLOCK - 4), max_tokens=64, temperature=0))
    assert choice["finish_reason"] == "length" and tokens == 5


def test_usage_tells_what_was_not_computed_again(real):
    """Also of a completion that ends with its first burst."""
    body = dict(prompt="b" * BLOCK, max_tokens=1)
    real.ask(**body)
    details = real.ask(**body).json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0
