"""Serve a run over HTTP. This file has the options, which need no server's packages."""

import dataclasses
from typing import Annotated, Literal

from jaxgpt.config.serialize import Checked
from jaxgpt.config.validate import Interval, PositiveFloat
from jaxgpt.sample import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions(Checked):
    """How a run is served."""

    host: str = "127.0.0.1"  # address to listen on. 127.0.0.1 means only this machine
    port: Annotated[int, Interval(ge=0, le=65535)] = 8000  # port to listen on. 0 means any that is free
    # completions that are generated together. Four times as many may wait
    slots: Annotated[int, Interval(ge=1, le=256)] = 8
    # compute every row of the batch in each step, used or not, so that a request's bits do not depend on other requests
    reproducible: bool = False
    cache_dtype: Precision | None = None  # dtype of keys and values. None means the model's
    # memory in MB for keys and values of prompts, which later prompts with the same beginning reuse
    prefix_cache_mb: Annotated[int, Interval(ge=0, le=1_048_576)] = 256
    # a file with the key that clients must send. None means JAXGPT_API_KEY, or no key if that is not set
    api_key_file: str | None = None
    no_key: bool = False  # listen beyond this machine without a key
    allowed_host: tuple[str, ...] = ()  # names by which clients may call the server, besides localhost and addresses
    # origins of web pages, such as http://localhost:3000, that may use the server. An asterisk means every page
    allowed_origin: tuple[str, ...] = ()
    model_name: tuple[str, ...] = ()  # by default the run directory. Answers have the first
    any_model: bool = False  # answer requests for any model, such as one of OpenAI
    timeout: PositiveFloat = 300.0  # seconds after which a request ends
    log_prompts: bool = False  # print prompts and completions on stderr
    # form of the lines on stderr, of which each request has one, without its texts
    log_format: Literal["text", "json"] = "text"
