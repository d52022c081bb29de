"""Chat templates in Jinja, as Hugging Face's tokenizers have them: programs of somebody else's, run in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

from jaxgpt.errors import UserError

LONGEST_TEXT = 2**24  # characters that a template may write
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around what {% generation %} holds: noncharacters, which no text has
# A template that asks for today's date would give the same conversations other tokens tomorrow.
TODAY = datetime.date(2025, 1, 1)


def compile_template(source: str) -> Callable[..., str]:
    """A function (**variables) -> text, with OPEN and CLOSE around the parts in {% generation %} tags.

    Whitespace, filters and functions are those of transformers' `apply_chat_template`, but `strftime_now` tells TODAY.
    The program reads its variables and nothing else: no attribute whose name begins with _, no file, no import. The
    text, each loop over `range`, powers and products are bounded; loops inside loops are not, so it may yet take long.
    Raises `UserError` for what is no template, here, and where it fails or refuses what it is given, there.
    """
    jinja2 = _jinja2()
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if not all(isinstance(x, int | float) and abs(x) < 2**32 for x in (left, right)) or operator == "**":
                raise jinja2.TemplateError(f"{operator} is for numbers of usual size alone, and ** for none")
            return left * right

    class Namespace(jinja2.utils.Namespace):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            for name, value in dict(*args, **kwargs).items():
                self[name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise jinja2.TemplateError(f"namespaces hold no {name!r}: names do not begin with _")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = tojson
    known: dict[str, Any] = {
        "range": environment.globals["range"],
        "dict": lambda **items: items,
        "namespace": Namespace,
        "raise_exception": raise_exception,
        "strftime_now": TODAY.strftime,
    }
    environment.globals.clear()
    environment.globals.update(known)
    try:
        template = environment.from_string(source)
    except Exception as e:  # Jinja's own, and Python's for what it was translated into
        line = getattr(e, "lineno", None)
        raise UserError(
            f"the chat template is no Jinja template{f', line {line}' if line else ''}: {str(e)[:300]}. Repair it, or give another"
        ) from None

    def render(**variables: Any) -> str:
        text, length = [], 0
        try:
            for piece in template.generate(**variables):
                text.append(piece)
                length += len(piece)
                if length > LONGEST_TEXT:
                    raise UserError(
                        f"the chat template writes more than {LONGEST_TEXT:,} characters: it cannot be used"
                    )
        except UserError:
            raise
        except Exception as e:  # a program of somebody else's: of any kind
            said = str(e)[:300].rstrip(".") or type(e).__name__
            raise UserError(
                f"the chat template refuses it: {said}. Repair the conversation, or give another tokenizer"
            ) from None
        return "".join(text)

    return render


def _jinja2() -> Any:
    try:
        import jinja2
        import jinja2.utils
    except ImportError:
        raise UserError("this tokenizer's chat template needs jinja2: python -m pip install 'jaxgpt[chat]'") from None
    return jinja2
