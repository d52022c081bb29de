"""Programs of others against a real server: what they send is answered, and what they read is what the run says.

openai and lm-evaluation-harness run in the environment of the tests. The other clients have environments of their own,
which are made once and kept in the user's cache, and are driven by the files in `programs`.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from jaxgpt.hf.source import tokenizer_config, tokenizer_json
from jaxgpt.run import load
from tests.helpers import check_command, run_command
from tests.serve.live import MODEL, serve, tiny_run
from tests.tools.evaluate.test_lm_eval_model import LINES, TASK, TASKS

pytestmark = pytest.mark.slow  # a server, and clients that take seconds to import

CONTEXT = 2048  # bytes, for the schemas that clients write into their prompts
SAME = 1e-4  # nats: float32 sums of other batches
PROMPT = "that keep a "

PROGRAMS = Path(__file__).parent / "programs"
PASSED = 32  # of langchain-tests 1.1.9; the rest is for pictures and sounds
FOLLOWS = "(test_tool_calling and not no_arguments) or test_agent_loop or test_unicode"  # of these tests: what needs a trained model
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt-tests"
LIFE = 14 * 86400.0  # seconds that an environment is kept, then its packages are looked for anew
INSTALLATION = 400.0  # seconds for the packages of one environment, then SIGKILL
# llama-index needs openai 2, the newest llm needs openai 3. The bounds spare pip an endless search for versions.
NEWEST = ("llm>=0.36", "langchain-openai>=1.7", "langchain-tests", "litellm", "instructor")
OLDER = ("openai<3", "llama-index-llms-openai-like")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("serve"), block_size=CONTEXT, batch_size=1, eval_tokens=CONTEXT)
    with serve(run, "--slots", "4") as server:
        yield server


WRITTEN = {"temperature": 0, "max_tokens": 9, "stop": ["l"]}  # what the task says
HARNESS = """
import json, sys, lm_eval, lm_eval.models
from lm_eval.tasks import TaskManager
import jaxgpt.tools.evaluate.lm_eval_model
given = json.loads(sys.argv[1])
manager = TaskManager(include_path=given["directory"], include_defaults=False)
found = []
common = dict(task_manager=manager, bootstrap_iters=10)
for model, args in given["models"]:
    chat = dict(tasks=["written"], apply_chat_template=True) if "chat" in model else dict(tasks=given["tasks"], batch_size=3)
    evaluated = lm_eval.simple_evaluate(model=model, model_args=args, **chat, **common)
    resps = {task: [sample["resps"] for sample in samples] for task, samples in evaluated["samples"].items()}
    found.append({"results": evaluated["results"], "resps": resps})
