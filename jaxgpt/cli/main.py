"""The command line: `jaxgpt COMMAND ...`, equal to `python -m jaxgpt COMMAND ...`.

A command is a function: its signature is its options, its docstring their help. Importing this module imports no jax, so
that help and mistakes answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxgpt.cli import tools
from jaxgpt.cli.console import told_in_words
from jaxgpt.cli.experiment_file import close, load_experiment
from jaxgpt.cli.options import parse
from jaxgpt.cli.sample import sample
from jaxgpt.cli.train import resumed_run, train
from jaxgpt.config.presets import EXPERIMENTS, quickstart
from jaxgpt.errors import UserError


class Command(NamedTuple):
    """A command of the command line."""

    run: Callable[..., None]
    operand: str
    takes_experiment: bool = False  # whose fields are options too


COMMANDS = {
    "train": Command(train, "[EXPERIMENT]", takes_experiment=True),
    "sample": Command(sample, "[RUN]"),
    "evaluate": Command(tools.evaluate, "[RUN]"),
    "study": Command(tools.study, "EXPERIMENT"),
    "xray": Command(tools.xray, "[RUN]"),
    "report": Command(tools.report, "[RUN]"),
    "replay": Command(tools.replay, "[RUN]"),
    "import-hf": Command(tools.import_hf, "DIR"),
    "export-hf": Command(tools.export_hf, "[RUN]"),
    "plan": Command(tools.plan, "[EXPERIMENT]", takes_experiment=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `jaxgpt`. Exit status 0: done; 2: the user's mistake, in a line or two; 1: anything else."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with told_in_words():
        if not arguments or arguments[0] in ("-h", "--help"):
            print(usage())
            return
        name = arguments.pop(0)
        if name not in COMMANDS:
            raise UserError(
                f"unknown command {name!r}{close(name, COMMANDS)}. There are {', '.join(COMMANDS)}: see jaxgpt --help"
            )
        command = COMMANDS[name]
        defaults: dict[str, Any] = {}
        if command.takes_experiment and arguments and not arguments[0].startswith("-"):
            defaults["experiment"] = load_experiment(arguments.pop(0))
        elif command.takes_experiment:
            metadata = resumed_run(arguments) if name == "train" else None
            defaults = {"experiment": quickstart() if metadata is None else metadata.given, "metadata": metadata}
        parse(command.run, arguments, f"jaxgpt {name} {command.operand}", **defaults)()


def usage() -> str:
    """Return what `jaxgpt --help` prints."""
    commands = "\n".join(
        f"  {f'{name} {command.operand}':<21}{(command.run.__doc__ or '').splitlines()[0].rstrip('.')}"
        for name, command in COMMANDS.items()
    )
    return f"""\
usage: jaxgpt COMMAND [OPTIONS]

{commands}

`jaxgpt COMMAND --help` lists the options. EXPERIMENT is a Python file with an `experiment` in it, or one of \
{", ".join(EXPERIMENTS)}.
RUN is a run directory; without one, the newest under runs/."""
