"""Options of the command line: tyro makes them from a function's signature, and their help from its docstring."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, UseAppendAction, arg

from jaxgpt.cli.console import print_result, say, show
from jaxgpt.config.validate import check_value
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment

# The options that `--help` leaves out: these, and those fields of an experiment that are not in COMMON.
RARE = """h name average extend cache-dtype min-p repetition-penalty frequency-penalty presence-penalty
    logit-bias""".split()
COMMON = """model.n-layer model.n-head model.n-embd model.block-size data.path data.corpus data.tokenizer
    optim.learning-rate train.steps train.batch-size train.seed train.init-from lora.rank""".split()
MEANT = r"(?:\. None means|, by default) (.*) \(default: None\)$"
PARTS = {p.name: getattr(p.default_factory, "__dataclass_fields__", ()) for p in dataclasses.fields(Experiment)}
FIELDS = {f"{part}.{name}".replace("_", "-") for part, names in PARTS.items() for name in names}
# Words for options that are not their names, by what users of other programs write. A field's own name is one.
WORDS = {name.rpartition(".")[2]: f"--{name}" for name in sorted(FIELDS)}
WORDS |= {"lr": "--optim.learning-rate", "epochs": "--train.steps", "max-steps": "--train.steps"}
WORDS |= {"data": "--data.path", "optimizer": "--optim.name", "device": "JAX_PLATFORMS=cpu"}
# Options of commands without an experiment, by what does their work now.
MOVED = {"draft": "python experiments/speculative.py RUN DRAFT"}
# Help of what means the same in every command, unless its docstring has another.
HELP = {
    "run": "run directory. None means the newest under runs/",
    "average": "average this many checkpoints, the newest that train.keep_last kept. None means the best checkpoint",
    "weights": "dtype of the matrices. bfloat16 and int8 take a half and a quarter of float32's memory. None means the model's",
    "cache_dtype": "dtype of keys and values. None means the model's",
    "force": "overwrite files that exist",
    "json": "print JSON instead of text",
    "experiment": "its fields are options too",
}


def parse(
    command: Callable[..., Any], argv: list[str], prog: str, *, operand: str = "", example: str, **defaults: Any
) -> Callable[[], None]:
    """Return a function that runs a command with its options. Turn tyro's framed messages into one line of a `UserError`.

    A command is a function with annotations. Its first argument is an operand unless it is keyword-only, callables are
    no options, and `say` prints a line. What it returns is printed, as JSON with the option --json.

    operand: what the usage line shows before the options. example: a command line for the help.
    defaults: override those in the signature.
    """
    argv = _join_mixture(argv)
    signature, doc = inspect.signature(command, eval_str=True), getattr(command, "func", command).__doc__
    text, _, documented = inspect.cleandoc(doc or "").partition("Args:")
    parameters = [p for p in signature.parameters.values() if "Callable" not in str(p.annotation)]
    if signature.return_annotation is not None and "json" not in signature.parameters:
        parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool))
    shown = []
    for p in parameters:
        hint, default = p.annotation, defaults.get(p.name, p.default)
        if Path in get_args(hint):
            hint, default = str | None, None  # from Python, a Path will do
        if hint == tuple[str, ...] and p.kind is inspect.Parameter.KEYWORD_ONLY:
            hint = UseAppendAction[hint]
        elif hint is Experiment:
            hint = Annotated[hint, arg(name="")]
        elif dataclasses.is_dataclass(hint):
            hint = OmitArgPrefixes[hint]
        elif p.name.startswith("no_"):
            hint = FlagCreatePairsOff[hint]
        if p.name in HELP and f"    {p.name}: " not in documented:
            hint = Annotated[hint, arg(help=HELP[p.name])]
        if p is parameters[0] and p.kind is not inspect.Parameter.KEYWORD_ONLY:
            hint = Positional[hint]
        shown.append(p.replace(annotation=hint, default=default, kind=inspect.Parameter.KEYWORD_ONLY))

    def bind(**values: Any) -> dict[str, Any]:
        return values

    vars(bind)["__signature__"] = signature.replace(parameters=shown)
    bind.__annotations__ = {p.name: p.annotation for p in shown}
    bind.__doc__ = doc
    words = set(itertools.takewhile(lambda word: word != "--", argv))
    is_brief = "--help-all" not in words and not words.isdisjoint(("-h", "--help"))
    framed, printed, width = io.StringIO(), io.StringIO(), shutil.get_terminal_size().columns
    if is_brief:
        os.environ["COLUMNS"] = "80"  # with more, tyro prints two boxes in a row
    try:
        with contextlib.redirect_stderr(framed), contextlib.redirect_stdout(printed if is_brief else sys.stdout):
            values: dict[str, Any] = tyro.cli(
                bind,
                args=["--help"] if is_brief or "--help-all" in words else argv,
                prog=f"{prog} {operand}".rstrip(),
                description=f"{text.rstrip()}\n\nexample: {example}",
                config=[tyro.conf.PositionalMetavarFromFieldName],
            )
    except SystemExit as e:
        if e.code in (0, None):
            if is_brief:
                os.environ["COLUMNS"] = str(width)
                show(_shorten_help(printed.getvalue(), text, example, prog, operand))
            raise
        words = WORDS if any(p.annotation is Experiment for p in parameters) else MOVED
        raise UserError(_one_line(framed.getvalue(), prog, words)) from None
    for p in parameters:
        if values[p.name] == "" and p.name != "prompt":
            raise UserError(f"{p.name} is empty: name one, or leave it out. See {prog} --help")
        check_value(f"--{p.name.replace('_', '-')}", values[p.name], p.annotation)
    as_json = values.get("json", False) if "json" in signature.parameters else values.pop("json", False)
    if "say" in signature.parameters:
        values["say"] = say

    def run(**values: Any) -> None:
        print_result(command(**values), as_json=as_json)

    return functools.partial(run, **values)


def _join_mixture(argv: list[str]) -> list[str]:
    """Join the words of `--data.path a:0.7 b:0.3` by commas, as `DataConfig.path` has them."""
    joined: list[str] = []
    for word in argv:
        if joined[-2:-1] == ["--data.path"] and ":" in joined[-1] and not word.startswith("-"):
            joined[-1] += f",{word}"
        else:
            joined.append(word)
    return joined


def _shorten_help(printed: str, text: str, example: str, prog: str, operand: str) -> str:
    """Return a page of help from tyro's: the common options, and for a default of None what its text says of it."""
    hidden = FIELDS - set(COMMON)
    rows = {}
    for option in re.findall(r"^  ((?:--?[a-z]|\[?[A-Z]+\]? ).*(?:\n   .*)*)", printed, flags=re.MULTILINE):
        names, *words = re.split(r"\s{2,}", option.strip())
        if re.split("[ ,]", names)[0].lstrip("-") not in {*RARE, *hidden}:
            explained = re.sub(MEANT, r" (default: \1)", " ".join(words))
            explained = re.sub(r" \([^()]*arXiv:[\d.]+\)| \(default: ''\)$| \(default: \)$", "", explained)
            names = names.split(",")[0] if explained.endswith("(default: False)") else names
            rows["  " + re.sub(r"\{None\}\||None,", "", names)] = explained.removesuffix(" (default: False)")
    wrap = functools.partial(textwrap.wrap, width=min(100, shutil.get_terminal_size().columns), break_on_hyphens=False)
    operand = operand or next((name.strip() for name in rows if "-" not in name), "")
    purpose, *more = text.strip().split("\n", 1)
    lines = [f"usage: {prog} {operand} [OPTIONS]".replace("  ", " "), "", purpose, "", f"example: {example}", ""]
    lines += [*wrap(more[0].strip()), "", "options:"] if more else ["options:"]
    indent = min(32, 2 + max(map(len, rows)))
    for names, explained in rows.items():
        *above, head = [names, ""] if len(names) > indent - 2 else [names]
        lines += [*above, *wrap(explained, initial_indent=head.ljust(indent), subsequent_indent=" " * indent)]
    return "\n".join((*lines, "", f"All options: {prog} --help-all"))


def _one_line(framed: str, prog: str, other_words: dict[str, str]) -> str:
    """Return the text of one of tyro's boxes, without frame, repeated help or pointer to the help."""
    words = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in framed.splitlines() if not re.match(r"^[╭╰]", line)]
    text = " ".join(w for w in words if w and not set(w) <= set("─"))
    text = re.split(r"For full helptext|Argument helptext:", text)[0].strip()
    text = re.sub(r"^Unrecognized options: (?!-|.*, -)(.*)", r"give one at a time: got \1 as well", text)
    text = re.sub(r"invalid literal for int\(\) with base 10: ('.*')", r"\1 is not a whole number, such as 1000", text)
    text, _, meant = text.partition(" Perhaps you meant: ")
    word = "".join(re.findall(r"^Unrecognized options: -+([\w-]+)", text)).replace("_", "-")
    meant = other_words.get(word, re.split("[ ,]", meant)[0])
    text += f" Did you mean {meant}?" if meant else ""
    text = re.sub(r"^Error parsing (\S+): ", lambda m: "" if not m[1].startswith("-") else f"{m[1]}: ", text)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {prog} --help"
