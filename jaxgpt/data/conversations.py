"""Read conversations line by line, validate and encode them, and pack them into rows of one length without a cut."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.data.corpus import parse_line
from jaxgpt.data.pipeline import RowReader, Split, pick_evenly
from jaxgpt.data.template import ETX, ChatTemplate, Written, check_message, index_specials, match_specials
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tools import Message, Tool, check_tools
from jaxgpt.errors import UserError
from jaxgpt.files import read_lines

Marked = tuple[np.ndarray, np.ndarray]  #: ids, and True for what the assistant has written
LONGEST_LINE = 2**24  # bytes
SHAPE = 'needs {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def read_messages(path: str | Path) -> Iterator[tuple[str, list[Message], tuple[Tool, ...]]]:
    """Yield ("FILE:LINE", messages, tools) for the lines of a .jsonl file that are not blank.

    Raises `UserError`, with file and line, for a line that is not a conversation or has no message of the assistant.
    """
    for where, raw in read_lines(path, LONGEST_LINE, "cut the conversation"):
        value = parse_line(raw, f"{where}: the line")
        messages = _messages(value, where)
        yield where, messages, check_tools(value.get("tools"), f"{where}: tools")


def find_validation_prompt(path: str, val_fraction: float) -> str:
    """Return what the user says first in the validation split of a file of conversations, or an empty text."""
    count = sum(1 for _ in read_lines(path, LONGEST_LINE, "cut the conversation"))
    lines = read_lines(path, LONGEST_LINE, "cut the conversation")
    where, raw = next(itertools.islice(lines, int(count * (1.0 - val_fraction)), None))
    messages = _messages(parse_line(raw, where), where)
    return next((message["content"] for message in messages if message["role"] == "user"), "")


def _messages(value: Any, where: str) -> list[Message]:
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: got {short(value)}, {SHAPE}")
    checked = [check_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]
    if not any(message["role"] == "assistant" and "weight" not in message for message in checked):
        raise UserError(f"{where}: none of its {len(checked)} messages is an answer to learn from: give one")
    return checked


def encode_all(path: str | Path, tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Marked]:
    """Yield the tokens of each conversation, up to its last answer.

    Raises `UserError` for a conversation that the template rejects. A warning says if nothing that is learnt ends a turn.
    """
    find_end_of_turn(template, tokenizer)
    for where, messages, tools in read_messages(path):
        try:
            ids, answers = tokenise(_drop_unlearnt(template.write(messages, tools=tools), messages), tokenizer)
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        if not answers.any():
            raise UserError(f"{where}: the chat template writes no text of the assistant: give another one")
        end = np.flatnonzero(answers)[-1] + 1
        yield ids[:end], answers[:end]


def _drop_unlearnt(written: Written, messages: Sequence[Message]) -> Written:
    """Return what was written without the answers that have no weight."""
    is_learnt = ["weight" not in message for message in messages if message["role"] == "assistant"]
    if all(is_learnt):
        return written
    if len(is_learnt) != len(written.answers):
        raise UserError("its chat template does not mark each answer by itself: leave the weights out")
    return written._replace(answers=tuple(itertools.compress(written.answers, is_learnt)))


def encode_messages(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    begin: str = "",
) -> list[int]:
    """Return the ids of a conversation, of the header of the assistant's turn, and of the beginning of its answer."""
    written = template.write(messages, tools=tools, prompt=True)
    return tokenise(written._replace(text=written.text + begin), tokenizer)[0].tolist()


