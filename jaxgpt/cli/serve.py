"""`jaxgpt serve`."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction

from jaxgpt.cli.console import say
from jaxgpt.config import Precision
from jaxgpt.config.validate import Count, Interval, PositiveFloat
from jaxgpt.errors import UserError
from jaxgpt.files import read_bytes
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import find_run

KEY = "JAXGPT_API_KEY"


def serve(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000,
    slots: Annotated[int, Interval(ge=1, le=256)] = 8,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
    prefix_cache_mb: Annotated[int, Interval(ge=0, le=2**20)] = 256,
    api_key_file: str | None = None,
    no_key: FlagCreatePairsOff[bool] = False,
    allowed_host: UseAppendAction[tuple[str, ...]] = (),
    timeout: PositiveFloat = 300.0,
    log_prompts: bool = False,
) -> None:
    """Serve a run: OpenAI's interface, and a page.

    A host beyond this machine needs a key: in the environment variable JAXGPT_API_KEY, or in a file.

    Args:
        run: run directory; None: the newest under runs/
        average: average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint
        host: address to listen on; 127.0.0.1: this machine alone
        port: port to listen on; 0: any that is free
        slots: completions that are generated together; four times as many may wait
        weights: dtype of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
        cache_dtype: dtype of keys and values; None: the model's
        prefix_cache_mb: memory in MB for keys and values of prompts, which later prompts with the same beginning reuse
        api_key_file: a file with the key that clients must send; None: JAXGPT_API_KEY, or no key if that is not set
        no_key: listen beyond this machine without a key
        allowed_host: a name by which clients may call the server, beside localhost and addresses
        timeout: seconds after which a request ends
        log_prompts: print prompts and completions on stderr
    """
    find_run(run)
    key = _read_key(api_key_file)
    if key is None and not no_key and not _is_this_machine(host):
        raise UserError(
            f"host {host} can be reached from other machines: set {KEY}, name a file with --api-key-file, or say --no-key"
        )
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"jaxgpt serve needs {' and '.join(missing)}: python -m pip install 'jaxgpt[serve]'")
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.serve.server import Options, serve

    options = Options(
        host=host,
        port=port,
        slots=slots,
        key=key,
        hosts=allowed_host,
        cache_dtype=cache_dtype,
        prefix_bytes=prefix_cache_mb * 10**6,
        timeout=timeout,
    )
    serve(load(run, average=average).for_decoding(weights), options, say=say, log=say if log_prompts else None)


def _read_key(path: str | None) -> str | None:
    """Return the key that clients must send, or None."""
    if path is None:
        key = os.environ.get(KEY)
        where = KEY
    else:
        key, where = read_bytes(path, 4096).decode("utf-8", errors="replace").strip(), path
    if key is None:
        return None
    if not (len(key) >= 16 and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(f"the key in {where} has {len(key)} characters: needs at least 16, printable ASCII, no spaces")
    return key


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
