"""`jaxgpt serve`."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re

from jaxgpt.cli.console import say
from jaxgpt.config.validate import Count
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes
from jaxgpt.run import load
from jaxgpt.sample import Precision
from jaxgpt.serve import ServeOptions

KEY = "JAXGPT_API_KEY"


def serve(
    run: str | None = None,
    *,
    average: Count | None = None,
    weights: Precision | None = None,
    options: ServeOptions = ServeOptions(),  # noqa: B008, it is frozen
) -> None:
    """Serve a run: OpenAI's interface, and a page.

    A host beyond this machine needs a key: in the environment variable JAXGPT_API_KEY, or in a file.
    """
    key = _read_key(options.api_key_file)
    if key is None and not options.no_key and not _is_this_machine(options.host):
        remedy = f"set {KEY}, name a file with --api-key-file, or say --no-key"
        raise UserError(f"host {options.host} can be reached from other machines: {remedy}")
    needed = ("starlette", "uvicorn", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(f"jaxgpt serve needs {' and '.join(missing)}: python -m pip install 'jaxgpt[serve]'")
    loaded = load(run, average=average).for_decoding(weights, donate=True)
    from jaxgpt.serve import server

    listener = server.bind(options.host, options.port)
    log = server.make_log(say, options.log_format)
    app, compile_all = server.make_server(loaded, options, key=key, log=log)
    server.serve(app, compile_all, listener, log)


def _read_key(path: str | None) -> str | None:
    """Return the key that clients must send, or None."""
    key = read_bytes(path, 4096).decode("utf-8", errors="replace").strip() if path else os.environ.get(KEY)
    if key is not None and not re.fullmatch("[!-~]{16,}", key):
        raise UserError(f"the key in {path or KEY} has {len(key)} characters: needs at least 16, ASCII without spaces")
    return key


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