def find_end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id that ends an answer: the first special token behind its content, or U+0003 of our own template.

    Any other token could be part of a content, and a chat would stop there. Without one a warning says so, and the
    result is None. A warning also says where the template does not mark it as an answer.
    """
    # Every tokenizer of conversations knows "s" and "e", because the templates themselves contain them.
    asked = {"role": "user", "content": "s"}
    written, other = (template.write([asked, {"role": "assistant", "content": content}]) for content in "se")
    is_same = [a == b for a, b in zip(written.text[::-1], other.text[::-1], strict=False)]
    tail = written.text[len(written.text) - [*is_same, False].index(False) :]
    behind, specials = tokenizer.locate(tail, specials=True)[0].tolist(), index_specials(tokenizer)
    found = next((i for i in behind if i in specials or tokenizer.decode([i]) == ETX), None)
    ids, answers = tokenise(written, tokenizer)
    if found is None:
        problem = "writes no special token behind an answer, so no token ends a turn: put one there"
    elif found not in ids[answers]:
        problem = f"has {tokenizer.decode([found])!r} outside {{% generation %}}, so it is not learnt: move it inside"
    else:
        return found
    warnings.warn(f"the chat template {problem}, in chat_template.jinja", UserWarning, stacklevel=2)
    return found


def tokenise(written: Written, tokenizer: Tokenizer) -> Marked:
    """Return (ids, True for those of the assistant). Only the template can write special tokens.

    The text is encoded in one piece, as in transformers. Only a content that spells out a special token is encoded by
    itself, as text.
    """
    specials, encoded = match_specials(tuple(tokenizer.specials)), []
    contents = [span for span in written.contents if specials.search(written.text, *span)]
    bounds = itertools.pairwise([0, *itertools.chain(*contents), len(written.text)])
    for number, (start, end) in enumerate(bounds):
        piece, spans = tokenizer.locate(written.text[start:end], specials=number % 2 == 0)
        encoded.append((piece, spans + start))
    ids, at = (np.concatenate(arrays) for arrays in zip(*encoded, strict=True))
    answers, (starts, stops) = np.zeros(len(ids), bool), np.ascontiguousarray(at.T)
    for a, b in written.answers:
        answers[np.searchsorted(stops, a, "right") : np.searchsorted(starts, b)] = True
    return ids, answers


def pack_best_fit(sizes_N: np.ndarray, room: int) -> np.ndarray:
    """Return row_N, int64: the row of each size. The largest goes first, each to the fullest row that it fits.

    Sizes are from 1 to `room`. At most 11/9 of the minimum number of rows plus 4 are used (Johnson et al. 1974, SIAM J.
    Comput. 3(4)).
    """
    row_N = np.empty(len(sizes_N), np.int64)
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]  # rows by the room left in them
    open_bits = rows = 0  # bit r: a row has room r. The lowest bit from the size on is the fullest row that fits
    for item in np.argsort(-sizes_N, kind="stable").tolist():
        size = int(sizes_N[item])
        fitting = open_bits >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                open_bits ^= 1 << left
        else:
            left, row, rows = room, rows, rows + 1
        row_N[item] = row
        rows_with[left - size].append(row)
        open_bits |= 1 << left - size
    return row_N


class Conversations(Split):
    """Conversations as token ids, memory-mapped or in memory, each at most a row of `block_size` inputs.

    A longer one is cut after the last answer that fits, or left out if none does.
    """

    def __init__(self, ids: Any, answers: Any, ends: np.ndarray, block_size: int):
        """Select what fits of the concatenated `ids`. `answers` is their mask, `ends` the end of each conversation.

        Only slices of the first two are read, which may be `Tokens`.
        """
        self._ids, self.answers, self.block_size = ids, answers, block_size
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        whole = np.array(ends) - starts
        lengths, sizes = self.fit(starts, whole)
        kept = (sizes > 0) & (sizes <= block_size)
        self.needed = whole - 1  # the block_size that holds each conversation whole
        self.left_out, self.shortened = int((~kept).sum()), int((kept & (lengths < whole)).sum())
        self.starts, self.lengths, self.sizes = starts[kept], lengths[kept], sizes[kept]

    def fit(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens to read of each, inputs that they take up in a row).

        A conversation of n tokens gives n - 1 inputs. The target of each is in the same conversation.
        """
        lengths = lengths.copy()
        for n in np.flatnonzero(lengths > self.block_size + 1):
            # Read one token more, to see whether an answer ends at the last.
            ahead = np.asarray(self.answers[starts[n] : starts[n] + self.block_size + 2], bool)
            last = np.flatnonzero(ahead[:-1] & ~ahead[1:])
            lengths[n] = last[-1] + 1 if len(last) else 0
        return lengths, lengths - 1

    # Best fit depends only on lengths, so it runs once: each epoch shuffles conversations of equal length among the rows,
    # and the rows. Every epoch thus has the same number of rows, and the n-th row of a run follows by arithmetic.
    @functools.cached_property
    def _packing(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (conversations, longest first), (ranks in that order, sorted by row) and (bounds of the rows in these)."""
        longest_first = np.argsort(-self.sizes, kind="stable")
        row_N = pack_best_fit(self.sizes[longest_first], self.block_size)
        return longest_first, np.argsort(row_N, kind="stable"), np.append(0, np.cumsum(np.bincount(row_N)))

    @property
    def rows(self) -> int:
        """Return the number of rows of an epoch."""
        return len(self._packing[2]) - 1

    @property
    def filled(self) -> float:
        """Return the fraction of the rows that is not padding."""
        return float(self.sizes.sum()) / (self.rows * self.block_size)

    def _members(self, longest_first: np.ndarray, row: int) -> np.ndarray:
        _, by_row, bounds = self._packing
        return longest_first[by_row[bounds[row] : bounds[row + 1]]]

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of packed rows, each conversation once per epoch: see `pipeline.Split`."""
        assert block_size == self.block_size, (block_size, self.block_size)

        @functools.lru_cache(maxsize=2)  # epochs: a batch may have rows of one and of the next
        def shuffle(epoch: int) -> tuple[np.ndarray, np.ndarray]:
            rng = np.random.default_rng([seed, epoch])
            shuffled = rng.permutation(len(self.sizes))
            return shuffled[np.argsort(-self.sizes[shuffled], kind="stable")], rng.permutation(self.rows)

        def row(n: int) -> tuple[np.ndarray, ...]:
            longest_first, order = shuffle(n // self.rows)
            return self.row(self._members(longest_first, order[n % self.rows]))

        return row

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of packed rows, reader of a row): see `pipeline.Split`. The stride must be block_size."""
        assert block_size == stride == self.block_size and not prefix_length, (block_size, stride, prefix_length)
        rows: Sequence[int] = range(self.rows)
        if max_tokens is not None and max_tokens < self.rows * self.block_size:
            rows = pick_evenly(rows, max_tokens // self.block_size)
        empty = np.zeros(0, np.int64)
        return len(rows), lambda n: self.row(self._members(self._packing[0], rows[n]) if n < len(rows) else empty)

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def read(self, number: int) -> Marked:
        """Return the tokens of one conversation."""
        here = slice(self.starts[number], self.starts[number] + self.lengths[number])
        return self._ids[here], self.answers[here].astype(bool)

    def row(self, members: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T): the members, in segments from 1 on, then padding."""
        inputs, targets, segments = (np.zeros(self.block_size, np.int32) for _ in range(3))
        mask, at = np.zeros(self.block_size, bool), 0
        for number, member in enumerate(members, 1):
            ids, answers = self.read(member)
            here = slice(at, at + len(ids) - 1)
            inputs[here], targets[here], mask[here], segments[here] = ids[:-1], ids[1:], answers[1:], number
            at += len(ids) - 1
        return inputs, targets, mask, segments
