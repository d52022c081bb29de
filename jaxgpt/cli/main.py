"""The command line: `jaxgpt COMMAND ...`, equal to `python -m jaxgpt COMMAND ...`.

A command is a function: its signature is its options, its docstring their help. It is imported when it is named, so that
`jaxgpt --help` imports no jax and is printed at once.
"""

from __future__ import annotations

import functools
import gc
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxgpt.cli.console import report_errors, say, take_traceback
from jaxgpt.config.serialize import suggest
from jaxgpt.errors import UserError
from jaxgpt.parallel.jax_setup import configure_jax, import_jax


class Command(NamedTuple):
    """A command of the command line."""

    function: str  # MODULE:NAME below jaxgpt, imported when the command is named
    operand: str
    purpose: str  # the first line of its help


# In the order in which a newcomer needs them.
COMMANDS = {
    "train": Command("cli.train:train", "[EXPERIMENT]", "Train an experiment, or resume a run."),
    "prepare": Command("tools.prepare:prepare", "SOURCE...", "Turn text into token shards for training."),
    "sample": Command("cli.commands:sample", "[RUN]", "Generate text from a trained run."),
    "chat": Command("cli.chat:chat", "[RUN]", "Talk with a model, in the terminal."),
    "serve": Command("cli.commands:serve", "[RUN]", "Serve a run: OpenAI's interface, and a page."),
    "evaluate": Command("cli.commands:evaluate", "[RUN]", "Measure loss and perplexity of a run on held-out text."),
    "report": Command("tools.report:report", "[RUN]", "Summarise a run as an HTML page."),
    "xray": Command("cli.commands:xray", "[RUN]", "Show what a model does with a text, as an HTML page."),
    "page": Command("cli.commands:page", "[RUN]", "Write a model as an HTML page that runs it."),
    "runs": Command("tools.overview:runs", "[DIRECTORY]", "List all runs below a directory."),
    "plan": Command(
        "tools.plan.plan:plan", "[EXPERIMENT]", "Compile a training step and estimate its memory and speed."
    ),
    "sweep": Command("tools.sweep:sweep", "[EXPERIMENT]", "Search for the best learning rate, or other values."),
    "study": Command("cli.commands:study", "EXPERIMENT", "Train variants with several seeds and report which differ."),
    "import": Command("cli.commands:import_model", "MODEL", "Make a run of a model of the Hub, or of a GGUF file."),
    "export": Command("cli.commands:export_model", "[RUN]", "Write a run as GGUF or in Hugging Face's format."),
    "replay": Command("tools.replay:replay", "[RUN]", "Repeat one training step of a run, writing nothing."),
    "audit": Command("tools.replay:audit", "[RUN]", "Check a run's numbers by taking random steps again."),
}
EXAMPLES = {
    "train": "--data.path mytext.txt --run-dir runs/mine",
    "prepare": "a.parquet --out tokens --tokenizer bpe:32768",
    "sample": 'runs/mine --prompt "The " --temperature 0.7',
    "chat": "runs/mine --temperature 0.7",
    "serve": "runs/mine --port 8000",
    "evaluate": "runs/mine --data other.txt",
    "report": "runs/mine",
    "xray": '--prompt "The value of the" --out xray.html',
    "page": "--out page.html",
    "runs": "--sort loss",
    "plan": "quickstart --train.batch-size 64",
    "sweep": "quickstart --over optim.learning-rate=1e-4..1e-1",
    "study": "experiments/study_activation.py --seeds 3",
    "import": "openai-community/gpt2 --run-dir runs/gpt2",
    "export": "runs/mine --to gguf --out mine.gguf",
    "replay": "runs/mine --step 300",
    "audit": "runs/mine --steps 100",
}

# Commands whose RUN may be a model that is imported first.
TAKE_MODELS = ("sample", "chat", "serve", "evaluate", "xray", "page")


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
    import_jax()
    from jaxgpt.cli.experiment_file import choose_experiment
    from jaxgpt.cli.options import parse
    from jaxgpt.runs.bucket import address_of
    from jaxgpt.runs.code import trust_code
    from jaxgpt.runs.directory import is_run

    command, arguments = COMMANDS[name], list(options)
    if "--trust-code" in arguments:  # an option of all commands that read a run
        arguments.remove("--trust-code")
        trust_code()
    named = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if name in TAKE_MODELS and named and address_of(named) is None and not is_run(Path(named)):
        from jaxgpt.tools.convert import find_run_of  # half a second, which no run needs

        arguments[0] = find_run_of(named, say)
    defaults, operand, callbacks = {}, "", []
    if command.operand == "[EXPERIMENT]":
        operand = command.operand
        defaults["experiment"], callbacks = choose_experiment(name, arguments)
    # Two of these start no backend, and plan does once it knows the topology.
    if command.function.startswith("tools") and name not in ("runs", "prepare", "plan"):
        configure_jax()
    run = pkgutil.resolve_name(f"jaxgpt.{command.function}")
    gc.freeze()  # what is imported is never garbage: to look for some in it takes 0.7 s as the process ends
    if name == "train":
        run = functools.partial(run, callbacks=callbacks)
    example = f"jaxgpt {name} {EXAMPLES[name]}"
    return parse(run, arguments, f"jaxgpt {name}", operand=operand, example=example, **defaults)


def usage() -> str:
    """Return what `jaxgpt --help` prints."""
    lines = "\n".join(f"  {f'{name} {c.operand}':<21}{c.purpose.rstrip('.')}" for name, c in COMMANDS.items())
    return f"""\
usage: jaxgpt COMMAND [OPTIONS]

{lines}

`jaxgpt COMMAND --help` lists its options.
`jaxgpt --version` prints the version.
RUN is a run directory, by default the newest under runs/. To use a model it may
be a FILE.gguf, a folder of Hugging Face's or an id on the Hub.
--trust-code runs the code that a RUN brings for classes of its own.
--traceback shows where an error arose, as JAXGPT_TRACEBACK=1 does.
EXPERIMENT: a Python file with `experiment`, or quickstart, finetune, depth:N."""