print(json.dumps(found))
"""


def test_lm_eval_has_the_figures_of_the_adapter(server, tmp_path):
    """With the run's tokenizer in a file beside the client."""
    for package in ("lm_eval", "tenacity", "aiohttp", "transformers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install "lm-eval[api]" transformers')
    run = load(server.run)
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for name, rest in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{TASK.replace('DIRECTORY', str(tmp_path))}{rest}")
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(run.tokenizer) or "")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(run.tokenizer, CONTEXT)))
    remote = f"model={MODEL},base_url={server.url}/v1/completions,max_length={CONTEXT}"
    local = f"{remote},tokenizer={tmp_path},tokenizer_backend=huggingface,custom_prefix_token_id=10"
    models = [("jaxgpt", f"run={server.run}"), ("local-completions", local)]
    models += [("local-chat-completions", f"model={MODEL},base_url={server.url}/v1/chat/completions")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    given = {"directory": str(tmp_path), "models": models, "tasks": list(TASKS)}
    done = check_command("-c", HARNESS, json.dumps(given), cwd=tmp_path, **offline)
    ours, theirs, chat = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(itertools.chain(*ours["resps"]["choice"]), itertools.chain(*theirs["resps"]["choice"]), strict=True)
    for (our,), (their,) in pairs:
        assert float(their[0]) == pytest.approx(float(our[0]), abs=SAME)
        assert their[1] == our[1]  # is it greedy?
    for task in TASKS:
        results = {name: value for name, value in ours["results"][task].items() if isinstance(value, float)}
        assert results and {name: theirs["results"][task][name] for name in results} == pytest.approx(results, rel=SAME)
    assert theirs["resps"]["written"] == ours["resps"]["written"]
    asked = [{"messages": [{"role": "user", "content": line["ctx"]}], **WRITTEN} for line in LINES]
    answers = [json.loads(server.send("/v1/chat/completions", json.dumps(body).encode())[2]) for body in asked]
    assert chat["resps"]["written"] == [[[answer["choices"][0]["message"]["content"]]] for answer in answers]


def environment(packages) -> str:
    """Return the interpreter of a virtual environment with the packages; skip where they do not install."""
    name = hashlib.sha256(f"{sys.version} {packages}".encode()).hexdigest()[:12]
    KEPT.mkdir(parents=True, exist_ok=True)
    directory, python = KEPT / name, KEPT / name / "bin" / "python"
    with filelock.FileLock(KEPT / f"{name}.lock"):
        whole = directory / "whole"
        if not whole.exists() or time.time() - whole.stat().st_mtime > LIFE:
            shutil.rmtree(directory, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", directory], check=True, timeout=INSTALLATION)
            pip = [python, "-m", "pip", "install", "-q", "--retries", "1", "--no-compile", "--only-binary", ":all:"]
            done = subprocess.run([*pip, *packages], capture_output=True, text=True, timeout=INSTALLATION)
            if done.returncode:
                pytest.skip(f"{', '.join(packages)}: {done.stderr.strip().splitlines()[-1]}")
            whole.touch()
    return str(python)


def options(directory: Path) -> dict[str, str]:
    """Return what keeps clients from the network and from the files of the user."""
    found = {"OPENAI_API_KEY": "any", "NO_PROXY": "*", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    return found | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_USER_PATH": str(directory)}


@pytest.fixture(scope="module")
def given(server) -> str:
    """What `programs/given.py` reads: the answers are the server's to bare requests, and reach their length."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "of"}]
    for seed in range(9):
        settings = {"max_tokens": 12, "temperature": 0.8, "seed": seed}
        bodies = {"/v1/completions": {"prompt": PROMPT}, "/v1/chat/completions": {"messages": messages}}
        sent = [server.send(path, json.dumps(body | settings).encode()) for path, body in bodies.items()]
        text, answer = (json.loads(raw)["choices"][0] for _, _, raw in sent)
        if text["finish_reason"] == answer["finish_reason"] == "length":
            return json.dumps([MODEL, PROMPT, text["text"], messages, answer["message"]["content"], settings, CONTEXT])
    raise AssertionError("every answer ended by itself")


@pytest.mark.parametrize(
    ("program", "packages"),
    [
        ("with_openai", NEWEST),
        ("with_openai", OLDER),
        ("with_litellm", NEWEST),
        ("with_langchain", NEWEST),
        ("with_instructor", NEWEST),
        ("with_llm", NEWEST),
        ("with_llama_index", OLDER),
    ],
    ids=lambda value: {NEWEST: "newest", OLDER: "older"}.get(value, value),
)
def test_each_client_gets_what_it_asks_for(server, given, tmp_path, program, packages):
    argv = [str(PROGRAMS / "run.py"), program, f"{server.url}/v1", given]
    done = check_command(*argv, cwd=tmp_path, python=environment(packages), **options(tmp_path))
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {name: raised for name, raised in found.items() if raised}
    assert found and not failed, "\n".join(f"{name}: {raised}" for name, raised in failed.items())


def test_langchain_passes_its_own_tests_of_a_chat_model(server, tmp_path):
    where = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "any"}
    argv = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "--benchmark-disable"]
    argv += ["-k", f"not ({FOLLOWS})"]
    argv += ["-o", "asyncio_default_test_loop_scope=session"]  # it keeps its connections from one test to the next
    argv += [shutil.copy(PROGRAMS / "langchain_suite.py", tmp_path)]  # away from the configuration of these tests
    env = options(tmp_path) | {"GIVEN": json.dumps(where), "PYTEST_ADDOPTS": ""}
    done = run_command(*argv, cwd=tmp_path, python=environment(NEWEST), **env)
    assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= PASSED
