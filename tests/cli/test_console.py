"""What the command line says, and where: on streams that are closed, full or ASCII only, and to a shell."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import warnings

import pytest

from jaxgpt.cli import console
from jaxgpt.errors import Preempted, UserError, shell_line
from jaxgpt.files import Result
from tests.conftest import REPOSITORY

# A command that speaks, opens a file and has a result, as all do. Without jax: it starts in a tenth of a second.
PROGRAM = """
import os
from jaxgpt.cli.console import print_result, say, report_errors
from jaxgpt.files import Result
with report_errors():
    say("on the way")
    with open(os.devnull) as f:
        assert f.fileno() > 2, "a file has taken the place of a stream"
    print_result(Result({"text": "año"}, ""), as_json=True)
    print("año")
"""
RESULT = '{"text": "año"}\naño\n'
ON_THE_WAY = "on the way\n"
FULL = "jaxgpt: stdout: No space left on device\n"


def in_a_shell(redirected: str, program: str = PROGRAM, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "utf-8", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


@pytest.mark.parametrize(
    ("redirected", "status", "out", "err"),
    [
        ("", 0, RESULT, ON_THE_WAY),
        ("2>&-", 0, RESULT, ""),
        (">&-", 0, "", ON_THE_WAY),
        (">/dev/full", 2, "", ON_THE_WAY + FULL),
        ("| true", 0, "", ""),  # the shell's status is that of `true`
    ],
)
def test_streams_that_cannot_be_written(redirected, status, out, err):
    if "/dev/full" in redirected and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = in_a_shell(redirected)
    if "|" in redirected:
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    else:
        assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_a_stdout_of_ascii_alone():
    """Characters that it has not are escapes, in JSON those of JSON."""
    done = in_a_shell("", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert json.loads(first) == {"text": "año"} and second == r"a\xf1o"


def test_what_is_changed_for_a_command_is_put_back():
    """`run_experiment` is called by programs that go on."""
    usual = (sys.unraisablehook, warnings.showwarning, sys.stderr, sys.stdout.errors)
    with console.report_errors():
        assert sys.unraisablehook is not usual[0] and sys.stderr is not usual[2]
    assert (sys.unraisablehook, warnings.showwarning, sys.stderr, sys.stdout.errors) == usual


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("a\nb"), 2, "jaxgpt: a\\nb\n"),
        (PermissionError(13, "Permission denied", "runs"), 2, "jaxgpt: runs: Permission denied\n"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
        (Preempted("saved step 1. Resume."), 1, "saved step 1. Resume.\n"),
        # A mistake of ours keeps its traceback.
        (OSError(9, "Bad file descriptor"), None, ""),
        (BrokenPipeError(32, "Broken pipe"), None, ""),
    ],
)
def test_what_is_not_a_mistake_of_ours_ends_in_words(error, status, said, capsys):
    with pytest.raises(SystemExit if status else type(error)) as left, console.report_errors():
        raise error
    assert capsys.readouterr().err == said and (status is None or left.value.code == status)


@dataclasses.dataclass
class Found:
    text: str
    accepted: bool

    def __str__(self):
        return f"found {self.text}"


def test_a_result_is_printed_as_a_text_or_as_json_and_has_a_status(capsys):
    console.print_result(None, as_json=True)
    console.print_result(Result([math.nan], "a text"), as_json=False)
    console.print_result(Result([math.nan], "a text"), as_json=True)
    console.print_result(Found("it", True), as_json=False)
    with pytest.raises(SystemExit, match="1"):
        console.print_result(Found("it", False), as_json=True)
    assert capsys.readouterr().out == 'a text\n[null]\nfound it\n{"text": "it", "accepted": false}\n'


AWKWARD = 'my run\'s $HOME `x` "y" & ñ\n!'


def test_a_shell_reads_what_was_written():
    line = shell_line("printf", "%s|", AWKWARD, 3, "", "-x")
    assert subprocess.run(["sh", "-c", line], capture_output=True, timeout=60).stdout.decode() == f"{AWKWARD}|3||-x|"
