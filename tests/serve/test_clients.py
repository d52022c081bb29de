"""Programs of others against a real server: what they send is answered, and what they read is what the run says.

They have environments of their own, which are made once and kept in the user's cache, and are driven by `client_program.py`.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from tests.helpers import check_command
from tests.serve.conftest import CHAT, TEXTS
from tests.serve.live import MODEL, serve, tiny_run

pytestmark = pytest.mark.slow  # a server, and clients that take seconds to import

CONTEXT = 2048  # bytes, for the schemas that clients write into their prompts
PROMPT = "that keep a "
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxgpt-tests"
LIFE = 14 * 86400.0  # seconds that an environment is kept, then its packages are looked for anew
INSTALLATION = 400.0  # seconds for the packages of one environment, then SIGKILL
# The bound spares pip an endless search for versions.
NEWEST = ("openai", "langchain-openai>=1.7", "litellm")
OLDER = ("openai<3", "pydantic")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    run = tiny_run(tmp_path_factory.mktemp("serve"), block_size=CONTEXT)
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


@pytest.mark.parametrize("client", ["openai", "older", "litellm", "langchain"])
def test_each_client_gets_what_it_asks_for(server, given, tmp_path, client):
    program = Path(__file__).with_name("client_program.py")
    environ = {"OPENAI_API_KEY": "any", "NO_PROXY": "*", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    argv = [str(program), client.replace("older", "openai"), f"{server.url}/v1", given]
    check_command(*argv, cwd=tmp_path, python=environment(OLDER if client == "older" else NEWEST), **environ)
