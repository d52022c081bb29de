"""`jaxgpt sample`."""

from __future__ import annotations

import sys
from typing import Any

from tyro.conf import UseAppendAction

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.cli.options import Average, Json, RunName
from jaxgpt.config import MAX_NEW_TOKENS, Precision
from jaxgpt.config.validate import Count, Size
from jaxgpt.files import render_json
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.find import find_run


def sample(
    run: RunName = None,
    *,
    average: Average = None,
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
    stream: bool = True,
    json: Json = False,
) -> None:
    """Continue a prompt from a trained run; from one trained on pairs, write the target of a source.

    Args:
        prompt: what to continue; empty: from the end-of-text token, or a newline
        chat: treat the prompt as a user's turn and print only the assistant's reply
        max_new_tokens: tokens to generate
        num_samples: completions to generate
        temperature: below 1 safer, above 1 bolder, 0 greedy; None: the experiment's
        top_k: draw from the k most likely tokens
        top_p: nucleus sampling: draw from the smallest set of tokens with this much probability
        min_p: draw from tokens at least this likely relative to the most likely
        repetition_penalty: above 1, tokens that the text already has become less likely
        greedy: always take the most likely token
        stop: end before this text; may be given several times
        seed: the same seed gives the same text
        beams: instead of drawing, beam search of this width
        draft: run directory of a smaller model with the same tokenizer, for speculative decoding
        weights: dtype of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
        cache_dtype: dtype of keys and values; None: the model's
        stream: on a terminal, show the text as it is generated
    """
    for name in (run, *([draft] if draft else [])):
        find_run(name)  # before jax is imported: a wrong path answers at once
    configure_jax()
    from jaxgpt.data.tokenizer import find_start_token
    from jaxgpt.run import load
    from jaxgpt.sample.filters import Sampling

    filters: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty}
    given = {name: value for name, value in filters.items() if value is not None} | {"greedy": greedy}
    if temperature is not None:
        given["temperature"] = temperature
    Sampling(**given)  # a mistake answers before the weights are read
    model = load(run, average=average).for_decoding(weights)
    is_apart = chat or model.experiment.data.is_pairs  # the prompt is not a part of the text
    if not prompt and not is_apart:
        say(f"no prompt: starting from {find_start_token(model.tokenizer)[1]}")
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "chat": chat, **given}
    options |= {"cache_dtype": cache_dtype, "draft": load(draft).for_decoding(weights) if draft else None}
    shown = "" if is_apart else prompt
    if stream and sys.stdout.isatty() and not (json or beams) and num_samples == 1:
        print(shown, end="", flush=True)
        for piece in model.stream(prompt, **options):
            print(piece, end="", flush=True)
        print()
        return
    texts = model.sample([prompt] * num_samples, beams=beams, **options)
    if json:
        samples = [{"prompt": prompt, "text": text} for text in texts]
        print(render_json(samples, ensure_ascii=not stdout_is_unicode()))
    else:
        print(f"\n{'-' * 40}\n".join(shown + text for text in texts))
