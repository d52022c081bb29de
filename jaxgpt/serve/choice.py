"""Turn the tokens of one choice into text: characters and stop strings whole, and for each token its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.sample.engine import Detokenizer
from jaxgpt.sample.score import PromptScores
from jaxgpt.serve.scheduler import Update


class Token(NamedTuple):
    """One token of a choice, with its log-probability in nats."""

    id: int
    text: str
    offset: int  # of its first character in the text of the choice
    logprob: float  # nan for a first token without context
    top: list[tuple[int, str, float]]  # (id, text, logprob) of the most probable tokens in its place, best first


class Delta(NamedTuple):
    """An addition to a choice."""

    text: str
    tokens: list[Token]  # empty unless log-probabilities were asked for
    finish: str | None  # "stop" or "length" in the last one


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """Return a function from an id to its text: U+FFFD for a part of a character."""

    @functools.lru_cache(maxsize=2**16)
    def text(i: int) -> str:
        # After itself, since some decoders drop the space of a first token.
        return tokenizer.decode([i, i])[len(tokenizer.decode([i])) :]

    return text


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, tokenizer: Tokenizer, text_of: Callable[[int], str], stop: Sequence[str], *, logprobs: bool):
        """Start with no text. text_of: see `token_texts`."""
        self._tokenizer, self._text_of = tokenizer, text_of
        self._detokenizer = Detokenizer(tokenizer, stop)
        self._places = Detokenizer(tokenizer) if logprobs else None  # without stop strings: no text is held back
        self._read = self._shown = 0  # characters of the tokens so far, and of the text in deltas so far
        self._held: list[Token] = []  # tokens whose text is not out yet
        self.begun = False
        self.num_tokens = 0  # generated
        self.finish: str | None = None

    def echo(self, ids: Sequence[int], text: str | None, scores: PromptScores | None, top: int) -> Delta:
        """Return the prompt as the beginning of the choice.

        text: from which the ids were encoded, after a prefix; None: they were given. top: number of alternatives.
        """
        self.begun = True
        places, offsets, read = Detokenizer(self._tokenizer), [], 0
        own = len(ids) if text is None else min(len(ids), len(self._tokenizer.encode(text)))
        for i in ids[len(ids) - own :]:
            offsets.append(read)
            read += len(places.push([i]))
        text = self._tokenizer.decode(ids) if text is None else text
        offsets = [min(offset, len(text)) for offset in [0] * (len(ids) - own) + offsets]
        self._read = self._shown = len(text)
        if scores is None:
            return Delta(text, [], None)
        rows = zip(ids, offsets, scores.logprobs, scores.top, strict=True)
        return Delta(text, [self._token(i, offset, logprob, best[:top]) for i, offset, logprob, best in rows], None)

    def push(self, update: Update) -> Delta:
        """Return what an update adds."""
        self.begun, text = True, ""
        for number, i in enumerate(update.tokens):
            if self.finish is not None:
                return Delta("", [], None)
            if self._places is not None:
                self._held.append(self._token(i, self._read, update.logprobs[number], update.top[number]))
                self._read += len(self._places.push([i]))
            text += self._detokenizer.push([i])
            self.num_tokens += 1
            if self._detokenizer.stopped:
                return self._finish(text, "stop")
        if update.finish is not None:
            text += self._detokenizer.rest()
            return self._finish(text, "stop" if self._detokenizer.stopped else update.finish)
        self._shown += len(text)
        return Delta(text, self._release(self._shown), None)

    def _finish(self, text: str, reason: str) -> Delta:
        self.finish, self._shown = reason, self._shown + len(text)
        # A stop string takes the tokens after it along; without one, a last token without text counts.
        tokens = self._release(self._shown if self._detokenizer.stopped else self._read + 1)
        return Delta(text, tokens, reason)

    def _release(self, end: int) -> list[Token]:
        out = [token for token in self._held if token.offset < end]
        self._held = self._held[len(out) :]
        return out

    def _token(self, i: int, offset: int, logprob: float, top: Sequence[tuple[int, float]]) -> Token:
        return Token(i, self._text_of(i), offset, logprob, [(j, self._text_of(j), p) for j, p in top])
