"""Constrain completions by llguidance: what a completion must match becomes a mask of the next token.

llguidance was chosen over xgrammar and outlines-core: one wheel of 3 MB for every Python, without dependencies, and the
broadest support of JSON Schema. The host computes a mask before each step, in microseconds.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxgpt.config.validate import short
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from jaxgpt.errors import UserError, first_line

END = "<|end of the grammar|>"  # a token that no model has: where a mask allows it, the completion may end
# One space or none, as in compact JSON and in Python's: else a weak model writes spaces to the end.
JSON = {"whitespace_pattern": "[ ]?"}
LONGEST = 4096  # tokens of a shortest completion that are looked for
NEAR = 64  # tokens before the end of a completion at which it is first seen to that it can still be completed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """What a completion must match, for one tokenizer."""

    words: Any  # llguidance's tokenizer
    text: str  # the grammar in llguidance's format
    vocab_size: int  # number of tokens
    closers: dict[str, int]  # tokens that end a text of JSON early, in the order in which they are tried
    least: int | None = None  # tokens of a short completion. None if none was found

    def start(self) -> Constraint:
        """Return the state of a completion without tokens."""
        return Constraint(self)

    def check_room(self, most: int, name: str = "the grammar") -> None:
        """Raise `UserError` if a completion of `most` tokens is too short for it."""
        if self.least is not None and self.least > most:
            raise UserError(f"{name} needs {self.least} tokens, and there is room for {most}: shorten it or the prompt")


def compile_grammar(
    tokenizer: Tokenizer,
    *,
    schema: dict[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    calls: str | None = None,
) -> Grammar | None:
    """Return the grammar of what is given, or None. Raises `UserError` for what llguidance cannot follow.

    Args:
        tokenizer: the model's.
        schema: a JSON Schema (draft 2020-12, without some keywords). Separators have one space after them, or none.
        regex: in Rust's syntax, for the whole completion. One that takes too long to compile is refused.
        choices: texts, of which the completion is one.
        calls: the grammar of calls of tools, in llguidance's own form.
    """
    given = {"schema": schema, "regex": regex, "choices": choices, "calls": calls}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise UserError(f"{' and '.join(named)}: needs one of them")
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise UserError("structured output needs llguidance: python -m pip install 'jaxgpt[structured]'") from None
    (name,), words = named, _words(tokenizer)
    if regex is not None:
        text = LLMatcher.grammar_from_regex(regex)
    elif calls is not None:
        text = LLMatcher.grammar_from_lark(calls)
    elif choices is not None:
        if not choices or not all(choices):
            raise UserError(f"choices={short(choices)}: needs at least one text, none empty")
        text = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    else:
        if not isinstance(schema, dict):
            raise UserError(f"schema={short(schema)}: needs an object")
        try:
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON)  # type: ignore[arg-type]
        except (ValueError, TypeError) as e:
            raise UserError(f"schema={short(schema)} is not JSON: {first_line(e)[:200]}") from None
    found = Grammar(words=words, text=text, vocab_size=tokenizer.vocab_size, closers=_find_closers(tokenizer))
    start = found.start()
    if not start.error and not start.can_begin():
        raise UserError(f"{name} cannot be followed: this tokenizer has no token with which it could begin")
    path = None if start.error else start.find_end(LONGEST)
    if start.error:  # also an expression that grows too large with the first tokens
        raise UserError(f"{name} cannot be followed: {' '.join(start.error.partition('<state>')[0].split())[:200]}")
    return dataclasses.replace(found, least=None if path is None else len(path))


@functools.lru_cache(maxsize=4)
def _words(tokenizer: Tokenizer) -> Any:
    """Return llguidance's form of a tokenizer, with END after its own ids."""
    from llguidance import LLTokenizer, TokenizerWrapper

    end = tokenizer.vocab_size
    if isinstance(tokenizer, BPETokenizer):
        parts, plain = tokenizer.parts(), dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        parts["added_tokens"].append({"id": end, "content": END, "special": True, **plain})
        return LLTokenizer(json.dumps(parts), eos_token=end)
    if not isinstance(tokenizer, ByteTokenizer | CharTokenizer):
        raise UserError("structured output needs a tokenizer of text, and this run has bare ids")
    texts = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else range(256)
    return LLTokenizer(TokenizerWrapper(_Words([t.encode() if isinstance(t, str) else bytes([t]) for t in texts])))


