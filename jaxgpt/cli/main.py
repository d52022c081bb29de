"""The command line: `jaxgpt COMMAND ...`, equal to `python -m jaxgpt COMMAND ...`.

A command is a function: its signature is its options, its docstring their help. Importing this module imports no jax, so
that help and errors are printed at once.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxgpt.cli import commands
from jaxgpt.cli.console import report_errors, take_traceback
from jaxgpt.cli.experiment_file import load_file
from jaxgpt.cli.options import parse
from jaxgpt.cli.sample import sample
from jaxgpt.cli.serve import serve
from jaxgpt.cli.train import resumed_run, train
from jaxgpt.config.presets import EXPERIMENTS, finetune, quickstart
from jaxgpt.config.serialize import suggest
from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.code import trust_code


class Command(NamedTuple):
    """A command of the command line."""

    run: Callable[..., Any] | str  # or the name of a function of `jaxgpt.tools`, see TOOLS
    operand: str
    example: str  # a line for its help


# First lines of the help of tools that are imported when they are called.
TOOLS = {
    "prepare": "Turn text into token shards for training.",
    "runs": "List all runs below a directory.",
    "report": "Summarise a run as an HTML page and JSON.",
    "sweep": "Search for the best learning rate, or other values.",
    "replay": "Repeat one training step of a run, writing nothing.",
    "audit": "Check a run's numbers by taking random steps again.",
}
# In the order in which a newcomer needs them.
COMMANDS = {
    "train": Command(train, "[EXPERIMENT]", "jaxgpt train --data.path mytext.txt --run-dir runs/mine"),
    "prepare": Command("prepare.prepare", "SOURCE...", "jaxgpt prepare a.parquet --out tokens --tokenizer bpe:32768"),
    "sample": Command(sample, "[RUN]", 'jaxgpt sample runs/mine --prompt "The " --temperature 0.7'),
    "serve": Command(serve, "[RUN]", "jaxgpt serve runs/mine --port 8000"),
    "evaluate": Command(commands.evaluate, "[RUN]", "jaxgpt evaluate runs/mine --data other.txt"),
    "report": Command("report.report", "[RUN]", "jaxgpt report runs/mine"),
    "xray": Command(commands.xray, "[RUN]", 'jaxgpt xray --prompt "The value of the" --out xray.html'),
    "page": Command(commands.page, "[RUN]", "jaxgpt page --out page.html"),
    "runs": Command("overview.runs", "[DIRECTORY]", "jaxgpt runs --sort loss"),
    "plan": Command(commands.plan, "[EXPERIMENT]", "jaxgpt plan quickstart --train.batch-size 64"),
    "sweep": Command("sweep.sweep", "[EXPERIMENT]", "jaxgpt sweep quickstart --over optim.learning-rate=1e-4..1e-1"),
    "study": Command(commands.study, "EXPERIMENT", "jaxgpt study experiments/study_activation.py --seeds 3"),
    "import": Command(commands.import_model, "MODEL", "jaxgpt import openai-community/gpt2 --run-dir runs/gpt2"),
    "export": Command(commands.export_model, "[RUN]", "jaxgpt export runs/mine --to gguf --out mine.gguf"),
    "replay": Command("replay.replay", "[RUN]", "jaxgpt replay runs/mine --step 300"),
    "audit": Command("replay.audit", "[RUN]", "jaxgpt audit runs/mine --steps 100"),
}
TRUST = "--trust-code"  # an option of all commands that read a run


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command `jaxgpt`. The exit status is 0 for success, 2 for the user's mistake, with a line or two, and 1 for anything else."""
    arguments = take_traceback(sys.argv[1:] if argv is None else argv)
    with report_errors():
        if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
            print(usage())
        elif arguments[0] == "--version":
            from importlib.metadata import version  # 0.03 s, which no other command needs

            print(f"jaxgpt {version('jaxgpt')}")
        else:
            bind_command(*arguments)()


def bind_command(name: str, *options: str) -> Callable[[], None]:
    """Return the command of that name with its options bound."""
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{suggest(name, COMMANDS)}: see jaxgpt --help")
    command, arguments = COMMANDS[name], list(options)
    if TRUST in arguments:
        arguments.remove(TRUST)
        trust_code()
    run, defaults, operand, callbacks = command.run, {}, "", []
    if command.operand == "[EXPERIMENT]":
        operand = command.operand
        if arguments and not arguments[0].startswith("-"):
            defaults["experiment"], callbacks = load_file(arguments.pop(0))
        else:
            metadata = resumed_run(arguments) if name == "train" else None
            is_chat = name == "train" and any(word.endswith(".jsonl") for word in arguments)
            has_weights = any(re.match("--train.init[-_]from", word) for word in arguments)
            preset = finetune() if has_weights else quickstart(chat=is_chat)
            defaults["experiment"] = preset if metadata is None else metadata.given
    if isinstance(run, str):
        if name not in ("runs", "prepare"):  # which start no jax
            configure_jax()
        module, _, function = run.partition(".")
        run = getattr(importlib.import_module(f"jaxgpt.tools.{module}"), function)
    run = functools.partial(train, callbacks=callbacks) if name == "train" else run
    return parse(run, arguments, f"jaxgpt {name}", operand=operand, example=command.example, **defaults)


def usage() -> str:
    """Return what `jaxgpt --help` prints."""
    lines = "\n".join(
        f"  {f'{name} {command.operand}':<21}{(TOOLS.get(name) or command.run.__doc__ or '').splitlines()[0].rstrip('.')}"
        for name, command in COMMANDS.items()
    )
    return f"""\
usage: jaxgpt COMMAND [OPTIONS]

{lines}

`jaxgpt COMMAND --help` lists its options.
`jaxgpt --version` prints the version.
RUN is a run directory, by default the newest under runs/.
--trust-code runs the code that a RUN brings for classes of its own.
--traceback shows where an error arose, as JAXGPT_TRACEBACK=1 does.
EXPERIMENT: a Python file with `experiment`, or {", ".join(EXPERIMENTS)}, depth:N."""
