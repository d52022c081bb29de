"""The analyses equal the same edits made by hand, and refuse bad arguments in one clear line."""

import dataclasses

import chex
import numpy as np
import pytest
from scipy import stats

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.interventions import (
    ablate_all,
    analyses,
    induction_scores,
    logit_attribution,
    patch,
    plot_heatmap,
    repeat_random_tokens,
    replace,
    run,
    run_each,
    token_losses,
    zero,
)
from jaxgpt.interventions import previous_token_scores as previous_scores
from jaxgpt.interventions.model import _run_each
from tests.interventions.test_edits import CONFIGS, SIZE, TOKENS, make, quick

# Ablation -------------------------------------------------------------------------------------------------------------

ROWS = np.random.default_rng(1).integers(0, 23, (3, 9))
MASK = np.arange(8) >= np.array([[0], [3], [5]])


def row_losses(model, params, edits):
    return np.asarray(token_losses(run(model, params, ROWS, edits).logits_BTV, ROWS).mean(axis=1, where=MASK))


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_each_part_is_as_if_ablated_by_hand(by):
    """The rise is the mean of paired differences of rows, with scipy's own interval."""
    model, params = make(CONFIGS["gqa"])
    found = ablate_all(model, params, ROWS, by=by, mask_BT=MASK)
    plain = row_losses(model, params, [])
    read = run(model, params, ROWS, read=["h_0/heads", "h_1/mlp"]).activations
    means = {name: np.asarray(x)[:, :-1][MASK].mean(axis=0) for name, x in read.items()}
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
    ablate_all(model, params, ROWS[:, ::-1], by=by, mask_BT=MASK)
    assert _run_each._cache_size() == compiled


# Patching -------------------------------------------------------------------------------------------------------------

INTO, SOURCE = TOKENS[0], TOKENS[1]
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


def last_difference(logits_BTV):
    return difference(logits_BTV[0, -1])


@quick(PATCHES, default=["stream", "pattern"])
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
    sizes = [f._cache_size() for f in (analyses._run_patched_block, analyses._run_block, analyses._measure)]
    plain = last_difference(run(model, params, INTO[None]).logits_BTV)
    same = patch(model, params, INTO, INTO, name, difference)
    chex.assert_trees_all_close(same, np.full(found.shape, plain), atol=1e-4)
    assert sizes == [f._cache_size() for f in (analyses._run_patched_block, analyses._run_block, analyses._measure)]


# Attribution ----------------------------------------------------------------------------------------------------------

PRE = {
    **{name: config for name, config in CONFIGS.items() if config.norm_position == "pre"},
    "offset": dataclasses.replace(CONFIGS["gqa"], norm_offset=True, scan_layers=True),
}


@quick(PRE, default=["gpt2", "offset"])
def test_contributions_sum_to_the_difference_of_the_logits(name):
    model, params = make(PRE[name])
    found = logit_attribution(model, params, TOKENS[0], 3, 5)
    expected = last_difference(run(model, params, TOKENS[:1]).logits_BTV)
    chex.assert_trees_all_close(found.total(), expected, atol=1e-4, rtol=1e-4)
    assert found.heads_LN.shape == (2, 4) and found.mlps_L.shape == found.biases_L.shape == (2,)
    assert all(np.abs(x).max() > 1e-3 for x in (found.embedding, found.heads_LN, found.mlps_L))
    if name == "gpt2":
        read = run(model, params, TOKENS[:1], read=["h_0/heads", "h_1/stream"]).activations
        written_D = read["h_0/heads"][0, -1, 2] @ params["h_0"]["attn"]["c_proj"]["kernel"][8:12]  # head 2 of size 4
        normed_D = (written_D - written_D.mean()) / read["h_1/stream"][0, -1].std() * params["ln_f"]["scale"]
        rows_VD = params["wte"]["embedding"]
        chex.assert_trees_all_close(found.heads_LN[0, 2], normed_D @ (rows_VD[3] - rows_VD[5]), rtol=1e-4)


