"""Options of the command line: tyro makes them from a function's signature, and their help from its docstring."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, Suppress, UseAppendAction, arg
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from jaxgpt.cli.console import print_result, say, show
from jaxgpt.config import DataConfig, Experiment, GPTConfig, LoraConfig, OptimConfig, ParallelConfig, TrainConfig
from jaxgpt.config.validate import check_value
from jaxgpt.errors import UserError

# The fields of an experiment that `--help` shows, those that people change; `--help-all` shows all.
COMMON: dict[type, str] = {
    Experiment: "model data optim train lora parallel",
    GPTConfig: "n_layer n_head n_embd block_size dropout",
    DataConfig: "path corpus tokenizer",
    OptimConfig: "name learning_rate",
    TrainConfig: "steps batch_size seed eval_every init_from",
    LoraConfig: "rank",
    ParallelConfig: "strategy micro_batch_size",
}
# Help of what means the same in every command, unless its docstring has another.
HELP = {
    "run": "run directory; None: the newest under runs/",
    "average": "average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint",
    "weights": "dtype of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's",
    "cache_dtype": "dtype of keys and values; None: the model's",
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
    wants_help = not words.isdisjoint(("-h", "--help", "--help-all"))
    is_short = "--help-all" not in words and any(isinstance(p.default, Experiment) for p in shown)
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            values: dict[str, Any] = tyro.cli(
                bind,
                args=["--help"] if wants_help else argv,
                prog=f"{prog} {operand}".rstrip(),
                description=f"{text.rstrip()}\n\nexample: {example}",
                config=[tyro.conf.PositionalMetavarFromFieldName],
                registry=_common_options() if wants_help and is_short else None,
            )
    except SystemExit as e:
        if e.code in (0, None):
            if wants_help and is_short:
                show("These are the options that are changed most often; --help-all lists all of them.")
            raise
        raise UserError(_one_line(framed.getvalue(), prog)) from None
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


def _common_options() -> ConstructorRegistry:
    """Return a registry in which tyro finds only the `COMMON` options. It parses no others, so it is for help only."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def suppress(info: StructTypeInfo) -> StructConstructorSpec | None:
        known = next((cls for cls in COMMON if isinstance(info.type, type) and issubclass(info.type, cls)), None)
        if known is None or suppress in info.markers:
            return None
        own = {f.name for f in dataclasses.fields(info.type)} - {f.name for f in dataclasses.fields(known)}
        names = own | set(COMMON[known].split())
        # The marker makes this rule pass, so that tyro's rule for dataclasses answers.
        found = ConstructorRegistry.get_struct_spec(dataclasses.replace(info, markers=(*info.markers, suppress)))
        assert isinstance(found, StructConstructorSpec)
        fields = []
        for field in found.fields:
            kind: Any = field.type if field.name in names else Suppress[field.type]
            helptext = "" if kind in COMMON else field.helptext  # the title of a group is enough here
            fields.append(dataclasses.replace(field, type=kind, helptext=helptext))
        return dataclasses.replace(found, fields=tuple(fields))

    return registry


def _one_line(framed: str, prog: str) -> str:
    """Return the text of one of tyro's boxes, without frame, repeated help or pointer to the help."""
    words = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in framed.splitlines() if not re.match(r"^[╭╰]", line)]
    text = " ".join(w for w in words if w and not set(w) <= set("─"))
    text = re.split(r"For full helptext|Argument helptext:", text)[0].strip()
    text = re.sub(r"Perhaps you meant: (--[\w.-]+).*", r"Did you mean \1?", text)
    text = re.sub(r"^Error parsing (\S+): ", lambda m: "" if not m[1].startswith("-") else f"{m[1]}: ", text)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {prog} --help"
