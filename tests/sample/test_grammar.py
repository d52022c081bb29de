"""Structured output: what is drawn matches, whatever the model would rather write, and ends in time."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.sample.engine import generate
from jaxgpt.sample.grammar import compile_grammar
from tests.conftest import TEXT
from tests.helpers import TINY, make_model

pytest.importorskip("llguidance", reason="pip install '.[structured]'")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "ages": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        "kind": {"enum": ["squire", "knight"]},
    },
    "required": ["name", "ages", "kind"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "in": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["v", "in"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
SHORT = PERSON | {"properties": PERSON["properties"] | {"name": {"type": "string", "maxLength": 9}}}
SHORT["properties"] |= {
    "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3}
}
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer([*map(chr, range(32, 127)), "\n", "ñ"]),
    "bpe": train_bpe([TEXT], 400),
}


def draw(rng, tokenizer, grammar, most, ends=()):
    """A completion of tokens that are each drawn evenly from those allowed, or None if it has not ended by `most`."""
    constraint, ids = grammar.start(), []
    allowed_W = np.zeros(tokenizer.vocab_size // 32 + 1, np.uint32)
    while len(ids) < most and not constraint.is_complete:
        constraint.fill(allowed_W, ends)
        bits = np.unpackbits(allowed_W.view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token in ends:
            break
        constraint.push(token)
        ids.append(token)
    assert not constraint.error
    return tokenizer.decode(ids) if constraint.is_complete or token in ends else None


@pytest.mark.parametrize(
    ("kind", "schema"),
    [("byte", PERSON), ("bpe", TREE), ("char", {"type": "object"}), ("byte", {"type": "number"})],
    ids=["person", "tree", "any", "1"],
)
def test_every_completion_is_what_the_schema_says(kind, schema):
    """Where it ends by itself, though each token is drawn evenly from those allowed."""
    tokenizer, rng = TOKENIZERS[kind], np.random.default_rng(0)
    grammar = compile_grammar(tokenizer, schema=schema)
    texts = [draw(rng, tokenizer, grammar, 2000, ends=[tokenizer.vocab_size]) for _ in range(8)]
    assert sum(text is not None for text in texts) >= 5
    for text in filter(None, texts):
        value = json.loads(text)
        if schema is PERSON:
            assert list(value) == ["name", "ages", "kind"] and len(value["ages"]) >= 2, text
        assert isinstance(value, (int, float) if schema.get("type") == "number" else dict), text


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_expressions_and_choices_are_matched(kind):
    tokenizer, rng = TOKENIZERS[kind], np.random.default_rng(0)
    for regex in ("[a-z]+@[a-z]+[.]org", "[0-9]{3}-[0-9]{4}", "(ab)*"):
        grammar = compile_grammar(tokenizer, regex=regex)
        for _ in range(10):
            assert re.fullmatch(regex, draw(rng, tokenizer, grammar, 400, ends=[tokenizer.vocab_size])), regex
    choices = ["a lance", 'a "lance"\n', "buckler"]
    found = {draw(rng, tokenizer, compile_grammar(tokenizer, choices=choices), 40) for _ in range(60)}
    assert found == set(choices)


def test_the_models_own_end_is_allowed_where_the_text_may_end():
    tokenizer = TOKENIZERS["bpe"]
    end, grammar = tokenizer.end_of_text, compile_grammar(tokenizer, regex="a+")
    constraint, allowed_W = grammar.start(), np.zeros(tokenizer.vocab_size // 32 + 1, np.uint32)
    (a,) = tokenizer.encode("a").tolist()
    for expected in (False, True):
        constraint.fill(allowed_W, [end])
        assert bool(allowed_W[end // 32] >> end % 32 & 1) == expected
        constraint.push(a)
    # Bits beyond the tokenizer's ids are never set, such as that of the grammar's own end.
    assert not allowed_W[tokenizer.vocab_size // 32] >> tokenizer.vocab_size % 32


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"schema": {"type": "objec"}}, "schema cannot be followed: Invalid type: objec"),
        ({"schema": {"dependentSchemas": {}}}, "Unimplemented keys"),
        ({"schema": [1]}, r"schema=\[1\]: needs an object"),
        ({"schema": {"a": math.nan, "b": {1}}}, "schema=.* is not JSON"),
        ({"regex": "["}, "regex cannot be followed: .*unclosed"),
        ({"regex": "a" * 2**16}, "regex has .* needs at most 65,536"),
        ({"schema": {"items": {"const": 2**53 + 1}}}, "has const .*: needs integers below 2"),
        ({"schema": {"items": {"maximum": -(2**64)}}}, "has maximum .*: needs integers below 2"),
        ({"choices": ["a", ""]}, "none empty"),
        ({"regex": "a", "choices": ["a"]}, "regex and choices: give one of them"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_no_grammar_is_refused(how, said):
    with pytest.raises(UserError, match=said) as e:
        compile_grammar(ByteTokenizer(), **how)
    assert len(str(e.value)) < 400 and "\n" not in str(e.value)


@pytest.fixture(scope="module")
def model():
    return make_model(dataclasses.replace(TINY, vocab_size=256, n_layer=1, block_size=128, position="rope"))


def test_a_batch_follows_one_grammar_until_it_is_cut(model, monkeypatch):
    grammar, prompts = compile_grammar(ByteTokenizer(), schema=SHORT), [[n, 65] for n in range(6)]
    monkeypatch.setattr("llguidance.LLMatcher", None)  # it is compiled once, and not again for each prompt
    found = generate(*model, prompts, key=jax.random.key(0), max_new_tokens=99, grammar=grammar, slots=3, logprobs=True)
    texts = [ByteTokenizer().decode(ids) for ids in found.tokens]
    assert all(json.loads(text)["kind"] in ("squire", "knight") for text in texts) and len(set(texts)) == len(texts)
    assert [len(row) for row in found.logprobs] == [len(row) for row in found.tokens]
    cut = generate(*model, prompts, key=jax.random.key(0), max_new_tokens=20, grammar=grammar, slots=3)
    assert cut.tokens == [row[:20] for row in found.tokens]
