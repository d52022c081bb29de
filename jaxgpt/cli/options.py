"""Options of the command line: tyro makes them from a command's signature, and their help from its docstring."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import re
from collections.abc import Callable
from typing import Any

import tyro
from tyro.conf import PositionalMetavarFromFieldName, Suppress
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from jaxgpt.cli.console import show
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


def parse(
    command: Callable[..., None], argv: list[str], prog: str, *, operand: str = "", example: str, **defaults: Any
) -> Callable[[], None]:
    """Return a command with its options bound. Turn tyro's framed messages into one line of a `UserError`.

    operand: what the usage line shows before the options. example: a command line for the help.
    defaults: override those in the signature.
    """

    @functools.wraps(command)
    def bind(*arguments: Any, **options: Any) -> functools.partial[None]:
        return functools.partial(command, *arguments, **options)

    signature = inspect.signature(command, eval_str=True)
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    vars(bind)["__signature__"] = signature.replace(parameters=parameters)
    words = set(itertools.takewhile(lambda word: word != "--", argv))
    wants_help = not words.isdisjoint(("-h", "--help", "--help-all"))
    is_short = "--help-all" not in words and any(isinstance(p.default, Experiment) for p in parameters)
    text = inspect.cleandoc(command.__doc__ or "").partition("Args:")[0].rstrip()
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            bound: Any = tyro.cli(
                bind,
                args=["--help"] if wants_help else argv,
                prog=f"{prog} {operand}".rstrip(),
                description=f"{text}\n\nexample: {example}",
                config=[PositionalMetavarFromFieldName],
                registry=_common_options() if wants_help and is_short else None,
            )
    except SystemExit as e:
        if e.code in (0, None):
            if wants_help and is_short:
                show("These are the options that are changed most often; --help-all lists all of them.")
            raise
        raise UserError(_one_line(framed.getvalue(), prog)) from None
    values = signature.bind(*bound.args, **bound.keywords).arguments
    for p in parameters:
        if values[p.name] == "" and p.name != "prompt":
            raise UserError(f"{p.name} is empty: name one, or leave it out. See {prog} --help")
        check_value(f"--{p.name.replace('_', '-')}", values[p.name], p.annotation)
    return bound


def _common_options() -> ConstructorRegistry:
    """Return a registry in which tyro finds only the `COMMON` options. It parses no others, so it is for help only."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def suppress(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type not in COMMON or suppress in info.markers:
            return None
        # The marker makes this rule pass, so that tyro's rule for dataclasses answers.
        found = ConstructorRegistry.get_struct_spec(dataclasses.replace(info, markers=(*info.markers, suppress)))
        assert isinstance(found, StructConstructorSpec)
        fields = []
        for field in found.fields:
            kind: Any = field.type if field.name in COMMON[info.type].split() else Suppress[field.type]
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
