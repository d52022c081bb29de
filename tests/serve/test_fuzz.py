"""Requests of unknown origin: each gets an answer below 500, and the server goes on."""

import json
import random

import pytest

from tests.serve.test_parameters import HELLO, JSON

VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-30, 1e30, 1e308, 2**31, 2**32 - 1, 2**63, -(2**64), 10**300),
    *("", "a", "né", "\ud800", "\x00", "<|endoftext|>", "a" * 5000, "\ufdd2", "\u202e"),
    *([], [[]], [None], [0], [255], [256], [10**30], ["a", "b"], [[1], [2]], [[1], "a"], ["", ""], [True], [1.0]),
    *({}, {"a": 1}, {"include_usage": True}, {"include_usage": 1}, {"type": "text"}, {"content": "x"}, HELLO),
    [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [{"role": "system", "content": ""}, {"role": "assistant", "content": "a"}],
]
NAMES = {
    "/v1/completions": "model prompt echo logprobs max_tokens stop_token_ids suffix best_of logit_bias",
    "/v1/chat/completions": "model messages logprobs top_logprobs max_tokens max_completion_tokens tools response_format",
    "/tokenize": "prompt messages add_special_tokens as_prompt return_token_strs",
    "/detokenize": "tokens",
}
COMMON = "n seed stop stream stream_options temperature top_k top_p min_p repetition_penalty user frequency_penalty"
GOOD = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
}


def request(rng):
    path = rng.choice(list(NAMES))
    names = f"{NAMES[path]} {COMMON if path in GOOD else ''}".split()
    body = dict(GOOD.get(path, {}))
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        body[rng.choice(names)] = rng.choice(VALUES)
    raw = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.2:
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return path, bytes(raw)


@pytest.mark.parametrize("seed", range(4))
def test_malformed_requests_get_an_answer(real, seed):
    rng, found = random.Random(seed), []
    for _ in range(150):
        path, raw = request(rng)
        response = real.post(path, content=raw, headers=JSON)
        assert response.status_code in (200, 400, 404), (path, raw, response.text)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"] and len(error["message"]) < 1000 and "Traceback" not in error["message"]
        elif response.headers["content-type"] == "application/json":
            json.loads(response.content, parse_constant=lambda name: pytest.fail(name))
        found.append(response.status_code)
    assert found.count(400) > 60 and found.count(200) > 10
    assert real.get("/health").status_code == 200