# Scores ---------------------------------------------------------------------------------------------------------------


def test_scores_are_means_of_patterns():
    """On two rows, against loops over the patterns that `run` reads."""
    model, params = make(CONFIGS["gqa"])
    tokens_BT = repeat_random_tokens(23, period=5, length=13, rows=2)
    assert (tokens_BT[:, 5:] == tokens_BT[:, :-5]).all() and (tokens_BT[0] != tokens_BT[1]).any()
    names = ["h_0/pattern", "h_1/pattern"]
    patterns_LBTNS = np.stack([x for x in run(model, params, tokens_BT, read=names).activations.values()])
    induction = np.mean([patterns_LBTNS[:, :, t, :, t - 4] for t in range(5, 13)], axis=(0, 2))
    previous = np.mean([patterns_LBTNS[:, :, t, :, t - 1] for t in range(1, 13)], axis=(0, 2))
    chex.assert_trees_all_close(induction_scores(model, params, tokens_BT, period=5), induction, atol=1e-6)
    chex.assert_trees_all_close(previous_scores(model, params, tokens_BT), previous, atol=1e-6)
    assert induction.shape == (2, 4) and np.abs(induction - previous).max() > 0.01


# Plots and refusals ---------------------------------------------------------------------------------------------------


def test_a_heatmap_names_its_rows_and_columns(tmp_path):
    values = np.array([[0.5, -1.0, 0.0], [0.0, 2.0, np.nan]])
    figure = plot_heatmap(values, title="patching", unit="nats", columns=["a", "$b$", "_"])
    figure.savefig(tmp_path / "heads.png")
    axes, scale = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1"]
    assert scale.get_ylabel() == "nats"
    assert axes.images[0].get_clim() == (-2.0, 2.0)


DECOMPOSE = "the logits are not a sum of what each part writes. Give a model with 'pre' and None"


def test_what_an_analysis_refuses_is_one_clear_line():
    for call, args, how, words in (
        (ablate_all, [ROWS], {"by": "median"}, "by='median': needs zero or mean"),
        (ablate_all, [ROWS[:1]], {}, "1 row: give at least 2 for an interval"),
        (ablate_all, [ROWS], {"mask_BT": MASK[:, 1:]}, r"mask of shape \[3, 7\]: give \[3, 8\], with a target in"),
        (ablate_all, [ROWS], {"mask_BT": MASK & (MASK.sum(1, keepdims=True) > 3)}, "with a target in each row"),
        (patch, [INTO, SOURCE, "head", difference], {}, "place='head': needs one of queries, keys"),
        (patch, [INTO, SOURCE[:4], "heads", difference], {}, r"tokens of shapes \[11\] and \[4\]: give \[T\] twice"),
        (patch, [INTO, SOURCE + 23, "heads", difference], {}, "tokens from .*: give 0 to 22"),
        (logit_attribution, [INTO, 3, 23], {}, "tokens 3 and 23: give 0 to 22"),
        (logit_attribution, [INTO, 3, 5], {"config": CONFIGS["sandwich"]}, DECOMPOSE),
        (logit_attribution, [INTO, 3, 5], {"config": GPTConfig(**SIZE, logit_softcap=9.0)}, DECOMPOSE),
        (induction_scores, [TOKENS], {"period": 5}, "period=5: the tokens do not repeat after 5"),
        (induction_scores, [TOKENS], {"period": 11}, "period=11: needs 2 to 10, so that the segment begins again"),
        (previous_scores, [TOKENS[:, :1]], {}, "tokens of 1 per row: give at least 2"),
    ):
        model, params = make(how.get("config", CONFIGS["gpt2"]))
        with pytest.raises(UserError, match=words):
            call(model, params, *args, **{name: value for name, value in how.items() if name != "config"})
