"""Exact matches: a run that is always right has all of them, whatever stands beside a pair in its batch."""

import types

import pytest

from jaxgpt.data.pairs import collect_documents, encode_pairs
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.sample.search import BeamResult
from jaxgpt.tools.evaluate import evaluate
from jaxgpt.tools.evaluate.evaluate import count_exact_matches

BLOCK = 32
# Short sources with long targets and the other way round; the last two fill the context to the last token.
TEXTS = [("a" * 20, "b" * 4), ("c" * 4, "d" * 20), ("e", "f"), ("g" * 3, "h" * 28), ("i" * 28, "j" * 3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in TEXTS))
    return path


def always_right(monkeypatch, *, ends=True):
    """In place of a model: it writes the target of each source, as far as it may, and after it ends or goes on for ever."""
    tokenizer = ByteTokenizer()
    known = {source: f"{target}\n" if ends else target + "z" * 99 for source, target in TEXTS}

    def texts(prompts, sources, most):
        for number, prompt in enumerate(prompts):
            read = tokenizer.decode(prompt if sources is None else sources[number]).removesuffix("\t")
            ids = tokenizer.encode(known[read])[: most(len(prompt))].tolist()
            yield ids[: ids.index(10)] if 10 in ids else ids

    def stream(model, params, prompts, decoding, *, key, every, sources):
        yield list(texts(prompts, sources, lambda length: decoding.max_new_tokens))

    def beam_search(model, params, prompts, decoding, *, beams, sources):
        room = BLOCK + 1  # a search stays within the context; its last token is not read
        found = texts(prompts, sources, lambda length: min(decoding.max_new_tokens, room - length))
        return BeamResult([[text] for text in found], [[0.0] for _ in prompts])

    monkeypatch.setattr(evaluate, "stream", stream)
    monkeypatch.setattr(evaluate, "beam_search", beam_search)
    model = types.SimpleNamespace(config=types.SimpleNamespace(block_size=BLOCK))
    return types.SimpleNamespace(tokenizer=tokenizer, model=model, decode_params=(model, {}))


@pytest.mark.parametrize("batch_size", [1, 2, 3, 256])
@pytest.mark.parametrize("encoder", [False, True])
@pytest.mark.parametrize("beams", [None, 2])
def test_all_pairs_of_a_run_that_is_always_right_are_exact(monkeypatch, path, beams, encoder, batch_size):
    run = always_right(monkeypatch)
    pairs = collect_documents(encode_pairs(path, run.tokenizer), BLOCK, encoder=encoder)
    assert len(pairs.lengths) == len(TEXTS)
    monkeypatch.setattr(evaluate, "PAIRS_AT_ONCE", batch_size)
    found = count_exact_matches(run, pairs, beams=beams)
    assert found["exact"] == 1.0 and found["missed"] == [] and found["pairs"] == len(TEXTS)


@pytest.mark.parametrize("beams", [None, 2])
def test_a_target_without_its_end_is_not_exact(monkeypatch, path, beams):
    """Neither is it in a batch of which it is the longest."""
    run = always_right(monkeypatch, ends=False)
    pairs = collect_documents(encode_pairs(path, run.tokenizer), BLOCK)
    assert count_exact_matches(run, pairs, beams=beams)["exact"] == 0.0
