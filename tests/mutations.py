"""Break one line of the package at a time, and see that a test fails. Run by hand:

    python -m tests.mutations [--only NAME ...]

Each line is broken in a copy of the repository, where the test named beside it runs. First the tests run unbroken: one
that fails anyway notices nothing. The exit status is 1 if a mutation survives.
"""

import argparse
import ast
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conftest import REPOSITORY

DEADLINE = 900.0  # seconds of a pytest, which ends in SIGKILL
PASSED, FAILED = 0, 1  # pytest's exit status; any other: it did not run the tests


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake, and the test that notices it."""

    name: str
    file: str  # below jaxgpt/
    old: str  # occurs once in the file
    new: str
    test: str  # pytest's node id, below tests/


def read_mutations() -> tuple[Mutation, ...]:
    """Return the mutations of mutations.txt: a name and a file, lines to replace (-), their replacement (+), a test."""
    found = []
    for block in (Path(__file__).with_suffix(".txt")).read_text(encoding="utf-8").split("\n\n"):
        if block.startswith("#"):
            continue
        head, *changes, test = block.strip("\n").split("\n")
        name, file = head.split(": ")
        old, new = ("\n".join(line[2:] for line in changes if line[0] == mark) for mark in "-+")
        found.append(Mutation(name, file, old, new, test))
    return tuple(found)


MUTATIONS = read_mutations()


def stale(mutations: Iterable[Mutation]) -> Iterator[str]:
    """Yield what no longer fits the tree: a line that is not there once, a test that does not exist."""
    for m in mutations:
        if (count := (REPOSITORY / "jaxgpt" / m.file).read_text().count(m.old)) != 1:
            yield f"{m.name}: jaxgpt/{m.file} has {m.old!r} {count} times, needs it once"
        path, name = m.test.split("[")[0].split("::")
        if name not in _functions(REPOSITORY / "tests" / path):
            yield f"{m.name}: there is no tests/{m.test}"


@functools.cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def run(tests: Iterable[str], broken: Mutation | None = None) -> tuple[int, float, str]:
    """Run tests in a copy of the repository -> (pytest's exit status, seconds, its output)."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "repository"
        unwanted = {".git", "__pycache__", str(REPOSITORY / "runs")}  # the package has a folder of that name, too
        shutil.copytree(REPOSITORY, copy, ignore=lambda at, names: [n for n in names if {n, f"{at}/{n}"} & unwanted])
        if broken is not None:
            path = copy / "jaxgpt" / broken.file
            path.write_text(path.read_text().replace(broken.old, broken.new))
        began = time.monotonic()
        pytest = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider"]
            + [f"tests/{test}" for test in tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that what the tests start ends with them
        )
        try:
            output, _ = pytest.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(pytest.pid, signal.SIGKILL)
            output, _ = pytest.communicate()
        return pytest.returncode, time.monotonic() - began, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[m.name for m in MUTATIONS])
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if arguments.only is None or m.name in arguments.only]
    if problems := list(stale(chosen)):
        print("\n".join(problems))
        return 1
    status, seconds, output = run(sorted({m.test for m in chosen}))
    print(f"unbroken: {'all pass' if status == PASSED else output} ({seconds:.0f} s)", flush=True)
    if status != PASSED:
        return 1
    survived = []
    for m in chosen:
        status, seconds, output = run([m.test], m)
        said = {PASSED: "SURVIVED", FAILED: "killed"}.get(status, f"pytest ended with status {status}:\n{output}\n")
        print(f"{m.name}: {said} ({seconds:.0f} s)", flush=True)
        survived += [m.name] * (status != FAILED)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} were killed" + "".join(f"\nnot {name}" for name in survived))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
