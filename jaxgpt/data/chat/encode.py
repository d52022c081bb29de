"""Conversations as tokens: ids, and which of them the assistant is to write."""

from __future__ import annotations

import numpy as np

from jaxgpt.data.chat.template import ChatTemplate, Written, index_specials
from jaxgpt.data.tokenizer import Tokenizer


def tokenise(written: Written, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return (ids, which of them the assistant is to write: bool). Only the template's special tokens become such ids.

    The text is encoded at once, as transformers does. If a content spells a special token out, which would be read
    as one, the text between the template's own is encoded piece by piece.
    """
    ids, at = tokenizer.locate(written.text, specials=True)
    specials = index_specials(tokenizer)
    own, forged = [], False
    for n in np.flatnonzero(np.isin(ids, list(specials))):
        start, end = at[n]
        start += max(written.text[start:end].find(specials[int(ids[n])]), 0)  # after spaces that it may take in
        end = start + len(specials[int(ids[n])])
        if any(a < end and start < b for a, b in written.contents):
            forged = True
        else:
            own.append(n)
    if forged:
        ids, at = _encode_between(written.text, ids[own], at[own], tokenizer)
    answers = np.zeros(len(ids), bool)
    for a, b in written.answers:
        touching = np.flatnonzero((at[:, 0] < b) & (at[:, 1] > a))
        if len(touching):
            answers[touching[0] : touching[-1] + 1] = True
    return ids, answers


def encode_prompt(template: ChatTemplate, tokenizer: Tokenizer, message: str) -> list[int]:
    """Return the ids of a user's message, up to where the assistant begins to write."""
    return tokenise(template.write([{"role": "user", "content": message}], prompt=True), tokenizer)[0].tolist()


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int:
    """Return the token that ends an answer: the last special one that the assistant writes, or else the last."""
    # One character, that every tokenizer of conversations knows: it is in the templates themselves.
    written = template.write([{"role": role, "content": "s"} for role in ("user", "assistant")])
    ids, answers = tokenise(written, tokenizer)
    known = [i for i in ids[answers].tolist() if i in index_specials(tokenizer)]
    return known[-1] if known else int(ids[answers][-1])


def _encode_between(text: str, ids: np.ndarray, at: np.ndarray, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Encode a text with these special tokens where they are, and none elsewhere."""
    all_ids, all_at, begin = [], [], 0
    for special, (start, end) in zip([*ids, None], [*at, (len(text), len(text))], strict=True):
        between, where = tokenizer.locate(text[begin:start], specials=False)
        all_ids.append(between)
        all_at.append(where + begin)
        if special is not None:
            all_ids.append(np.array([special], np.int32))
            all_at.append(np.array([[start, end]]))
        begin = end
    return np.concatenate(all_ids), np.concatenate(all_at)
