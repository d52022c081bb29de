"""Incremental decoding of ids into text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError

UNFINISHED = "\ufffd"  # how decoded text ends if the last bytes are an incomplete character


class Detokenizer:
    """Decode one growing list of ids in pieces that never split a character and never contain a stop string.

    Text that may be the start of a character or of a stop string is held back until more ids decide, or until `rest`.
    Joined, the pieces are the text of all ids, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Start with no ids. Raise `UserError` for an empty stop string."""
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        if "" in self._stop:
            raise UserError("a stop string is empty: every text contains it; give at least one character, or none")
        self.stopped = False
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Each call decodes the ids from `context` on, of which those before `shown` have been returned. A new id must
        # not come first: decoders treat the first id of a list differently (a leading space).
        self._context = self._shown = 0
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that new ids add."""
        return "".join(self._push(i) for i in ids)

    def rest(self) -> str:
        """Return the text that was held back, after the last id."""
        return "" if self.stopped else self._release(self._decode_new(), last=True)

    def _push(self, i: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(int(i))
        new = self._decode_new()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return self._release(new)

    def _decode_new(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(shown) :]

    def _release(self, new: str, *, last: bool = False) -> str:
        """Return the part of the held and the new text that no further id can change; hold the rest back."""
        text = self._held + new
        starts = [text.find(stop) for stop in self._stop if stop in text]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def iter_text(tokenizer: Tokenizer, ids: Iterable[Sequence[int]], stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of successive lists of ids in non-empty pieces; stop reading ids at a stop string."""
    detokenizer = Detokenizer(tokenizer, stop)
    for new_ids in ids:
        if piece := detokenizer.push(new_ids):
            yield piece
        if detokenizer.stopped:
            return
    if piece := detokenizer.rest():
        yield piece


def join_texts(
    tokenizer: Tokenizer, batches: Iterable[Sequence[Sequence[int]]], size: int, stop: Sequence[str] = ()
) -> list[str]:
    """Return the texts of `size` rows from batches of their new ids; stop reading once all have met a stop string."""
    detokenizers, texts = [Detokenizer(tokenizer, stop) for _ in range(size)], [""] * size
    for batch in batches:
        texts = [text + d.push(new_ids) for text, d, new_ids in zip(texts, detokenizers, batch, strict=True)]
        if all(d.stopped for d in detokenizers):
            break
    return [text + d.rest() for text, d in zip(texts, detokenizers, strict=True)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
