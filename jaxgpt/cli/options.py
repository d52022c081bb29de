"""Options of the command line: the signature of a command is its options and its docstring their help, by tyro."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

from jaxgpt.config.validate import Count, check_value
from jaxgpt.errors import UserError

WeightsDtype = Literal["float32", "bfloat16", "float16"]
RunName = Annotated[Positional[str | None], arg(help="run directory; None: the newest under runs/")]
Json = Annotated[bool, arg(help="print JSON instead of text")]
Force = Annotated[bool, arg(help="write over files that are there")]
Average = Annotated[
    Count | None,
    arg(
        help="parameters are the mean of this many checkpoints, the last ones, of those that train.keep_last keeps; None: the best one"
    ),
]


def parse(command: Callable[..., None], argv: list[str], prog: str, **defaults: Any) -> Callable[[], None]:
    """Return a command with its options bound; tyro's framed messages become one line of a `UserError`.

    defaults: of this call, in place of those in the signature. A parameter annotated as Any is not an option.
    """

    @functools.wraps(command)
    def bind(*arguments: Any, **options: Any) -> functools.partial[None]:
        return functools.partial(command, *arguments, **options, **fixed)

    signature = inspect.signature(command, eval_str=True)
    given = [p.replace(default=defaults.get(p.name, p.default)) for p in signature.parameters.values()]
    fixed = {p.name: p.default for p in given if p.annotation is Any}
    parameters = [p for p in given if p.name not in fixed]
    vars(bind)["__signature__"] = signature.replace(parameters=parameters)
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            bound: Any = tyro.cli(bind, args=argv, prog=prog)
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise UserError(_one_line(framed.getvalue(), prog)) from None
    values = signature.bind(*bound.args, **bound.keywords).arguments
    for p in parameters:
        if values[p.name] == "" and p.name != "prompt":
            raise UserError(f"{p.name} is empty: name one, or leave it out. See {prog} --help")
        check_value(f"--{p.name.replace('_', '-')}", values[p.name], p.annotation)
    return bound


def _one_line(framed: str, prog: str) -> str:
    """Return the words of one of tyro's boxes, without frame, repeated help or pointer to the help."""
    words = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in framed.splitlines() if not re.match(r"^[╭╰]", line)]
    text = " ".join(w for w in words if w and not set(w) <= set("─"))
    text = re.split(r"For full helptext|Argument helptext:", text)[0].strip()
    text = re.sub(r"Perhaps you meant: (--[\w.-]+).*", r"Did you mean \1?", text)
    text = re.sub(r"^Error parsing (\S+): ", lambda m: "" if not m[1].startswith("-") else f"{m[1]}: ", text)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {prog} --help"
