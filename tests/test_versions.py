"""tests/versions.sh: what it does after a failure, and its table; with interpreters that only pretend."""

import os
import subprocess

import pytest

from tests.conftest import REPOSITORY

# Makes an environment, except where pip is asked for jax 0.0. Of its 16 tests 2 fail, 1 is an error and 3 are skipped.
INTERPRETER = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip "*"jax==0.0 "*) exit 1 ;;
  "-m pytest "*)
    echo '<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="16" time="1.0"><testcase' > "$4"
    exit {status} ;;
  -c*platform*) echo "Python {version}.1, jax 1.2" ;;
esac
"""


def run_script(place, *arguments, **status):
    for version, code in status.items():
        path = place / f"python{version.replace('_', '.').removeprefix('python')}"
        path.write_text(INTERPRETER.replace("{status}", str(code)).replace("{version}", path.name[6:]))
        path.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "PYTHONS": str(place), "PYENV_ROOT": str(place), "TMPDIR": str(place)}
    env["ENVIRONMENTS"] = ""  # those of the script that may run this test
    script = ["bash", str(REPOSITORY / "tests" / "versions.sh"), *arguments]
    return subprocess.run(script, env=os.environ | env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("first", "status"), [(1, 1), (0, 0)])
def test_every_version_has_its_line_after_a_failure(tmp_path, first, status):
    done = run_script(tmp_path, python3_12=first, python3_13=0)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("Python")]
    assert [line[:-2] for line in lines] == [
        ["Python", f"{version}.1,", "jax", "1.2", "10", "3", "3"] for version in ("3.12", "3.12", "3.13")
    ]
    assert done.returncode == status
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python3.12", "python3.13"]  # nothing is left


def test_one_version_and_what_cannot_be_had(tmp_path):
    done = run_script(tmp_path, "3.12", "0.0", python3_12=0)
    assert done.returncode == 1 and "Python 3.12, jax 0.0: does not install" in done.stdout
    done = run_script(tmp_path, "9.9", "newest")
    assert done.returncode == 1 and "Python 9.9, jax newest: no python9.9 here" in done.stdout
