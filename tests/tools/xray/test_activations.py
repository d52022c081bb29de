"""What is seen inside a model is what the model does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers.norm import layer_norm, rms_norm
from jaxgpt.tools.xray.xray import capture_activations, top_activating_examples
from tests.helpers import FLOAT32_REORDERED, TINY, apply, make_model

TOKENS = [1, 2, 3, 10, 0, 1, 7]
EVERY = {
    "post": {"norm_position": "post", "activation": "relu", "position": "sinusoidal"},
    "output": {"norm_position": "output", "norm": "rmsnorm"},
    "sandwich": {"norm_position": "sandwich", "norm": "rmsnorm", "norm_offset": True, "activation": "swiglu"},
    "parallel": {
        "parallel_residual": True,
        "n_kv_head": 1,
        "position": "rope",
        "qk_norm": True,
        "sliding_window": 3,
        "tie_embeddings": False,
    },
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("output", "sandwich")]


@pytest.fixture(scope="module", params=["post", "parallel", *SLOW])
def seen(request):
    model, params = make_model(dataclasses.replace(TINY, **EVERY[request.param]))
    return model, params, capture_activations(model, params, TOKENS)


def test_the_guess_is_the_models_and_so_is_the_last_lens(seen):
    model, params, found = seen
    logits_TV = apply(model, params, jnp.array([TOKENS]))[0]
    logprobs_TV = jax.nn.log_softmax(logits_TV)
    np.testing.assert_allclose(found.logits_V, logits_TV[-1], **FLOAT32_REORDERED)
    assert (found.guess.tokens_TK[:, 0] == np.argmax(logits_TV, axis=1)).all()
    came = [logprobs_TV[t, token] for t, token in enumerate(TOKENS[1:])]
    np.testing.assert_allclose(found.guess.logprob_T[:-1], came, **FLOAT32_REORDERED)
    assert np.isnan(found.guess.logprob_T[-1])
    assert len(found.lens) == TINY.n_layer + 1
    probabilities_TK = found.guess.probabilities_TK[:, :3]
    np.testing.assert_allclose(found.lens[-1].probabilities_TK, probabilities_TK, **FLOAT32_REORDERED)
    assert (found.lens[-1].tokens_TK == found.guess.tokens_TK[:, :3]).all()
    assert np.abs(found.lens[0].probabilities_TK - probabilities_TK).max() > 1e-3


def test_norms_and_branches_are_what_linen_captures(seen):
    """What a norm says it read gives what it made, and both it and what is added are outputs of the model's modules."""
    model, params, found = seen
    config = model.config
    _, kept = model.apply({"params": params}, jnp.array([TOKENS]), capture_intermediates=True)

    def output(path):
        return functools.reduce(lambda tree, name: tree[name], path.split("/"), kept["intermediates"])["__call__"][0][0]

    for norm in found.norms:
        scaled = (norm.before_TD, norm.scale_D, norm.bias_D, config.norm_eps)
        after_TD = layer_norm(*scaled) if config.norm == "layernorm" else rms_norm(*scaled[:2], config.norm_eps)
        np.testing.assert_allclose(norm.after_TD, after_TD, **FLOAT32_REORDERED)
        np.testing.assert_allclose(norm.after_TD, output(norm.name), **FLOAT32_REORDERED)
    normed = {"output": {"attn": "ln_1", "mlp": "ln_2"}, "sandwich": {"attn": "ln_1_out", "mlp": "ln_2_out"}}
    names = normed.get(config.norm_position, {})
    assert [b.name for b in found.branches] == ["h_0/attn", "h_0/mlp", "h_1/attn", "h_1/mlp"]
    for branch in found.branches:
        block, part = branch.name.split("/")
        added_TD = output(f"{block}/{names.get(part, part)}")
        np.testing.assert_allclose(np.linalg.norm(added_TD, axis=1), branch.added_T, **FLOAT32_REORDERED)
        if part == "mlp":
            np.testing.assert_allclose(np.linalg.norm(output(block), axis=1), branch.stream_T, **FLOAT32_REORDERED)


def test_padding_of_the_vocabulary_is_left_out():
    model, params = make_model(TINY)
    found = capture_activations(model, params, [1, 2, 3], vocab_size=4)
    assert found.logits_V.shape == (4,) and found.guess.tokens_TK.max() < 4
    np.testing.assert_allclose(found.guess.probabilities_TK.sum(axis=1), 1, **FLOAT32_REORDERED)


@pytest.mark.parametrize("count", [3, pytest.param(11, marks=pytest.mark.slow)])
def test_places_are_those_of_the_largest_activations(count):
    model, params = make_model(dataclasses.replace(TINY, activation="gelu"))
    windows_NT = np.random.default_rng(0).integers(0, TINY.vocab_size, (count, 8))
    values, places = top_activating_examples(model, params, windows_NT)
    hidden = [capture_activations(model, params, row.tolist()).hidden_LTF for row in windows_NT]
    for layer in range(TINY.n_layer):
        hidden_NTF = np.stack([of_window[layer] for of_window in hidden])
        peak_NF = hidden_NTF.max(axis=1)
        order_NF = np.argsort(-peak_NF, axis=0, kind="stable")[:4]
        expected_KF = np.take_along_axis(peak_NF, order_NF, axis=0)
        np.testing.assert_allclose(values[layer], expected_KF.T, **FLOAT32_REORDERED)
        flat_MF = hidden_NTF.reshape(-1, hidden_NTF.shape[-1])
        there_FK = np.take_along_axis(flat_MF.T, places[layer], axis=1)
        np.testing.assert_allclose(there_FK, values[layer], **FLOAT32_REORDERED)
        assert (np.diff(np.sort(places[layer] // 8, axis=1), axis=1) > 0).all()  # each of another window