class _Words:
    """Tokens that are characters or bytes, with the names by which llguidance asks for them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]):
        self.tokens = [*tokens, END.encode()]
        self.eos_token_id, self.special_token_ids = len(tokens), [len(tokens)]
        self._ids = {token: i for i, token in enumerate(tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a text, up to the first character without one."""
        ids = []
        for character in text.decode(errors="replace"):
            whole = character.encode()
            found = [self._ids.get(part) for part in ([whole] if whole in self._ids else [bytes([b]) for b in whole])]
            if None in found:
                break
            ids += found
        return ids


def _find_closers(tokenizer: Tokenizer) -> dict[str, int]:
    found = dict[str, int]()
    for text in '"}]0,:':
        try:
            ids = tokenizer.encode(text)
        except UserError:  # not one of its characters
            continue
        found |= {text: int(ids[0])} if len(ids) == 1 else {}
    return found


class Constraint:
    """What one completion has matched so far."""

    def __init__(self, grammar: Grammar):
        """Start with no tokens."""
        from llguidance import LLMatcher

        self._grammar, self._matcher = grammar, LLMatcher(grammar.words, grammar.text, log_level=0)
        self._end: list[int] | None = None  # tokens that would complete it now, if they are known

    @property
    def error(self) -> str:
        """Return why nothing can match, or an empty text if something can."""
        return self._matcher.get_error()

    @property
    def is_complete(self) -> bool:
        """Return whether nothing can follow."""
        return self._matcher.is_stopped()

    def can_begin(self) -> bool:
        """Return whether any token may be next, or none is needed."""
        return bool(self._allowed().size) or self._matcher.is_accepting()

    def fill(self, allowed_W: np.ndarray, ends: Sequence[int]) -> None:
        """Write the mask of the next token, bits of uint32. ends: ids that end the completion."""
        bits, last = bytearray(self._matcher.compute_bitmask()), self._grammar.vocab_size
        if bits[last // 8] >> last % 8 & 1:
            bits[last // 8] ^= 1 << last % 8
            for i in ends:
                bits[i // 8] |= 1 << i % 8
        words = np.frombuffer(bits, np.uint32)
        allowed_W[: len(words)] = words
        allowed_W[len(words) :] = 0

    def push(self, token: int, left: int) -> int | None:
        """Take a token that was drawn, and return it, or another that takes its place, or None to end before it.

        left: tokens that may follow. Near the end, a token after which no completion would fit is not taken.
        """
        least = self._grammar.least
        if least is None or left > NEAR + 4 * least:
            self._end = None
            self._matcher.consume_token(token)
            return token
        end = self._end if self._end is not None else self.find_end(left + 1)
        self._matcher.consume_token(token)
        self._end = end[1:] if end and end[0] == token else self.find_end(left)
        if self._end is None and end is not None:
            self._matcher.rollback(1)
            self._end = end[1:]
            if not end:
                return None
            token = end[0]
            self._matcher.consume_token(token)
        return token

    def find_end(self, most: int) -> list[int] | None:
        """Return few tokens, at most `most`, that complete the text. None if none are found by trying the plainest."""
        path, is_found = list[int](), True
        while is_found and not self._matcher.is_accepting():
            new = self._matcher.compute_ff_tokens() or self._try_closers(path) or self._lead_on(path)
            done = self._matcher.try_consume_tokens(new) if 0 < len(new) <= most - len(path) else 0
            path += new[:done]
            is_found = 0 < done == len(new)
        self._matcher.rollback(len(path))
        return path if is_found else None

    def _try_closers(self, path: list[int]) -> list[int]:
        """Return one token that ends something, as a list. It is empty if there is none, or if it would be a second digit."""
        tried = self._grammar.closers.items()
        name, token = next(((name, i) for name, i in tried if self._matcher.validate_tokens([i])), ("", -1))
        return [] if not name or (name == "0" and path[-1:] == [token]) else [token]

    def _lead_on(self, path: list[int]) -> list[int]:
        """Return a token that may come now and could not come before, where others may only repeat. Else return any."""
        allowed, before = self._allowed(), np.arange(0)
        if path:
            self._matcher.rollback(1)
            before = self._allowed()
            self._matcher.consume_token(path[-1])
        new = [*np.setdiff1d(allowed, before).tolist(), *allowed.tolist()]
        return next(([i] for i in new if self._grammar.words.decode_str([i]).strip()), [])

    def _allowed(self) -> np.ndarray:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._grammar.vocab_size])
