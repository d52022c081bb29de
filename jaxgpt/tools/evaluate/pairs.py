"""How many of the held-out pairs a run translates exactly."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxgpt.config.validate import check_count
from jaxgpt.data.chat.conversations import Conversations
from jaxgpt.data.pairs import Pairs
from jaxgpt.run import Run
from jaxgpt.sample.beam import beam_search
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import generate

BATCH = 256  # pairs that are written together


def count_exact_matches(
    run: Run, pairs: Conversations, *, beams: int | None = None, batch_size: int = BATCH
) -> dict[str, Any]:
    """Whether the likeliest text that the run writes for each source is its target, token for token.

    beams: how many a search keeps; None: greedy. Returns exact (the share), its standard error, pairs (how many), and
    missed: up to five of the others, as (source, target, written).
    """
    tokenizer, batch_size = run.tokenizer, check_count("batch_size", batch_size)
    right, missed = 0, []
    # By their length, so that those that are written together end together.
    order = np.argsort(pairs.lengths, kind="stable")
    for first in range(0, len(order), batch_size):
        given = [_parts(pairs, int(n)) for n in order[first : first + batch_size]]
        sources, prompts, targets = zip(*given, strict=True)
        how: dict[str, Any] = {
            "stop_tokens": [int(targets[0][-1])],
            "vocab_size": tokenizer.vocab_size,
            "sources": sources if isinstance(pairs, Pairs) else None,
        }
        if beams is None:
            # As many as the longest target has with its end, which has to be written too.
            most, greedy = max(map(len, targets)), Sampling(greedy=True)
            written = generate(
                *run.decoder, prompts, key=jax.random.key(0), max_new_tokens=most, sampling=greedy, **how
            ).tokens
        else:
            # As many as fit, since what a search finds may depend on where it ends.
            most = run.model.config.block_size
            found = beam_search(*run.decoder, prompts, beams=beams, max_new_tokens=most, **how)
            written = [texts[0] for texts in found.tokens]
        for source, target, text in zip(sources, targets, written, strict=True):
            same = text == target[:-1]
            right += same
            if not same and len(missed) < 5:
                source, *others = (tokenizer.decode(ids) for ids in (source, target[:-1], text))
                missed.append([source.removeprefix(tokenizer.decode(tokenizer.prefix)), *others])
    share = right / len(order)
    return {
        "exact": share,
        "exact_error": (share * (1 - share) / len(order)) ** 0.5,
        "pairs": len(order),
        "missed": missed,
    }


def _parts(pairs: Conversations, number: int) -> tuple[list[int], list[int], list[int]]:
    """(source, what is to be continued, what is to be written, with its end)."""
    ids, answers = pairs.read(number)
    start = int(np.argmax(answers))
    source, prompt, target = ids[: start - 1].tolist(), ids[:start].tolist(), ids[start:].tolist()
    return source, prompt[-1:] if isinstance(pairs, Pairs) else prompt, target
