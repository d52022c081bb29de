"""experiments/interpretability: the analyses are what they are by definition, and a study of a run uses them."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.interventions import logit_lens, run
from jaxgpt.sample.quantize import unstack_layers
from tests.helpers import import_pages, quick
from tests.interventions.test_edits import CONFIGS, TOKENS, make

analyses, study = import_pages("interpretability", "analyses", "inspect_run")

PRE = {
    **{name: config for name, config in CONFIGS.items() if config.norm_position == "pre"},
    "offset": dataclasses.replace(CONFIGS["gqa"], norm_offset=True, scan_layers=True),
}


@quick(PRE, "offset")
def test_contributions_sum_to_the_difference_of_the_logits(name):
    model, params = make(PRE[name])
    found = analyses.logit_attribution(model, params, TOKENS[0], 3, 5)
    logits_V = run(model, params, TOKENS[:1]).logits_BTV[0, -1]
    chex.assert_trees_all_close(found.total(), logits_V[3] - logits_V[5], atol=1e-4, rtol=1e-4)
    assert found.heads_LN.shape == (2, 4) and found.mlps_L.shape == found.biases_L.shape == (2,)
    assert all(np.abs(x).max() > 1e-3 for x in (found.embedding, found.heads_LN, found.mlps_L))
    if name == "gpt2":
        read = run(model, params, TOKENS[:1], read=["h_0/heads", "h_1/stream"]).activations
        written_D = read["h_0/heads"][0, -1, 2] @ params["h_0"]["attn"]["c_proj"]["kernel"][8:12]  # head 2 of size 4
        normed_D = (written_D - written_D.mean()) / read["h_1/stream"][0, -1].std() * params["ln_f"]["scale"]
        rows_VD = params["wte"]["embedding"]
        chex.assert_trees_all_close(found.heads_LN[0, 2], normed_D @ (rows_VD[3] - rows_VD[5]), rtol=1e-4)


def test_scores_are_means_of_patterns():
    """On two rows, against loops over the patterns that `run` reads."""
    model, params = make(CONFIGS["gqa"])
    tokens_BT = analyses.repeat_random_tokens(23, period=5, length=13, rows=2)
    assert (tokens_BT[:, 5:] == tokens_BT[:, :-5]).all() and (tokens_BT[0] != tokens_BT[1]).any()
    names = ["h_0/pattern", "h_1/pattern"]
    patterns_LBTNS = np.stack([x for x in run(model, params, tokens_BT, read=names).activations.values()])
    induction = np.mean([patterns_LBTNS[:, :, t, :, t - 4] for t in range(5, 13)], axis=(0, 2))
    previous = np.mean([patterns_LBTNS[:, :, t, :, t - 1] for t in range(1, 13)], axis=(0, 2))
    chex.assert_trees_all_close(analyses.induction_scores(model, params, tokens_BT, period=5), induction, atol=1e-6)
    chex.assert_trees_all_close(analyses.previous_token_scores(model, params, tokens_BT), previous, atol=1e-6)
    assert induction.shape == (2, 4) and np.abs(induction - previous).max() > 0.01


@pytest.mark.slow
def test_the_jacobian_lens_is_the_mean_jacobian():
    model, params = make(CONFIGS["gpt2"])
    B, T = TOKENS.shape
    found = analyses.fit_jacobian_lens(model, params, TOKENS, skip_first=2)
    stream_BTD, valid = run(model, params, TOKENS, read=["h_0/stream"]).activations["h_0/stream"], slice(2, T - 1)

    def after(x_TD):  # by the model's own last block
        return model.apply({"params": params}, x_TD[None], method=lambda module, x_BTD: module.h[1](x_BTD))[0]

    jacobian = jax.jit(jax.jacrev(after))
    mean_DD = sum(jacobian(x_TD)[valid, :, valid].sum(axis=(0, 2)) for x_TD in stream_BTD) / (B * (T - 3))
    chex.assert_trees_all_close(found[1], mean_DD, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_jacobian_lens_carries_each_stream_to_the_last_layer():
    """An identity leaves the logit lens."""
    model, params = make(CONFIGS["sandwich"])
    D, lens = model.config.n_embd, logit_lens(model, params, TOKENS)
    transport_LDD = jnp.stack([jnp.eye(D), jax.random.normal(jax.random.key(2), (D, D))])
    carried = analyses.jacobian_lens(model, params, TOKENS, transport_LDD)
    chex.assert_trees_all_close(carried[::2], lens[::2], rtol=1e-4, atol=1e-4)
    x_BTD = run(model, params, TOKENS, read=["h_0/stream"]).activations["h_0/stream"] @ transport_LDD[1].T
    model, params = unstack_layers(model, params)
    by_hand = model.apply({"params": params}, x_BTD, method=lambda m, x_BTD: m.unembed(m.norm_output(x_BTD)))
    chex.assert_trees_all_close(carried[1], by_hand, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_probe_finds_what_is_linear_and_scores_it_on_other_rows():
    rng = np.random.default_rng(0)
    x_UD = rng.normal(size=(800, 6)) * [1, 10, 0.1, 1, 1, 1] + 3
    linear_U = ((x_UD[:, 0] - 3) + 10 * (x_UD[:, 2] - 3) > 0).astype(int)
    found = analyses.fit_probe(x_UD, linear_U)
    assert found.accuracy > 0.97 and found.loss < 0.15 and 0.4 < found.chance < 0.6
    logits_UC = x_UD[600:] @ found.weights_DC + found.bias_C
    assert (logits_UC.argmax(axis=1) == linear_U[600:]).mean() == found.accuracy
    noise = analyses.fit_probe(x_UD, rng.integers(0, 2, 800))
    assert abs(noise.accuracy - 0.5) < 0.1


@pytest.mark.slow
def test_the_study_of_a_run(tiny_run, tmp_path, capsys):
    run = tiny_run
    scores = study.main([str(run.directory), "--rows", "2", "--out", str(tmp_path / "heads.png")])
    c, said = run.model.config, capsys.readouterr().out
    assert scores["induction"].shape == scores["previous token"].shape == (c.n_layer, c.n_head)
    assert f"| h_{c.n_layer - 1}/stream | 1.00 | 1.00 |" in said and said.count("|") == 5 * (c.n_layer + 3)
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")
