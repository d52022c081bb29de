"""`jaxgpt sample`."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from tyro.conf import OmitArgPrefixes, Positional, UseAppendAction

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.config import MAX_NEW_TOKENS, Precision
from jaxgpt.config.validate import Count, Size
from jaxgpt.files import render_json
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import find_run
from jaxgpt.sample import Sampling


def sample(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    prompt: str = "",
    chat: bool = False,
    max_new_tokens: Size = MAX_NEW_TOKENS,
    num_samples: Count = 1,
    sampling: OmitArgPrefixes[Sampling] = Sampling(),  # noqa: B008, it is frozen
    stop: UseAppendAction[tuple[str, ...]] = (),
    seed: int = 0,
    draft: str | None = None,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
    slots: Count | None = None,
    stream: bool = True,
    json: bool = False,
) -> None:
    """Generate text from a trained run.

    Args:
        run: run directory; None: the newest under runs/
        average: average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint
        prompt: text to continue; empty: start from the end-of-text token or a newline
        chat: treat the prompt as a user's turn and print only the assistant's reply
        max_new_tokens: tokens to generate
        num_samples: completions to generate
        sampling: how to draw the next token
        stop: end before this text
        seed: the same seed gives the same text
        draft: run directory of a smaller model with the same tokenizer, for speculative decoding; None: without it
        weights: dtype of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
        cache_dtype: dtype of keys and values; None: the model's
        slots: samples to generate together; as many as a server has give its bits; None: all
        stream: on a terminal, show the text as it is generated
        json: print JSON instead of text
    """
    for name in (run, *([draft] if draft else [])):
        find_run(name)  # before jax is imported
    configure_jax()
    from jaxgpt.data.tokenizer import find_start_token
    from jaxgpt.run import load

    model = load(run, average=average).for_decoding(weights)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "chat": chat}
    options |= {"cache_dtype": cache_dtype, "slots": slots, **vars(sampling)}
    options["draft"] = load(draft).for_decoding(weights) if draft else None
    if not (chat or prompt):
        say(f"no prompt: starting from {find_start_token(model.tokenizer)[1]}")
    start = "" if chat else prompt
    if stream and sys.stdout.isatty() and not json and num_samples == 1:
        for piece in itertools.chain([start], model.stream(prompt, **options), ["\n"]):
            print(piece, end="", flush=True)
        return
    texts = model.sample([prompt] * num_samples, **options)
    if json:
        found = [{"prompt": prompt, "text": text} for text in texts]
        print(render_json(found, ensure_ascii=not stdout_is_unicode()))
    else:
        print(f"\n{'-' * 40}\n".join(start + text for text in texts))
