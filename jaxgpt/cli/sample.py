"""`jaxgpt sample`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional, UseAppendAction

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.config import MAX_NEW_TOKENS, Precision
from jaxgpt.config.validate import Count, Size
from jaxgpt.files import render_json
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.find import find_run

if TYPE_CHECKING:
    from jaxgpt.run import Run


def sample(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    prompt: str = "",
    chat: bool = False,
    max_new_tokens: Size = MAX_NEW_TOKENS,
    num_samples: Count = 1,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    greedy: bool = False,
    stop: UseAppendAction[tuple[str, ...]] = (),
    seed: int = 0,
    beams: Count | None = None,
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
        prompt: text to continue, or the source of a pair; empty: start from the end-of-text token or a newline
        chat: treat the prompt as a user's turn and print only the assistant's reply
        max_new_tokens: tokens to generate
        num_samples: completions to generate
        temperature: below 1 is safer, above 1 bolder, 0 greedy; None: the experiment's
        top_k: draw from the k most likely tokens; None: from all
        top_p: nucleus sampling: draw from the smallest set of tokens with this much probability; None: from all
        min_p: draw from tokens at least this likely relative to the most likely; None: from all
        repetition_penalty: above 1, tokens that are in the text already become less likely; None: no penalty
        greedy: always take the most likely token
        stop: end before this text
        seed: the same seed gives the same text
        beams: width of a beam search; None: draw tokens instead
        draft: run directory of a smaller model with the same tokenizer, for speculative decoding; None: without it
        weights: dtype of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
        cache_dtype: dtype of keys and values; None: the model's
        slots: samples to generate together; as many as a server has give its bits; None: all
        stream: on a terminal, show the text as it is generated
        json: print JSON instead of text
    """
    filters: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters |= {"repetition_penalty": repetition_penalty, "greedy": greedy}
    options = filters | {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "cache_dtype": cache_dtype}
    options |= {"slots": slots, "chat": chat}
    model, options["draft"] = _load(run, draft, average, weights, filters)
    start = _start(model, prompt, chat)
    if stream and sys.stdout.isatty() and not (json or beams) and num_samples == 1:
        for piece in itertools.chain([start], model.stream(prompt, **options), ["\n"]):
            print(piece, end="", flush=True)
    else:
        print(_render(model.sample([prompt] * num_samples, beams=beams, **options), prompt, start, as_json=json))


def _render(texts: Iterable[str], prompt: str, start: str, *, as_json: bool) -> str:
    if not as_json:
        return f"\n{'-' * 40}\n".join(start + text for text in texts)
    return render_json([{"prompt": prompt, "text": text} for text in texts], ensure_ascii=not stdout_is_unicode())


def _load(
    name: str | None, draft: str | None, average: int | None, weights: Precision | None, filters: dict[str, Any]
) -> tuple[Run, Run | None]:
    """Check the options; return the run and its draft, ready to decode."""
    find_run(name)  # before jax is imported
    if draft:
        find_run(draft)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.sample import Sampling

    Sampling(**{name: value for name, value in filters.items() if value is not None})  # before the weights are read
    return load(name, average=average).for_decoding(weights), load(draft).for_decoding(weights) if draft else None


def _start(run: Run, prompt: str, chat: bool) -> str:
    """Return the prompt if the completion continues it; print where the completion starts if it is empty."""
    from jaxgpt.data.tokenizer import find_start_token

    if chat or run.experiment.data.is_pairs:
        return ""
    if not prompt:
        say(f"no prompt: starting from {find_start_token(run.tokenizer)[1]}")
    return prompt
