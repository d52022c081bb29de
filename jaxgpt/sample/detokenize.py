"""From ids that arrive a few at a time to text that can be shown at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError

UNFINISHED = "\ufffd"  # what decoding ends in when the last bytes are the beginning of a character


class Detokenizer:
    """Decode one growing list of ids in pieces that never split a character and never show a stop string.

    What could still become part of a character or of a stop string is held back until it is decided, or until `rest`.
    The pieces joined are the text of all ids, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        if "" in self._stop:
            raise UserError("a stop string is empty: every text contains it; give at least one character, or none")
        self.stopped = False
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        # Ids from `context` on are decoded each time, of which those before `shown` are out already: decoders treat the
        # first id of a list in their own way (a leading space), so it must not be the new one.
        self._context = self._shown = 0
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that the next ids add."""
        return "".join(self._push(i) for i in ids)

    def rest(self) -> str:
        """Return what was held back, at the end of the ids."""
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
        """Return what can be shown of the text held back and the new text; hold the rest back."""
        text = self._held + new
        starts = [text.find(stop) for stop in self._stop if stop in text]
        if starts:
            self.stopped, self._held = True, ""
            return text[: min(starts)]
        held = 0 if last else max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def iter_text(tokenizer: Tokenizer, ids: Iterable[Sequence[int]], stop: Sequence[str] = ()) -> Iterator[str]:
    """Yield the text of lists of ids in pieces, none empty; end at a stop string, without asking for more ids."""
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
    """Return the `size` texts of batches of new ids, each up to its stop string; end when all have met one."""
    detokenizers, texts = [Detokenizer(tokenizer, stop) for _ in range(size)], [""] * size
    for batch in batches:
        texts = [text + d.push(new_ids) for text, d, new_ids in zip(texts, detokenizers, batch, strict=True)]
        if all(d.stopped for d in detokenizers):
            break
    return [text + d.rest() for text, d in zip(texts, detokenizers, strict=True)]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
