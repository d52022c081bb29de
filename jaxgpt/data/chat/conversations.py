"""Conversations: files of them, read and checked line by line, and their tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.data.chat.packing import Packing
from jaxgpt.data.chat.template import MARKS, ROLES, ChatTemplate, Message, Written, index_specials
from jaxgpt.data.pipeline import RowReader
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import parse_json, read_lines

LONGEST_LINE = 2**24  # bytes
SHAPE = 'needs {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def read_messages(path: str | Path) -> Iterator[tuple[str, list[Message]]]:
    """Yield ("FILE:LINE", messages) of every line of a .jsonl file; empty lines are none.

    Raises `UserError`, which names file and line, for what is no conversation or has nothing to learn from.
    """
    for where, raw in read_lines(path, LONGEST_LINE, "cut the conversation"):
        yield where, _messages(parse_json(raw, f"{where}: the line"), where)


def _messages(value: Any, where: str) -> list[Message]:
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        got = f"messages={short(messages)}" if isinstance(value, dict) and "messages" in value else short(value)
        raise UserError(f"{where}: got {got}, {SHAPE}")
    for number, message in enumerate(messages, 1):
        here = f"{where}: message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{here} is {short(message)}: needs a role, {', '.join(ROLES)}, and a content")
        if message["role"] not in ROLES:
            raise UserError(f"{here} has the role {short(message['role'])}: needs one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise UserError(f"{here} has the content {short(content)}: needs a text")
        # What would change what is learnt, and is not heeded: tool_calls, weight, name.
        other = [key for key, held in message.items() if key not in ("role", "content") and held is not None]
        if other:
            raise UserError(f"{here} has {short(other[0])}, which is not understood: leave only role and content")
        if bad := next((c for c in content if c in MARKS or "\ud800" <= c <= "\udfff"), None):
            raise UserError(f"{here} has U+{ord(bad):04X} in its content, which is no character: take it out")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{where}: none of its {len(messages)} messages is the assistant's: needs one to learn from")
    return [{"role": m["role"], "content": m["content"]} for m in messages]


def encode_all(
    path: str | Path, tokenizer: Tokenizer, template: ChatTemplate
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (ids, which of them the assistant is to write) of every conversation, up to the end of its last answer.

    Tokens after it are dropped. Raises `UserError` for what a template refuses.
    """
    for where, messages in read_messages(path):
        try:
            ids, answers = tokenise(template.write(messages), tokenizer)
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        if not answers.any():
            raise UserError(f"{where}: the chat template writes nothing of the assistant's: give another one")
        end = np.flatnonzero(answers)[-1] + 1
        yield ids[:end], answers[:end]


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


class Conversations:
    """Conversations as token ids, memory-mapped or in memory, of which each fits into a row of `block_size` inputs.

    A longer one ends after the last of its answers that fits; if none fits, it is left out.
    """

    def __init__(self, ids: np.ndarray, answers: np.ndarray, ends: np.ndarray, block_size: int):
        self._ids, self._answers, self.block_size = ids, answers, block_size
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        whole = np.array(ends) - starts
        lengths, sizes = self._fit(starts, whole)
        kept = (sizes > 0) & (sizes <= block_size)
        self.left_out, self.shortened = int((~kept).sum()), int((kept & (lengths < whole)).sum())
        self.starts, self.lengths, self.sizes = starts[kept], lengths[kept], sizes[kept]

    def _fit(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (how many tokens of each to read, how much room that takes in a row).

        n tokens have n - 1 inputs, each with its target, and none of another conversation.
        """
        lengths = lengths.copy()
        for n in np.flatnonzero(lengths > self.block_size + 1):
            # The one after the last is read too, to know whether an answer ends there.
            ahead = np.asarray(self._answers[starts[n] : starts[n] + self.block_size + 2], bool)
            last = np.flatnonzero(ahead[:-1] & ~ahead[1:])
            lengths[n] = last[-1] + 1 if len(last) else 0
        return lengths, lengths - 1

    @functools.cached_property
    def packing(self) -> Packing:
        """Return which of them share a row: the same in each epoch and at each validation, so it is computed once."""
        return Packing(self.sizes, self.block_size)

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of packed rows, with each conversation once an epoch: see `pipeline.Split`."""
        assert block_size == self.block_size, (block_size, self.block_size)
        members = self.packing.training_members(seed)
        return lambda n: self.row(members(n))

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return the number and the reader of packed rows: see `pipeline.Split`. Conversations are read whole."""
        assert block_size == stride == self.block_size and not prefix_length, (block_size, stride, prefix_length)
        members = self.packing.validation_members(max_tokens)
        empty = np.zeros(0, np.int64)
        return len(members), lambda n: self.row(members[n] if n < len(members) else empty)

    def __len__(self) -> int:
        """Count the tokens of all of them together."""
        return int(self.lengths.sum())

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, which of them the assistant is to write) of one conversation."""
        here = slice(self.starts[number], self.starts[number] + self.lengths[number])
        return self._ids[here], self._answers[here].astype(bool)

    def row(self, members: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T): the members in a row, numbered from 1, then padding."""
        inputs, targets, segments = (np.zeros(self.block_size, np.int32) for _ in range(3))
        mask, at = np.zeros(self.block_size, bool), 0
        for number, member in enumerate(members, 1):
            ids, answers = self.read(member)
            here = slice(at, at + len(ids) - 1)
            inputs[here], targets[here], mask[here], segments[here] = ids[:-1], ids[1:], answers[1:], number
            at += len(ids) - 1
        return inputs, targets, mask, segments
