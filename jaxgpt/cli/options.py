"""Options of the command line: argparse reads words, a signature lists the options, and its docstring explains them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from jaxgpt.cli.console import print_result, say, show
from jaxgpt.config.serialize import suggest
from jaxgpt.config.validate import field_hints
from jaxgpt.config.words import field_comments, parse_value, plain_types, replace_fields
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment

# The options that `--help` leaves out: these, and those fields of an experiment that are not in COMMON.
RARE = """name average extend cpus gpus tpus cache-dtype min-p repetition-penalty frequency-penalty presence-penalty
    logit-bias""".split()
COMMON = """model.n-layer model.n-head model.n-embd model.block-size data.path data.corpus data.tokenizer
    optim.learning-rate train.steps train.batch-size train.seed train.init-from lora.rank""".split()
# What users of other programs write, by the last part of the name of the option that does it here.
WORDS = {"lr": "learning-rate", "epochs": "steps", "max-steps": "steps", "data": "path", "optimizer": "name"}
# Help of what means the same in every command, unless its docstring has another.
HELP = {
    "run": "run directory. None means the newest under runs/",
    "average": "average this many checkpoints, the newest that train.keep_last kept. None means the best checkpoint",
    "weights": "dtype of the matrices. bfloat16 and int8 take a half and a quarter of float32's memory. "
    "None means the model's",
    "cache_dtype": "dtype of keys and values. None means the model's",
    "force": "overwrite files that exist",
    "json": "print JSON instead of text",
}
REQUIRED = inspect.Parameter.empty
VALUES = {int: "INT", float: "FLOAT", str: "STR", bool: "BOOL"}  # what stands for a value
MEANT = re.compile(r"(?:\. None means|, by default) (.*)$")  # the end of a meaning, if the default is None


class Option(NamedTuple):
    """An argument of a command, or a field of a configuration that is one."""

    path: str  # the argument, and the field in it: experiment.model.n_layer
    name: str  # as it is typed: --model.n-layer. That of an operand is in capitals: [RUN]
    hint: Any
    default: Any  # REQUIRED if there is none
    meaning: str

    @property
    def is_operand(self) -> bool:
        """Return whether it is given without its name."""
        return not self.name.startswith("--")

    @property
    def items(self) -> tuple[Any, ...] | None:
        """The types of its values if it has several, with ... for any number of them, else None."""
        return next((get_args(kind) for kind in (self.hint, *get_args(self.hint)) if get_origin(kind) is tuple), None)


class Parser(argparse.ArgumentParser):
    """A parser that raises `UserError`."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise UserError(f"{message.removeprefix('argument ')}. See {self.prog} --help")


def parse(
    command: Callable[..., Any], argv: Sequence[str], prog: str, *, operand: str = "", example: str, **defaults: Any
) -> Callable[[], None]:
    """Return a function that runs a command with its options. Raises `UserError`, or `SystemExit` once help is printed.

    A command is a function with annotations. Its first argument is an operand unless it is keyword-only, callables are
    no options, and `say` prints a line. What it returns is printed, as JSON with the option --json.

    operand: what the usage line shows before the options. example: a command line for the help.
    defaults: override those in the signature.
    """
    signature = inspect.signature(command, eval_str=True)
    doc = inspect.cleandoc(getattr(command, "func", command).__doc__ or "")
    parameters = [p for p in signature.parameters.values() if "Callable" not in str(p.annotation)]
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in parameters]
    if signature.return_annotation is not None and "json" not in signature.parameters:
        parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool))
    options = [option for p in parameters for option in list_options(p, p is parameters[0], find_meanings(doc))]
    words = set(itertools.takewhile(lambda word: word != "--", argv))
    parser = make_parser(options, prog, is_complete="--help-all" in words)
    if not words.isdisjoint(("-h", "--help", "--help-all")):
        show(render_help(parser, options, doc.partition("Args:")[0], operand, example))
        raise SystemExit(0)
    given = read_values(parser, options, list(argv))
    # An operand that may be left out, such as [RUN], need not have a default in Python.
    values = {p.name: given.get(p.name, None if p.default is REQUIRED else p.default) for p in parameters}
    for name, config in values.items():
        if dataclasses.is_dataclass(config):
            fields = {path.partition(".")[2]: value for path, value in given.items() if path.startswith(f"{name}.")}
            values[name] = replace_fields(config, fields)
    as_json = values.get("json", False)
    values["say"] = say

    def run(**values: Any) -> None:
        print_result(command(**values), as_json=as_json)

    return functools.partial(run, **{name: values[name] for name in signature.parameters if name in values})


