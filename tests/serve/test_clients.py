"""Programs of others against a real server: what they send is answered, and what they read is what the run says.

lm-evaluation-harness runs in the environment of the tests. The other clients have environments of their own, which are
made once and kept in the user's cache, and are driven by `client_program.py`.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from jaxgpt.hf.source import tokenizer_config, tokenizer_json
from jaxgpt.run import load
from tests.helpers import check_command
from tests.serve.conftest import CHAT, TEXTS
from tests.serve.live import MODEL, serve, tiny_run
from tests.tools.evaluate.test_lm_eval_model import LINES, TASK, TASKS

pytestmark = pytest.mark.slow  # a server, and clients that take seconds to import

CONTEXT = 2048  # bytes, for the schemas that clients write into their prompts
SAME = 1e-4  # nats: float32 sums of other batches
PROMPT = "that keep a "
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt-tests"
LIFE = 14 * 86400.0  # seconds that an environment is kept, then its packages are looked for anew
INSTALLATION = 400.0  # seconds for the packages of one environment, then SIGKILL
# llama-index needs openai 2, the newest llm needs openai 3. The bounds spare pip an endless search for versions.
NEWEST = ("llm>=0.36", "langchain-openai>=1.7", "litellm", "instructor")
OLDER = ("openai<3", "llama-index-llms-openai-like")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("serve"), block_size=CONTEXT, batch_size=1, eval_tokens=CONTEXT)
    with serve(run, "--slots", "4") as server:
        yield server


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


@pytest.fixture(scope="module")
def given(server) -> str:
    """What `client_program.py` is given: the answers are the server's to bare requests, and reach their length."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "of"}]
    for seed in range(9):
        settings = {"max_tokens": 12, "temperature": 0.8, "seed": seed}
        text, answer = (
            json.loads(server.send(path, json.dumps(body | settings).encode())[2])["choices"][0]
            for path, body in ((TEXTS, {"prompt": PROMPT}), (CHAT, {"messages": messages}))
        )
        if text["finish_reason"] == answer["finish_reason"] == "length":
            return json.dumps([MODEL, PROMPT, text["text"], messages, answer["message"]["content"], settings, CONTEXT])
    raise AssertionError("every answer ended by itself")


@pytest.mark.parametrize(
    ("client", "packages"),
    [
        *(("openai", NEWEST), ("openai", OLDER), ("litellm", NEWEST), ("langchain", NEWEST)),
        *(("instructor", NEWEST), ("llm", NEWEST), ("llama_index", OLDER)),
    ],
    ids=lambda value: {NEWEST: "newest", OLDER: "older"}.get(value, value),
)
def test_each_client_gets_what_it_asks_for(server, given, tmp_path, client, packages):
    program = Path(__file__).with_name("client_program.py")
    environ = {"OPENAI_API_KEY": "any", "NO_PROXY": "*", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LLM_USER_PATH": str(tmp_path)}
    argv = [str(program), client, f"{server.url}/v1", given]
    check_command(*argv, cwd=tmp_path, python=environment(packages), **environ)


HARNESS = """
import json, sys, lm_eval, lm_eval.models
from lm_eval.tasks import TaskManager
import jaxgpt.tools.evaluate.lm_eval_model
directory, models, tasks = json.loads(sys.argv[1])
manager = TaskManager(include_path=directory, include_defaults=False)
found = []
for model, args in models:
    how = dict(task_manager=manager, bootstrap_iters=10, tasks=tasks, batch_size=3)
    evaluated = lm_eval.simple_evaluate(model=model, model_args=args, **how)
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
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}
    given = json.dumps([str(tmp_path), models, list(TASKS)])
    done = check_command("-c", HARNESS, given, cwd=tmp_path, **offline)
    ours, theirs = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(itertools.chain(*ours["resps"]["choice"]), itertools.chain(*theirs["resps"]["choice"]), strict=True)
    for (our,), (their,) in pairs:
        assert float(their[0]) == pytest.approx(float(our[0]), abs=SAME)
        assert their[1] == our[1]  # is it greedy?
    for task in TASKS:
        results = {name: value for name, value in ours["results"][task].items() if isinstance(value, float)}
        assert results and {name: theirs["results"][task][name] for name in results} == pytest.approx(results, rel=SAME)
    assert theirs["resps"]["written"] == ours["resps"]["written"]
