"""Activation patching: equal to whole forward passes with one activation replaced."""

import chex
import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.interventions import patch, patching, replace, run, run_each
from tests.interventions.test_edits import CONFIGS, SIZE, TOKENS, make

INTO, SOURCE = TOKENS[0], TOKENS[1]
HEADS = ("heads", "queries", "keys", "pattern")
POST = GPTConfig(**SIZE, norm_position="post")
OUTPUT = GPTConfig(**SIZE, norm_position="output", attention_softcap=9.0)
CASES = {
    **{f"heads {name}": ("heads", config) for name, config in CONFIGS.items()},
    "heads post": ("heads", POST),
    "attention": ("attention", OUTPUT),
    "middle": ("middle", CONFIGS["parallel"]),
    "mlp": ("mlp", CONFIGS["sandwich"]),
    "stream": ("stream", CONFIGS["gqa"]),
    "keys": ("keys", CONFIGS["gqa"]),
    "pattern": ("pattern", CONFIGS["gpt2"]),
}


def difference(logits_V):
    return logits_V[3] - logits_V[5]


def last_difference(logits_BTV):
    return difference(logits_BTV[0, -1])


def by_hand(model, params, place, layer):
    """Return the metric of all patches in one layer, by whole forward passes."""
    name = f"h_{layer}/{place}"
    source = np.array(run(model, params, SOURCE[None], read=[name]).activations[name][0])
    heads = range(source.shape[1]) if place in HEADS else [None]
    by = [source[p] if n is None else source[p, n] for p in range(len(source)) for n in heads]
    edits = [
        [replace(place, layer, index=n, positions=p, by=by[i] if n is None else by[i][None, None])]
        for i, (p, n) in enumerate((p, n) for p in range(len(source)) for n in heads)
    ]
    values = np.array(run_each(model, params, INTO[None], edits, last_difference))
    return values if place not in HEADS else values.reshape(len(source), -1)


# Each configuration once, at some place; the heads of all of them by `-m slow`.
REPEATED = ("heads sandwich", "heads parallel")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in CASES]
)
def test_a_patch_equals_a_whole_forward_pass_with_one_activation_replaced(name, monkeypatch):
    place, config = CASES[name]
    model, params = make(config)
    monkeypatch.setattr(patching, "AT_ONCE", 100)  # several batches, of repeated rows and tokens too
    found = patch(model, params, INTO, SOURCE, place, difference)
    expected = np.stack([by_hand(model, params, place, layer) for layer in range(config.n_layer)])
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(found, axis=1).max() > 0.1


def test_a_patch_by_itself_changes_nothing_and_programs_are_compiled_once():
    model, params = make(CONFIGS["gpt2"])
    found = patch(model, params, INTO, INTO, "heads", difference)
    plain = last_difference(run(model, params, INTO[None]).logits_BTV)
    chex.assert_trees_all_close(found, np.full((2, 11, 4), plain), atol=1e-4)
    sizes = [f._cache_size() for f in (patching._finish_block, patching._start, patching._continue, patching._measure)]
    patch(model, params, INTO, SOURCE, "heads", difference)
    assert sizes == [
        f._cache_size() for f in (patching._finish_block, patching._start, patching._continue, patching._measure)
    ]


@pytest.mark.parametrize(
    "into, source, place, words",
    [
        (INTO, SOURCE, "head", "place='head': needs one of queries, keys"),
        (INTO, SOURCE, "embedding", "place='embedding': needs one of queries, keys"),
        (INTO, SOURCE[:4], "heads", r"tokens of shapes \[11\] and \[4\]: needs \[T\] twice"),
        (INTO, SOURCE + 23, "heads", "tokens from .*: needs 0 to 22"),
    ],
)
def test_a_wrong_patch_is_one_clear_line(into, source, place, words):
    with pytest.raises(UserError, match=words):
        patch(*make(CONFIGS["gpt2"]), into, source, place, difference)
