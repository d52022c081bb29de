"""`jaxgpt sample`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

from jaxgpt.cli.console import say
from jaxgpt.config.validate import Count, Size
from jaxgpt.data.tokenizer import find_start_token
from jaxgpt.errors import UserError
from jaxgpt.files import Result, read_json
from jaxgpt.run import load
from jaxgpt.sample import MAX_NEW_TOKENS, Precision, Sampling

LARGEST_SCHEMA = 2**20  # bytes


def sample(
    run: str | None = None,
    *,
    average: Count | None = None,
    prompt: str = "",
    chat: bool = False,
    max_new_tokens: Size = MAX_NEW_TOKENS,
    num_samples: Count = 1,
    sampling: Sampling = Sampling(),  # noqa: B008, it is frozen
    stop: tuple[str, ...] = (),
    schema: str | None = None,
    regex: str | None = None,
    choice: tuple[str, ...] = (),
    seed: int = 0,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
    slots: Count | None = None,
    stream: bool = True,
    json: bool = False,
) -> Result | None:
    """Generate text from a trained run.

    Args:
        prompt: text to continue. An empty one means the end-of-text token or a newline
        chat: treat the prompt as a user's turn and print only the assistant's reply. Without a prompt, standard input is
            the turn
        max_new_tokens: tokens to generate
        num_samples: completions to generate
        sampling: how to draw the next token
        stop: end before this text
        schema: a file with a JSON schema that the text must match. None means any text
        regex: an expression, in Rust's syntax, that the whole text must match. None means any text
        choice: a text that it may be. Give the option for each
        seed: the same seed gives the same text
        slots: samples to generate together. A server's number gives the same bits as the server. None means all
        stream: on a terminal, show the text as it is generated
    """
    if chat and not prompt:
        typed = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
        prompt = typed.decode(errors="surrogateescape").removesuffix("\n")
        if not prompt.strip():
            raise UserError("--chat has no prompt: give --prompt TEXT, or write the user's turn to standard input")
    model = load(run, average=average).for_decoding(weights, donate=True)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "chat": chat}
    options |= {"cache_dtype": cache_dtype, "slots": slots, "regex": regex, "choices": choice or None, **vars(sampling)}
    options["schema"] = read_json(Path(schema), LARGEST_SCHEMA) if schema else None
    if not (chat or prompt):
        say(f"no prompt: starting from {find_start_token(model.tokenizer)[1]}")
    start = "" if chat else prompt
    if stream and sys.stdout.isatty() and not json and num_samples == 1:
        for piece in itertools.chain([start], model.stream(prompt, **options), ["\n"]):
            print(piece, end="", flush=True)
        return None
    texts = model.sample([prompt] * num_samples, **options)
    found = [{"prompt": prompt, "text": text} for text in texts]
    return Result(found, "\n----------------------------------------\n".join(start + text for text in texts))
