"""Programs of others against a real server: what they send is answered, and what they read is what the run says."""

import functools
import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest

from jaxgpt.hf.source import tokenizer_config, tokenizer_json
from jaxgpt.run import load
from tests.helpers import run_command
from tests.serve.live import MODEL, serve, tiny_run
from tests.tools.evaluate.test_lm_eval_model import LINES, TASK, TASKS

pytestmark = pytest.mark.slow  # a server, and clients that take seconds to import

CONTEXT = 1024
SAME = 1e-4  # nats: float32 sums of other batches
DRAWN = {"max_tokens": 20, "temperature": 0.8, "seed": 3}
PROMPT = "that keep a "


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("serve"), block_size=CONTEXT, steps=60)
    with serve(run, "--slots", "4") as server:
        yield server


HEAD = f"MODEL = {MODEL!r}; import json, sys; URL, GIVEN = sys.argv[1], json.loads(sys.argv[2])\n"


@functools.cache
def interpreter(package: str) -> str:
    """Return a Python that has the package: this one, or one with litellm and llm, which need another openai."""
    if importlib.util.find_spec(package):
        return sys.executable
    other = os.environ.get("JAXGPT_TEST_CLIENTS")
    code = f"import importlib.util; raise SystemExit(importlib.util.find_spec({package!r}) is None)"
    if not other or subprocess.run([other, "-c", code], timeout=60).returncode:
        pytest.skip(f"{package} is not installed here, nor for JAXGPT_TEST_CLIENTS={other}, a Python that may have it")
    return other


