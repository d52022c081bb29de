"""What `--help` shows: little enough to read, an example that works, and what None stands for."""

import contextlib
import io
import re
import shlex

import pytest

from jaxgpt.cli.main import COMMANDS, bind_command, main, usage

OPTION = re.compile(r"^[│ ] +?(--[\w.-]+|\[?[A-Z]+\]? )")
LINES = 40  # of a terminal of 100 columns


@pytest.fixture
def shown(monkeypatch):
    """Return what a command line prints on a terminal of 100 columns, as lines."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*argv):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")  # else the frames are taller, and of ASCII
        with pytest.raises(SystemExit) as left, contextlib.redirect_stdout(stdout):
            main(list(argv))
        assert not left.value.code
        return stdout.buffer.getvalue().decode().splitlines()

    return run


def options(lines):
    """Return the words of each option in a help, by its name."""
    found = {}
    for line in lines:
        if not line.startswith(("│", "  ")):
            continue
        if match := OPTION.match(line):
            name = match[1].strip()
            found[name] = ""
        if found:
            found[name] += " " + line.strip("│ ")
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_on_a_screen_and_names_the_rest(shown, name):
    lines = shown(name, "--help")
    assert len(lines) <= LINES and max(map(len, lines)) <= 100
    assert lines[4].startswith(f"example: jaxgpt {name}") and lines[-1] == f"All options: jaxgpt {name} --help-all"
    assert lines == shown(name, "-h") and "None" not in "".join(lines)
    short, complete = options(lines), options(shown(name, "--help-all"))
    hidden = complete.keys() - short.keys()
    assert short.keys() <= complete.keys() and (len(hidden) > 70 if "--train.steps" in short else len(hidden) < 12)


def test_help_shows_the_defaults_of_the_experiment_that_is_named(shown, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from jaxgpt import Experiment, TrainConfig\nexperiment = Experiment(name='x', train=TrainConfig(steps=77))"
    )
    assert "(default: 77)" in options(shown("train", str(file), "--help"))["--train.steps"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_parses_and_words_for_every_option(shown, name):
    lines = shown(name, "--help-all")
    for example in [line for line in shown(name, "--help") if line.startswith("example: ")]:
        program, *words = shlex.split(example.removeprefix("example: "))
        assert program == "jaxgpt" and words[0] == name and len(words) > 1
        bind_command(*words)
    assert COMMANDS[name].purpose in lines
    found = options(lines)
    assert found and [option for option, text in found.items() if not text.split("(default")[0].strip()] == []
    unsaid = [option for option, text in found.items() if "(default: None)" in text]
    assert [option for option in unsaid if not re.search("None(:| means) |by default ", found[option])] == []


def test_the_list_of_commands_fits_on_a_terminal():
    lines = usage().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
