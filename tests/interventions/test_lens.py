"""The lenses equal what they are by definition, and a probe finds what is linear."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.interventions import fit_jacobian_lens, fit_probe, logit_lens, run
from jaxgpt.sample.quantize import unstack_layers
from tests.helpers import apply
from tests.interventions.test_edits import CONFIGS, TOKENS, make, quick


def test_the_jacobian_lens_is_the_mean_jacobian():
    model, params = make(CONFIGS["gpt2"])
    B, T, D = *TOKENS.shape, model.config.n_embd
    found = fit_jacobian_lens(model, params, TOKENS, skip_first=2)
    chex.assert_shape(found, (2, D, D))
    stream_BTD, valid = run(model, params, TOKENS, read=["h_0/stream"]).activations["h_0/stream"], slice(2, T - 1)

    def after(x_TD):  # by the model's own last block
        return model.apply({"params": params}, x_TD[None], method=lambda module, x_BTD: module.h[1](x_BTD))[0]

    jacobian = jax.jit(jax.jacrev(after))
    mean_DD = sum(jacobian(x_TD)[valid, :, valid].sum(axis=(0, 2)) for x_TD in stream_BTD) / (B * (T - 3))
    chex.assert_trees_all_close(found[1], mean_DD, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="skip_first=10 of 11 tokens: give 0 to 9"):
        fit_jacobian_lens(model, params, TOKENS, skip_first=10)


@quick(["gpt2", "sandwich", "post"], default=["sandwich"])
def test_the_lenses_end_in_the_models_logits(name):
    model, params = make(CONFIGS[name])
    logits_BTV = apply(model, params, TOKENS)
    lens = logit_lens(model, params, TOKENS)
    assert lens.shape == (3, *logits_BTV.shape)
    chex.assert_trees_all_close(lens[-1], logits_BTV, rtol=1e-4, atol=1e-4)
    D = model.config.n_embd
    chex.assert_trees_all_close(logit_lens(model, params, TOKENS, jnp.stack([jnp.eye(D)] * 2)), lens, atol=1e-4)
    transport_LDD = jax.random.normal(jax.random.key(2), (2, D, D))
    carried = logit_lens(model, params, TOKENS, transport_LDD)
    chex.assert_trees_all_close(carried[-1], logits_BTV, rtol=1e-4, atol=1e-4)
    x_BTD = run(model, params, TOKENS, read=["h_0/stream"]).activations["h_0/stream"] @ transport_LDD[1].T
    model, params = unstack_layers(model, params)
    by_hand = model.apply({"params": params}, x_BTD, method=lambda m, x_BTD: m.unembed(m.norm_output(x_BTD)))
    chex.assert_trees_all_close(carried[1], by_hand, rtol=1e-3, atol=1e-3)


def test_a_probe_finds_what_is_linear_and_scores_it_on_other_rows():
    rng = np.random.default_rng(0)
    x_UD = rng.normal(size=(800, 6)) * [1, 10, 0.1, 1, 1, 1] + 3
    linear_U = ((x_UD[:, 0] - 3) + 10 * (x_UD[:, 2] - 3) > 0).astype(int)
    found = fit_probe(x_UD, linear_U)
    assert found.accuracy > 0.97 and found.loss < 0.15 and 0.4 < found.chance < 0.6
    logits_UC = x_UD[600:] @ found.weights_DC + found.bias_C
    assert (logits_UC.argmax(axis=1) == linear_U[600:]).mean() == found.accuracy
    noise = fit_probe(x_UD, rng.integers(0, 2, 800))
    assert abs(noise.accuracy - 0.5) < 0.1
    with pytest.raises(UserError, match=r"activations \[800, 6\], labels \[3\] int64: give"):
        fit_probe(x_UD, [0, 1, 0])
    with pytest.raises(UserError, match="1 rows with held_out=0.25: give rows to fit and rows to score"):
        fit_probe(x_UD[:1], [0])