def run_client(package: str, code: str, server, *, env=None, **given) -> dict:
    """Run code that has URL and what is given as GIVEN; return the JSON object of its last line."""
    done = subprocess.run(
        [interpreter(package), "-c", HEAD + code, server.url, json.dumps(given)],
        env=os.environ | {"OPENAI_API_KEY": "any", "NO_PROXY": "*"} | (env or {}),
        cwd=server.run.parent,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def drawn(server):
    """The text that `Run.sample` draws with the same seed, and the run."""
    run = load(server.run)
    return run.sample(PROMPT, max_new_tokens=DRAWN["max_tokens"], temperature=DRAWN["temperature"], seed=DRAWN["seed"])


OPENAI = """
import openai
client = openai.OpenAI(base_url=URL + "/v1", max_retries=0, timeout=60)
found = {}
"""


def test_openai_reads_a_completion_and_its_stream(server, drawn):
    found = run_client("openai", OPENAI + """
(model,) = client.models.list().data
found["model"] = client.models.retrieve(model.id).id == model.id
given = GIVEN | {"model": model.id}
whole = client.completions.create(**given)
found["text"], found["usage"] = whole.choices[0].text, whole.usage.model_dump()
found["finish"] = whole.choices[0].finish_reason
chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
found["streamed"] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
found["ends"] = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
found["counted"] = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
many = client.completions.create(**given | dict(prompt=[GIVEN["prompt"], "of"], n=2))
found["many"] = [choice.text for choice in sorted(many.choices, key=lambda choice: choice.index)]
print(json.dumps(found))
""", server, prompt=PROMPT, **DRAWN)  # fmt: skip
    assert found["model"] and found["text"] == found["streamed"] == found["many"][0] == drawn
    assert found["finish"] == "length" and found["ends"] == ["length"]
    assert found["usage"]["completion_tokens"] == DRAWN["max_tokens"] and found["counted"] == [DRAWN["max_tokens"]]
    assert found["usage"]["prompt_tokens"] == len(PROMPT)
    assert len(found["many"]) == 4 and found["many"][0] != found["many"][1]


def test_openai_reads_chat_and_log_probabilities(server):
    found = run_client("openai", OPENAI + """
messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "of"}]
given = dict(model=MODEL, messages=messages, max_completion_tokens=12, seed=1, temperature=1.0)
whole = client.chat.completions.create(**given, logprobs=True, top_logprobs=3)
message = whole.choices[0].message
found["role"], found["text"] = message.role, message.content
found["tokens"] = [token.bytes for token in whole.choices[0].logprobs.content]
found["logprobs"] = [token.logprob for token in whole.choices[0].logprobs.content]
found["top"] = [[top.logprob for top in token.top_logprobs] for token in whole.choices[0].logprobs.content]
chunks = list(client.chat.completions.create(**given, stream=True))
found["streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
found["first"] = chunks[0].choices[0].delta.role
legacy = client.completions.create(model=MODEL, prompt="that keep", max_tokens=2, logprobs=2, echo=True, seed=1).choices[0]
found["legacy"] = {"text": legacy.text, **legacy.logprobs.model_dump()}
print(json.dumps(found))
""", server)  # fmt: skip
    assert found["role"] == found["first"] == "assistant" and found["text"] == found["streamed"]
    if all(found["tokens"]):  # None: a part of a character
        assert bytes(itertools.chain(*found["tokens"])).decode() == found["text"]
    for logprob, top in zip(found["logprobs"], found["top"], strict=True):
        assert len(top) == 3 and top == sorted(top, reverse=True)
        assert logprob <= top[0] <= 0 and (logprob in top or logprob < top[-1])
    legacy = found["legacy"]
    assert legacy["token_logprobs"][0] is None and legacy["text"].startswith("that keep")
    (score,) = load(server.run).score(["that keep"])
    assert legacy["token_logprobs"][1:9] == pytest.approx(score.logprobs[1:], abs=SAME)
    lengths = {len(legacy[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {11} and legacy["text_offset"][:9] == list(range(9))


def test_openai_reads_errors(server):
    found = run_client("openai", OPENAI + """
def fails(**given):
    try:
        client.completions.create(**dict(model=MODEL, prompt="x", max_tokens=2) | given)
    except openai.BadRequestError as e:
        return {"message": e.body["message"], "param": e.param, "type": e.type}
found["value"] = fails(temperature=-1)
found["unknown"] = fails(extra_body={"tempereture": 1})
found["long"] = fails(prompt="x" * (GIVEN["context"] + 1))
print(json.dumps(found))
""", server, context=CONTEXT)  # fmt: skip
    assert found["value"]["param"] == "temperature" and found["unknown"]["param"] == "tempereture"
    assert found["value"]["type"] == "invalid_request_error"
    assert f"{CONTEXT + 1:,} tokens" in found["long"]["message"] and f"{CONTEXT:,}" in found["long"]["message"]


def test_openai_retries_when_the_queue_is_full(server):
    """16 clients at once for one slot and four places in the queue: all are served in the end."""
    with serve(server.run, "--slots", "1") as small:
        found = run_client("openai", OPENAI + """
import concurrent.futures, collections
seen = collections.Counter()
http = openai.DefaultHttpxClient(event_hooks={"response": [lambda response: seen.update([response.status_code])]})
client = openai.OpenAI(base_url=URL + "/v1", max_retries=30, timeout=60, http_client=http)
def complete(seed):
    return client.completions.create(model=MODEL, prompt="of", max_tokens=100, seed=seed).usage.completion_tokens
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    found["tokens"] = list(pool.map(complete, range(16)))
found["seen"] = {str(status): count for status, count in seen.items()}
print(json.dumps(found))
""", small)  # fmt: skip
    assert found["tokens"] == [100] * 16
    assert found["seen"].keys() == {"200", "429"} and found["seen"]["200"] == 16


# The tokenizer is a file beside the client, or the server's own.
HARNESS = """
import json, sys, lm_eval, lm_eval.models
from lm_eval.tasks import TaskManager
import jaxgpt.tools.evaluate.lm_eval_model
given = json.loads(sys.argv[1])
manager = TaskManager(include_path=given["directory"], include_defaults=False)
found = []
for model, args in given["models"]:
    evaluated = lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=given["tasks"], task_manager=manager, batch_size=3, bootstrap_iters=10
    )
    resps = {task: [sample["resps"] for sample in samples] for task, samples in evaluated["samples"].items()}
    found.append({"results": evaluated["results"], "resps": resps})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def evaluated(server, tmp_path_factory):
    """What lm-eval finds through the adapter, and through the server with a tokenizer here and with that of the server."""
    for package in ("lm_eval", "tenacity", "aiohttp", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install "lm-eval[api]" transformers')
    directory, run = tmp_path_factory.mktemp("harness"), load(server.run)
    (directory / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for name, rest in TASKS.items():
        (directory / f"{name}.yaml").write_text(f"task: {name}\n{TASK.replace('DIRECTORY', str(directory))}{rest}")
    (directory / "tokenizer.json").write_text(tokenizer_json(run.tokenizer) or "")
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(run.tokenizer, CONTEXT)))
    remote = f"model={MODEL},base_url={server.url}/v1/completions,max_length={CONTEXT}"
    models = [
        ("jaxgpt", f"run={server.run}"),
        (
            "local-completions",
            f"{remote},tokenizer={directory},tokenizer_backend=huggingface,custom_prefix_token_id=10",
        ),
        ("local-completions", remote),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "NO_PROXY": "*"}
    given = {"directory": str(directory), "models": models, "tasks": list(TASKS)}
    done = run_command("-c", HARNESS, json.dumps(given), cwd=directory, **offline)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("which", [1, 2], ids=["a tokenizer here", "the server's tokenizer"])
def test_lm_eval_has_the_figures_of_the_adapter(evaluated, which):
    ours, theirs = evaluated[0], evaluated[which]
    for task in ("choice", "word"):
        pairs = [
            zip(our, their, strict=True) for our, their in zip(ours["resps"][task], theirs["resps"][task], strict=True)
        ]
        for (our,), (their,) in itertools.chain(*pairs):
            assert float(their[0]) == pytest.approx(float(our[0]), abs=SAME)
            assert their[1] == our[1]  # is it greedy?
    exact = ("choice", "word", "whole", "written") if which == 1 else ("choice", "word")
    for task in exact:
        results = {name: value for name, value in ours["results"][task].items() if isinstance(value, float)}
        assert results and {name: theirs["results"][task][name] for name in results} == pytest.approx(results, rel=SAME)
    if which == 1:  # the server's end of text, a newline here, is one more stop string
        assert theirs["resps"]["written"] == ours["resps"]["written"]


def test_litellm_completes_and_streams(server, drawn):
    found = run_client("litellm", """
import litellm
given = dict(model="text-completion-openai/tiny", api_base=URL + "/v1", **GIVEN)
text = litellm.text_completion(**given).choices[0].text
streamed = "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**given, stream=True))
chat = dict(model="openai/tiny", messages=[{"role": "user", "content": "of"}], api_base=URL + "/v1", max_tokens=9, seed=1)
whole = litellm.completion(**chat)
pieces = litellm.completion(**chat, stream=True)
parts = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
print(json.dumps(dict(text=text, streamed=streamed, chat=whole.choices[0].message.content, parts=parts)))
""", server, prompt=PROMPT, **DRAWN, env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"})  # fmt: skip
    assert found["text"] == found["streamed"] == drawn and found["chat"] == found["parts"]


def test_llm_prompts_both_endpoints(server, tmp_path):
    base = f"api_base: {server.url}/v1"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- {{model_id: own, model_name: {MODEL}, {base}, completion: true}}\n"
        f"- {{model_id: own-chat, model_name: {MODEL}, {base}}}\n"
    )
    found = run_client("llm", """
import subprocess
def llm(*argv):
    done = subprocess.run([sys.executable, "-m", "llm", *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
options = ["-o", "max_tokens", "9", "-o", "seed", "1", "--no-log", "of", "-m"]
print(json.dumps({kind + model: llm(*flag, *options, model) for model in ("own", "own-chat")
                  for kind, flag in (("", ["--no-stream"]), ("streamed ", []))}))
""", server, env={"LLM_USER_PATH": str(tmp_path)})  # fmt: skip
    assert found["own"] == found["streamed own"] and found["own-chat"] == found["streamed own-chat"]
    assert all(text.strip() for text in found.values())
