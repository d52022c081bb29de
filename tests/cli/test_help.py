"""What `--help` shows: little enough to read, an example that works, and what None stands for."""

import re
import shlex

import pytest

from jaxgpt.cli.main import COMMANDS, bind_command, main, usage

LINES = 40  # of a terminal of 100 columns


@pytest.fixture
def shown(monkeypatch, capsys):
    """Return what a command line prints on a terminal of 100 columns, as lines."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*argv):
        with pytest.raises(SystemExit) as left:
            main(list(argv))
        assert not left.value.code
        return capsys.readouterr().out.splitlines()

    return run


def options(lines):
    """Return the words of each option in a help, by its name."""
    found = {}
    for line in lines:
        if match := re.match(r"  (--[\w.-]+)", line):
            found[match[1]] = ""
        if found and line.startswith("  "):
            found[[*found][-1]] += f" {line.strip()}"
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_on_a_screen_and_names_the_rest(shown, name):
    lines = shown(name, "--help")
    assert len(lines) <= LINES and max(map(len, lines)) <= 100
    assert COMMANDS[name].purpose in lines and lines[-1] == f"All options: jaxgpt {name} --help-all"
    assert lines == shown(name, "-h") and "None" not in "".join(lines)
    program, *words = shlex.split(lines[4].removeprefix("example: "))
    assert program == "jaxgpt" and words[0] == name and len(words) > 1
    bind_command(*words)
    short, complete = options(lines), options(shown(name, "--help-all"))
    hidden = complete.keys() - short.keys()
    assert short.keys() <= complete.keys() and (len(hidden) > 70 if "--train.steps" in short else len(hidden) < 12)
    assert complete and all(text.split("(default")[0].strip() for text in complete.values())
    unsaid = [option for option, text in complete.items() if "(default: None)" in text]
    assert [option for option in unsaid if not re.search("None(:| means) |by default ", complete[option])] == []


def test_help_shows_the_defaults_of_the_experiment_that_is_named(shown, tmp_path):
    file = tmp_path / "mine.py"
    experiment = "experiment = Experiment(name='x', train=TrainConfig(steps=77))"
    file.write_text(f"from jaxgpt import Experiment, TrainConfig\n{experiment}")
    assert "(default: 77)" in options(shown("train", str(file), "--help"))["--train.steps"]


def test_the_list_of_commands_fits_on_a_terminal():
    lines = usage().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(COMMANDS)
