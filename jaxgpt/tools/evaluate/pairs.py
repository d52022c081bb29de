"""Count the held-out pairs that a run translates exactly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxgpt.config.validate import check_count
from jaxgpt.data.chat.conversations import Conversations
from jaxgpt.data.pairs import Pairs
from jaxgpt.run import Run
from jaxgpt.sample.beam import beam_search
from jaxgpt.sample.decoding import Decoding
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate

PAIRS_AT_ONCE = 256  # pairs that are decoded together


def count_exact_matches(
    run: Run, pairs: Conversations, *, beams: int | None = None, batch_size: int = PAIRS_AT_ONCE
) -> dict[str, Any]:
    """Count the sources whose most probable completion by the run is their target, token for token.

    beams: the width of a beam search; None means greedy decoding. Returns exact (the fraction), its standard error,
    pairs (how many), and missed: up to five of the others, as (source, target, completion).
    """
    tokenizer, batch_size = run.tokenizer, check_count("batch_size", batch_size)
    right, missed = 0, []
    # By length, so that the pairs of a batch end together.
    order = np.argsort(pairs.lengths, kind="stable")
    for first in range(0, len(order), batch_size):
        parts = [_parts(pairs, int(n)) for n in order[first : first + batch_size]]
        sources, prompts, targets = zip(*parts, strict=True)
        stop_tokens, encoder_inputs = [int(targets[0][-1])], sources if isinstance(pairs, Pairs) else None
        if beams is None:
            # As many as the longest target has with its end, which has to be generated too.
            completions = generate(
                *run.decode_params,
                prompts,
                key=jax.random.key(0),
                max_new_tokens=max(map(len, targets)),
                sampling=Sampling(greedy=True),
                stop_tokens=stop_tokens,
                vocab_size=tokenizer.vocab_size,
                sources=encoder_inputs,
            ).tokens
        else:
            # As many as fit, since what a search finds may depend on where it ends.
            most = run.model.config.block_size
            decoding = Decoding(max_new_tokens=most, stop_tokens=stop_tokens, vocab_size=tokenizer.vocab_size)
            found = beam_search(*run.decode_params, prompts, decoding, beams=beams, sources=encoder_inputs)
            completions = [best for best, *_ in found.tokens]
        for source, target, completion in zip(sources, targets, completions, strict=True):
            is_exact = completion == target[:-1]
            right += is_exact
            if not is_exact and len(missed) < 5:
                source, *others = (tokenizer.decode(ids) for ids in (source, target[:-1], completion))
                missed.append([source.removeprefix(tokenizer.decode(tokenizer.prefix)), *others])
    share = right / len(order)
    return {
        "exact": share,
        "exact_error": (share * (1 - share) / len(order)) ** 0.5,
        "pairs": len(order),
        "missed": missed,
    }


def _parts(pairs: Conversations, number: int) -> tuple[list[int], list[int], list[int]]:
    """Return (source, prompt, target with its end)."""
    ids, answers = pairs.read(number)
    start = int(np.argmax(answers))
    source, prompt, target = ids[: start - 1].tolist(), ids[:start].tolist(), ids[start:].tolist()
    return source, prompt[-1:] if isinstance(pairs, Pairs) else prompt, target
