"""What the command line prints to streams that are closed, full or ASCII only, and to a shell."""

import dataclasses
import io
import math
import os
import subprocess
import sys

import pytest

from jaxgpt.cli import console
from jaxgpt.errors import Preempted, UserError, shell_line
from jaxgpt.files import Result
from tests.conftest import REPOSITORY

# A command that speaks and has a result, as all do. Without jax: it starts in a tenth of a second.
PROGRAM = """
from jaxgpt.cli.console import print_result, say, report_errors
from jaxgpt.files import Result
with report_errors():
    say("on the way")
    print_result(Result({"text": "año"}, ""), as_json=True)
    print("año")
"""


def in_a_shell(redirected: str, encoding: str = "utf-8") -> subprocess.CompletedProcess:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {redirected}', sys.executable, PROGRAM],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": encoding},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
    )


def test_a_reader_that_is_gone_and_a_full_disk_are_no_bugs():
    for _ in range(3):
        done = in_a_shell("| true")  # whose status is the shell's
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr
    done = in_a_shell(">/dev/full")
    assert (done.returncode, done.stderr) == (2, "on the way\njaxgpt: No space left on device\n")


def test_a_run_goes_on_though_nobody_reads_what_it_says(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Gone())
    with console.report_errors():
        console.say("a line")
        print("another", file=sys.stderr, flush=True)


@pytest.mark.parametrize(("encoding", "result", "text"), [("utf-8", "año", "año"), ("ascii", r"a\u00f1o", r"a\xf1o")])
def test_characters_that_stdout_has_not_are_escapes(encoding, result, text):
    done = in_a_shell("", encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, f'{{"text": "{result}"}}\n{text}\n', "on the way\n")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (UserError("a\nb"), 2, "jaxgpt: a\\nb\n"),
        (PermissionError(13, "Permission denied", "runs"), 2, "jaxgpt: runs: Permission denied\n"),
        (KeyboardInterrupt(), 1, "interrupted\n"),
        (Preempted("saved step 1. Resume."), 1, "saved step 1. Resume.\n"),
        # A mistake of ours keeps its traceback.
        (OSError(9, "Bad file descriptor"), None, ""),
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
