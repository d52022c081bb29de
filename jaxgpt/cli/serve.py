"""`jaxgpt serve`."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
from typing import Annotated, Literal

from jaxgpt.cli.commands import open_run
from jaxgpt.cli.console import say
from jaxgpt.config.validate import Count, Interval, PositiveFloat
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes
from jaxgpt.sample import Precision

KEY = "JAXGPT_API_KEY"


def serve(
    run: str | None = None,
    *,
    average: Count | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000,
    slots: Annotated[int, Interval(ge=1, le=256)] = 8,
    reproducible: bool = False,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
    prefix_cache_mb: Annotated[int, Interval(ge=0, le=1_048_576)] = 256,
    api_key_file: str | None = None,
    no_key: bool = False,
    allowed_host: tuple[str, ...] = (),
    allowed_origin: tuple[str, ...] = (),
    model_name: tuple[str, ...] = (),
    any_model: bool = False,
    timeout: PositiveFloat = 300.0,
    log_prompts: bool = False,
    log_format: Literal["text", "json"] = "text",
) -> None:
    """Serve a run: OpenAI's interface, and a page.

    A host beyond this machine needs a key: in the environment variable JAXGPT_API_KEY, or in a file.

    Args:
        host: address to listen on. 127.0.0.1 means only this machine
        port: port to listen on. 0 means any that is free
        slots: completions that are generated together. Four times as many may wait
        reproducible: compute every row of the batch in each step, used or not, so that a request's bits do not depend on other requests
        prefix_cache_mb: memory in MB for keys and values of prompts, which later prompts with the same beginning reuse
        api_key_file: a file with the key that clients must send. None means JAXGPT_API_KEY, or no key if that is not set
        no_key: listen beyond this machine without a key
        allowed_host: a name by which clients may call the server, besides localhost and addresses
        allowed_origin: a web page's origin, such as http://localhost:3000, that may use the server. An asterisk means every page
        model_name: a name of the model, instead of the run directory's. Answers have the first
        any_model: answer requests for any model, for programs that ask for one of OpenAI's
        timeout: seconds after which a request ends
        log_prompts: print prompts and completions on stderr
        log_format: form of the lines on stderr, of which each request has one, without its texts
    """
    key = _read_key(api_key_file)
    if key is None and not no_key and not _is_this_machine(host):
        raise UserError(
            f"host {host} can be reached from other machines: set {KEY}, name a file with --api-key-file, or say --no-key"
        )
    needed = ("starlette", "uvicorn", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(f"jaxgpt serve needs {' and '.join(missing)}: python -m pip install 'jaxgpt[serve]'")
    loaded = open_run(run, average).for_decoding(weights, donate=True)
    from jaxgpt.serve import server

    listener = server.bind(host, port)
    log = server.make_log(say, log_format)
    app, compile_all = server.make_server(
        loaded,
        slots=slots,
        key=key,
        hosts=allowed_host,
        origins=allowed_origin,
        names=model_name,
        any_name=any_model,
        cache_dtype=cache_dtype,
        prefix_bytes=prefix_cache_mb * 1_000_000,
        timeout=timeout,
        reproducible=reproducible,
        log_prompts=log_prompts,
        log=log,
    )
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
