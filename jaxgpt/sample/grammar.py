"""Constrain completions by llguidance: what a completion must match becomes a mask of the next token.

llguidance was chosen over xgrammar and outlines-core: one wheel of 3 MB for every Python, without dependencies, and the
broadest support of JSON Schema. The host computes a mask before each step, in microseconds.
"""

from __future__ import annotations

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
LONGEST = 2**16  # characters of a grammar. The time to compile one may grow with the square: here it is seconds
EXACT = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")  # keywords of `check_integers`
PROBED = 4  # tokens by which an expression that grows without bounds is found out


class Grammar:
    """A rule that a completion must match, compiled for one tokenizer, and what has been matched so far."""

    def __init__(self, matcher: Any, vocab_size: int):
        """Start with what llguidance's matcher has matched. vocab_size: number of tokens."""
        self._matcher, self._vocab_size = matcher, vocab_size

    def start(self) -> Grammar:
        """Return a copy for one completion, which takes microseconds."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size)

    @property
    def error(self) -> str:
        """Return why nothing can match, or an empty text if something can."""
        return self._matcher.get_error()

    @property
    def is_complete(self) -> bool:
        """Return whether nothing can follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> list[int]:
        """Return the tokens that may be next."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size]).tolist()

    def fill(self, allowed_W: np.ndarray, ends: Sequence[int]) -> None:
        """Write the mask of the next token, bits of uint32. ends: ids that end the completion."""
        bits, last = bytearray(self._matcher.compute_bitmask()), self._vocab_size
        if bits[last // 8] >> last % 8 & 1:
            bits[last // 8] ^= 1 << last % 8
            for i in ends:
                bits[i // 8] |= 1 << i % 8
        words = np.frombuffer(bits, np.uint32)
        allowed_W[: len(words)] = words
        allowed_W[len(words) :] = 0

    def push(self, token: int) -> None:
        """Take the next token."""
        self._matcher.consume_token(token)


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
        tokenizer: the tokenizer of the model.
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
        raise UserError(f"{' and '.join(named)}: give one of them")
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
        check_integers(schema, "schema")
        try:
            text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON)  # type: ignore[arg-type]
        except (ValueError, TypeError) as e:
            raise UserError(f"schema={short(schema)} is not JSON: {first_line(e)[:200]}") from None
    if len(text) > LONGEST:
        raise UserError(f"{name} has {len(text):,} characters as a grammar: needs at most {LONGEST:,}")
    matcher = LLMatcher(words, text, log_level=0)
    found = Grammar(matcher, tokenizer.vocab_size)
    if not (found.error or found.allowed() or matcher.is_accepting()):  # the copies keep this first mask
        raise UserError(f"{name} cannot be followed: this tokenizer has no token with which it could begin")
    start = found.start()
    for _ in range(PROBED):
        if start.is_complete or not (allowed := start.allowed()):
            break
        start.push(allowed[0])
    if start.error:
        reason = " ".join(start.error.partition("<state>")[0].split())
        reason = "the branches of a oneOf overlap: write anyOf" if reason.startswith("oneOf") else reason
        raise UserError(f"{name} cannot be followed: {reason[:200]}")
    return found


def check_integers(schema: Any, name: str, at: str = "") -> None:
    """Raise `UserError` for an integer in a schema that llguidance, which computes with float64, could replace by another.

    The limits of 64 bits become narrower bounds, which are right. at: the keyword that the value belongs to.
    """
    if isinstance(schema, dict | list):
        pairs = schema.items() if isinstance(schema, dict) else [(at, value) for value in schema]
        for key, value in pairs:
            check_integers(value, name, at if at in ("const", "enum") else key)
    elif type(schema) is int and abs(schema) >= 2**53 and at in EXACT:
        is_wide = schema >= 2**63 - 1 if at == "maximum" else at == "minimum" and schema <= -(2**63)
        if not is_wide:
            raise UserError(f"{name} has {at} {short(schema)}: needs integers below 2^53")


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