def list_options(p: inspect.Parameter, is_first: bool, meanings: dict[str, str]) -> Iterator[Option]:
    """Yield the option of a parameter, or an option for each field if it is a configuration."""
    if dataclasses.is_dataclass(p.annotation):
        yield from list_fields(p.default, p.name, "--")
        return
    hint, default, name = p.annotation, p.default, f"--{p.name.replace('_', '-')}"
    if Path in get_args(hint):  # from Python, a Path will do
        hint, default = str | None, None
    if is_first and p.kind is not inspect.Parameter.KEYWORD_ONLY:
        name = p.name.upper() + "..." * (get_origin(hint) is tuple)
        name = name if default is REQUIRED else f"[{name}]"
    yield Option(p.name, name, hint, default, meanings.get(p.name, HELP.get(p.name, "")))


def list_fields(config: Any, path: str, prefix: str) -> Iterator[Option]:
    """Yield an option for each field of a configuration, and of those in it. prefix: --model., which begins a name."""
    meanings = field_comments(type(config))
    for field, hint in field_hints(type(config)).items():
        value, name = getattr(config, field), f"{prefix}{field.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            yield from list_fields(value, f"{path}.{field}", f"{name}.")
        else:
            yield Option(f"{path}.{field}", name, hint, value, meanings[field])


def find_meanings(doc: str) -> dict[str, str]:
    """Return what a docstring says of each argument."""
    _, _, listed = doc.partition("Args:\n")
    return {name: " ".join(text.split()) for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", listed, re.M)}


def read_values(parser: Parser, options: Sequence[Option], argv: list[str]) -> dict[str, Any]:
    """Return the values that words give to options, by their paths. Raises `UserError`."""
    end = [*argv, "--"].index("--")
    words = [re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), word) for word in argv[:end]]
    found, rest = parser.parse_known_args(join_mixture(words))
    if unknown := next((word.partition("=")[0] for word in rest if word.startswith("-")), None):
        parser.error(f"there is no option {unknown}{suggest_option(unknown, options)}")
    operands, values = rest + argv[end + 1 :], {}
    for option in options:
        if not option.is_operand:
            given = vars(found).get(option.path)
        else:
            given, operands = (operands or None, []) if option.items else (operands[:1] or None, operands[1:])
        if given is None and option.default is REQUIRED:
            parser.error(f"{option.name} is needed: {option.meaning}")
        if given == [""] and "." not in option.path and option.path not in ("prompt", "stop"):
            parser.error(f"{option.path} is empty: name one, or leave it out")
        if given is not None:
            values[option.path] = given if isinstance(given, bool) else parse_words(option, given)
    if operands:
        parser.error(f"give one at a time: got {operands[0]} as well")
    return values


