"""Many command lines for the price of one start: a process that has imported everything forks for each of them.

`python -m tests.zygote` reads a request a line, {"argv", "cwd", "env", "deadline"}, and answers {"returncode",
"stdout", "stderr"}. A fork starts where a fresh `python -m jaxgpt` is once its imports are done: no device has
been started. What is read at import (JAX_PLATFORMS, PYTHONIOENCODING) needs a fresh process.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.conftest import REPOSITORY

DEADLINE = 60  # seconds, then SIGALRM: a command that hangs is a failure
# Of what an experiment file imports from its folder: bad input writes nothing.
NO_CACHE = {"PYTHONDONTWRITEBYTECODE": "1"}


class Zygote:
    """The parent, from the side of the tests."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200", "JAX_PLATFORMS": "cpu"} | NO_CACHE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, argv: list[str], cwd: Path, deadline: int = DEADLINE, **env: str):
        """The command line `jaxgpt ARGV...`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"argv": argv, "cwd": str(cwd), "env": env, "deadline": deadline}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return subprocess.CompletedProcess(argv, **json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _child(request: dict) -> int:
    """In the fork: what the interpreter does around `jaxgpt.__main__`, up to the exit status."""
    from jaxgpt.__main__ import main

    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv, sys.path[0] = ["jaxgpt", *request["argv"]], request["cwd"]
    try:
        main()
        return 0
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def _serve(request: dict) -> dict:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
        child = os.fork()
        if not child:
            status = 70
            signal.alarm(request["deadline"])
            try:
                for number, file in enumerate((nothing, out, err)):
                    os.dup2(file.fileno(), number)
                status = _child(request)
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode("utf-8", "backslashreplace"))
    return {"returncode": os.waitstatus_to_exitcode(status), "stdout": said[0], "stderr": said[1]}


def main() -> None:
    for name in ("__main__", "training", "run", "tools.plan.plan", "data", "cli.train", "cli.commands"):
        importlib.import_module(f"jaxgpt.{name}")
    gc.disable()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
