"""The analyses equal the same edits made by hand, and refuse bad arguments in one clear line."""

import chex
import numpy as np
import pytest
from scipy import stats

from jaxgpt.errors import UserError
from jaxgpt.interventions import ablate_all, analyses, logit_lens, patch, replace, run, run_each, token_losses, zero
from jaxgpt.interventions.model import _run_each
from jaxgpt.model import GPTConfig
from jaxgpt.sample.quantize import unstack_layers
from tests.helpers import apply, quick
from tests.interventions.test_edits import CONFIGS, SIZE, TOKENS, make

# Ablation -------------------------------------------------------------------------------------------------------------

ROWS = np.random.default_rng(1).integers(0, 23, (3, 9))


def row_losses(model, params, edits):
    return np.asarray(token_losses(run(model, params, ROWS, edits).logits_BTV, ROWS).mean(axis=1))


@pytest.mark.parametrize("by", [pytest.param("zero", marks=pytest.mark.slow), "mean"])
def test_each_part_is_as_if_ablated_by_hand(by):
    """The rise is the mean of paired differences of rows, with scipy's own interval."""
    model, params = make(CONFIGS["gqa"])
    found = ablate_all(model, params, ROWS, by=by)
    plain = row_losses(model, params, [])
    read = run(model, params, ROWS, read=["h_0/heads", "h_1/mlp"]).activations
    means = {name: np.asarray(x)[:, :-1].mean(axis=(0, 1)) for name, x in read.items()}
    head = zero("heads", 0, index=2) if by == "zero" else replace("heads", 0, by=means["h_0/heads"][2], index=2)
    mlp = zero("mlp", 1) if by == "zero" else replace("mlp", 1, by=means["h_1/mlp"])
    chex.assert_trees_all_close(found.loss, plain.mean(), rtol=1e-5)
    assert found.heads.mean.shape == found.heads.margin.shape == (2, 4) and found.mlps.mean.shape == (2,)
    for edit, rise, margin in (
        (head, found.heads.mean[0, 2], found.heads.margin[0, 2]),
        (mlp, found.mlps.mean[1], found.mlps.margin[1]),
    ):
        differences = row_losses(model, params, [edit]) - plain
        expected = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        chex.assert_trees_all_close([rise - margin, rise + margin], list(expected), atol=1e-4)
        assert abs(rise) > 1e-3
    compiled = _run_each._cache_size()
    ablate_all(model, params, ROWS[:, ::-1], by=by)
    assert _run_each._cache_size() == compiled


# Patching -------------------------------------------------------------------------------------------------------------

INTO, SOURCE = TOKENS[0, :6], TOKENS[1, :6]
PATCHES = {  # each place, and each kind of block
    "attention": GPTConfig(**SIZE, norm_position="output", attention_softcap=9.0),
    "middle": CONFIGS["parallel"],
    "mlp": CONFIGS["sandwich"],
    "stream": CONFIGS["gqa"],
    "units": CONFIGS["gpt2"],
    "keys": CONFIGS["gqa"],
    "pattern": CONFIGS["gpt2"],
    "heads": CONFIGS["post"],
}


def difference(logits_V):
    return logits_V[3] - logits_V[5]


def count_compiled():
    return [f._cache_size() for f in (analyses._run_patched_block, analyses._run_block, analyses._measure)]


def last_difference(logits_BTV):
    return difference(logits_BTV[0, -1])


@quick(PATCHES, "stream")
def test_a_patch_equals_a_whole_forward_pass_with_one_activation_replaced(name, monkeypatch):
    """And by itself it changes nothing; programs are compiled once."""
    model, params = make(PATCHES[name])
    monkeypatch.setattr(analyses, "AT_ONCE", 100)  # several batches, of which the last is not full
    found = patch(model, params, INTO, SOURCE, name, difference)
    for layer in range(model.config.n_layer):
        read = f"h_{layer}/{name}"
        source = np.array(run(model, params, SOURCE[None], read=[read]).activations[read][0])
        heads = range(source.shape[1]) if name in analyses.BY_HEAD else [None]
        edits = [
            [replace(name, layer, index=n, positions=p, by=source[p] if n is None else source[p, n][None, None])]
            for p in range(len(source))
            for n in heads
        ]
        expected = run_each(model, params, INTO[None], edits, last_difference)
        chex.assert_trees_all_close(found[layer].ravel(), expected, rtol=1e-4, atol=1e-4)
    assert np.ptp(found, axis=1).max() > 0.1
    compiled = count_compiled()
    plain = last_difference(run(model, params, INTO[None]).logits_BTV)
    same = patch(model, params, INTO, INTO, name, difference)
    chex.assert_trees_all_close(same, np.full(found.shape, plain), atol=1e-4)
    assert count_compiled() == compiled


@quick(["gpt2", "sandwich", "post"], "sandwich")
def test_the_lens_ends_in_the_models_logits(name):
    model, params = make(CONFIGS[name])
    lens = logit_lens(model, params, TOKENS)
    chex.assert_shape(lens, (3, *TOKENS.shape, 23))
    chex.assert_trees_all_close(lens[-1], apply(model, params, TOKENS), rtol=1e-4, atol=1e-4)
    x_BTD = run(model, params, TOKENS, read=["h_0/stream"]).activations["h_0/stream"]
    model, params = unstack_layers(model, params)
    by_hand = model.apply({"params": params}, x_BTD, method=lambda m, x_BTD: m.unembed(m.norm_output(x_BTD)))
    chex.assert_trees_all_close(lens[1], by_hand, rtol=1e-3, atol=1e-3)


def test_what_an_analysis_refuses_is_one_clear_line():
    for call, args, how, words in (
        (ablate_all, [ROWS], {"by": "median"}, "by='median': needs one of zero, mean"),
        (patch, [INTO, SOURCE + 23, "heads", difference], {}, "the model knows 0 to 22"),
    ):
        model, params = make(CONFIGS["gpt2"])
        with pytest.raises(UserError, match=words):
            call(model, params, *args, **how)