def make_parser(options: Sequence[Option], prog: str, *, is_complete: bool) -> Parser:
    """Return a parser of all options but operands, whose help has the common ones, or each in a group for its section."""
    width = min(100, shutil.get_terminal_size().columns)
    formatter = functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width)
    parser = Parser(prog, formatter_class=formatter, allow_abbrev=False, add_help=False)
    ours = {option.name for option in list_fields(Experiment(name="ours"), "", "--")}  # a user's own fields are shown
    hidden = set() if is_complete else (ours - {f"--{name}" for name in COMMON}) | {f"--{name}" for name in RARE}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.is_operand:
            continue
        section, _, last = option.name[2:].rpartition(".")
        title = f"{section} options".lstrip() if is_complete else "options"
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        help = argparse.SUPPRESS if option.name in hidden else show_meaning(option, is_complete).replace("%", "%%")
        every: dict[str, Any] = {"dest": option.path, "default": argparse.SUPPRESS}
        if option.hint is bool:  # --fresh, --no-fresh, --model.no-bias
            group.add_argument(option.name, action="store_true", help=help, **every)
            if not last.startswith("no-"):
                negation = f"{option.name.removesuffix(last)}no-{last}"
                group.add_argument(negation, action="store_false", help=argparse.SUPPRESS, **every)
            continue
        repeats = option.hint == tuple[str, ...] and not section  # --stop a --stop b, but --lora.targets q v
        many = "*" if option.items and not repeats else 1
        action = "extend" if repeats else "store"
        group.add_argument(option.name, nargs=many, action=action, metavar=show_value(option), help=help, **every)
    parser.epilog = "--no-NAME switches a flag off." if is_complete else f"All options: {prog} --help-all"
    return parser


def parse_words(option: Option, words: list[str]) -> Any:
    """Return the value that words give to an option. Those of tuples in a tuple are in a row: 5 1.0 7 -2."""
    if option.items is None or words == ["None"]:
        return parse_value(option.name, words[0], option.hint)
    each = [hint for hint in option.items if hint is not ...]
    inner = get_args(each[0]) if get_origin(each[0]) is tuple else ()
    hints = itertools.cycle(inner or each)
    found = tuple(parse_value(option.name, word, hint) for word, hint in zip(words, hints, strict=False))
    return tuple(itertools.zip_longest(*[iter(found)] * len(inner))) if inner else found


def suggest_option(word: str, options: Sequence[Option]) -> str:
    """Return a question that names the option that may be meant."""
    fields = {option.name.rpartition(".")[2]: option.name for option in options if "." in option.name}
    last = word.lstrip("-")
    meant = fields.get(WORDS.get(last, last))
    return f" (did you mean {meant}?)" if meant else suggest(word, [option.name for option in options])


def join_mixture(argv: list[str]) -> list[str]:
    """Join the words of `--data.path a:0.7 b:0.3` by commas, as `DataConfig.path` has them."""
    joined: list[str] = []
    for word in argv:
        if joined[-2:-1] == ["--data.path"] and ":" in joined[-1] and not word.startswith("-"):
            word = f"{joined.pop()},{word}"
        joined.append(word)
    return joined


def render_help(parser: Parser, options: Sequence[Option], text: str, operand: str, example: str) -> str:
    """Return a page of help: what the command does, an example, and the options."""
    purpose, *more = text.strip().split("\n", 1)
    more += [f"{option.name}: {show_meaning(option, False)}" for option in options if option.is_operand]
    operands = [operand] if operand else [option.name for option in options[:1] if option.is_operand]
    parser.usage = " ".join([parser.prog, *operands, "[OPTIONS]"])
    width = min(100, shutil.get_terminal_size().columns)
    paragraphs = [purpose, f"example: {example}", *(textwrap.fill(" ".join(x.split()), width) for x in more)]
    parser.description = "\n\n".join(paragraphs)
    return parser.format_help().rstrip()


def show_value(option: Option) -> str:
    """Return what stands for a value of an option in the help."""
    hint = option.items[0] if option.items else option.hint
    if choices := next((get_args(kind) for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal), None):
        return f"{{{','.join(choices)}}}"
    plain = plain_types(hint)
    return next((shown for kind, shown in VALUES.items() if kind in plain), "VALUE")


def show_meaning(option: Option, is_complete: bool) -> str:
    """Return what an option means, and its default."""
    meaning, default = option.meaning, option.default
    if not is_complete:
        meaning = re.sub(r" \([^()]*arXiv:[\d.]+\)", "", meaning)
        if default is None and (implied := MEANT.search(meaning)):
            meaning, default = meaning[: implied.start()], implied[1]
    if default is REQUIRED:
        return f"{meaning} (required)"
    if default in ("", ()) or (default is False and not is_complete):
        return meaning
    return f"{meaning} (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
