"""Before JAX computes: what the environment says about it, checked, because XLA ends the process where it is wrong."""

from __future__ import annotations

import logging
import os
import re
import warnings

from jaxgpt.errors import UserError


def configure_jax(*, computes: bool = True) -> None:
    """Import JAX and set it up for a command; no device is touched, which other processes may have to agree on first.

    computes: programs will run, step after step; False: arrays are only read and written, in the host's memory, which
        may hold what no device does.
    Raises `UserError` for settings in the environment that it cannot use.
    """
    count = os.environ.get("JAX_NUM_CPU_DEVICES")
    if count is not None and not re.fullmatch(r"[1-9][0-9]{0,3}", count, re.ASCII):
        raise UserError(
            f"JAX_NUM_CPU_DEVICES={count!r}: needs a whole number of devices from 1 to 9999, or to be unset"
        )
    if not computes:
        os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        from jaxgpt.parallel.device import enable_compilation_cache, keep_freed_memory, return_freed_memory
    except ValueError as e:  # an environment variable of jax's that it cannot parse
        raise UserError(
            f"jax cannot be imported: {e}. Look at the environment variables that begin with JAX_"
        ) from None
    _try_flags()
    for name in ("absl", "asyncio"):  # Orbax tells every save in a dozen lines, and a failed one in a hundred
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if computes:
        keep_freed_memory()
    else:
        return_freed_memory()
    enable_compilation_cache()


def _try_flags() -> None:
    """XLA ends the process at a flag that it does not know, with a page of those it does: let a fork of it try them."""
    flags = os.environ.get("XLA_FLAGS")
    if not flags or not hasattr(os, "fork"):
        return
    from jaxlib import _jax

    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the fork does without
        child = os.fork()
    if not child:
        os.dup2(write, 2)
        _jax.CompileOptions()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        said = told.read().decode("utf-8", "replace")
    if os.waitpid(child, 0)[1]:
        first = re.sub(r"^.*?\] ", "", said.splitlines()[0]) if said else "XLA ended"
        raise UserError(f"XLA_FLAGS={flags!r} will not do: {first}. Correct it, or unset it.")
