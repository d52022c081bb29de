"""Render chat templates in Jinja: a program of its own, which `template.py` starts and ends.

Templates are untrusted programs. Jinja's sandbox keeps them from files and imports, but a single call in C, such as
`7 ** 100000000`, can take hours or all memory, and no other thread can end it. So the limit of time is the end of this
process, by an alarm that nothing handles, and the limit of memory is the process's own.

Each line of standard input is a request in JSON, `[source, variables, seconds]`, and gets a line of JSON: `{"text": ...}`,
with OPEN and CLOSE around {% generation %} blocks, or `{"error": ...}`.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters, which contents must not contain
LONGEST_TEXT = 2**24  # characters that a template may write
MEMORY = 2**30  # bytes of address space
# A fixed date for templates: with the current one, the same conversations would give other tokens tomorrow.
TODAY = datetime.date(2025, 1, 1)


def make_environment() -> Any:
    """Return Jinja's sandbox with whitespace, filters and functions as in transformers' `apply_chat_template`."""
    import jinja2
    from jinja2 import ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [Generation, ext.LoopControlExtension]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals = {
        "dict": lambda **items: items,
        "namespace": environment.globals["namespace"],
        "raise_exception": raise_exception,
        "range": environment.globals["range"],
        "strftime_now": TODAY.strftime,
    }
    return environment


def answer(compile_source: Callable[[str], Any], source: str, variables: dict[str, Any]) -> dict[str, str]:
    """Return the answer to a request. An untrusted program may raise anything."""
    try:
        template = compile_source(source)
    except Exception as e:
        line = f", line {e.lineno}" if getattr(e, "lineno", None) else ""
        return {"error": f"is not a Jinja template{line}: {str(e)[:300]}. Repair it, or give another"}
    text = io.StringIO()
    try:
        for piece in template.generate(**variables):
            text.write(piece)
            if text.tell() > LONGEST_TEXT:
                return {"error": f"writes more than {LONGEST_TEXT:,} characters: it cannot be used"}
    except Exception as e:
        why = str(e)[:300].rstrip(".") or type(e).__name__
        return {"error": f"rejects the conversation: {why}. Repair it, or give another tokenizer"}
    return {"text": text.getvalue()}


def main() -> None:
    """Answer requests until standard input ends."""
    import resource  # Windows has none

    compile_source = functools.lru_cache(maxsize=8)(make_environment().from_string)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # whatever the parent did with it
    for source, variables, seconds in map(json.loads, sys.stdin):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        answered = answer(compile_source, source, variables)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(answered) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
