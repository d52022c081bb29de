"""What is word for word from a corpus: against every stretch tried by hand."""

import numpy as np
import pytest

from jaxgpt.tools.report.memorization import LENGTHS, SHOWN, SuffixArray, measure_novelty

pytest.importorskip("pydivsufsort")


def by_hand(corpus, text):
    return [max(n for n in range(len(text) - i + 1) if text[i : i + n] in corpus) for i in range(len(text))]


@pytest.mark.parametrize("alphabet", ["ab", "aé漢🐎", "abcdefghij"])
def test_match_lengths_are_those_of_every_stretch(alphabet):
    rng = np.random.default_rng(len(alphabet))
    corpus, text = ("".join(rng.choice(list(alphabet), n)) for n in (400, 120))
    text = text + corpus[50:90] + text[:10]
    found = SuffixArray(corpus).match_lengths(text)
    assert found.tolist() == by_hand(corpus, text)


def test_novel_n_grams_and_the_longest_overlaps():
    rng = np.random.default_rng(0)
    corpus = "".join(rng.choice(list("abcdé"), 3000))
    texts = [corpus[100:160] + "zzzz" + corpus[1000:1030], "".join(rng.choice(list("abcdé"), 80))]
    found = measure_novelty(SuffixArray(corpus), texts)
    assert found["characters"] == 94 + 80
    for n in LENGTHS:
        grams = [text[i : i + n] for text in texts for i in range(len(text) - n + 1)]
        assert found["novel"][str(n)] == pytest.approx(np.mean([gram not in corpus for gram in grams]))
    first, second, *_ = found["overlaps"]
    assert first["text"] == corpus[100:160] and corpus[first["at"] : first["at"] + 60] == first["text"]
    assert second["text"] == corpus[1000:1030]
    assert len(found["overlaps"]) == SHOWN and [len(o["text"]) for o in found["overlaps"]] == sorted(
        (len(o["text"]) for o in found["overlaps"]), reverse=True
    )


def test_the_shortest_texts():
    corpus = SuffixArray("abcabc")
    assert measure_novelty(corpus, [""])["overlaps"] == [] and measure_novelty(corpus, ["", "ab"])["novel"]["5"] is None
    assert (
        measure_novelty(corpus, ["abcabc"])["novel"]["5"] == 0.0
        and measure_novelty(corpus, ["xyzxyz"])["novel"]["5"] == 1.0
    )
    assert SuffixArray("").match_lengths("ab").tolist() == [0, 0]
