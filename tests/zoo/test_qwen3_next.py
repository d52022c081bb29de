"""experiments/zoo/qwen3_next.py: the logits of transformers' model with random weights, cached decoding, refusals."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import apply, import_pages

(page,) = import_pages("zoo", "qwen3_next")

SIZES = {
    **dict(vocab_size=37, hidden_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2),
    **dict(head_dim=8, linear_key_head_dim=6, linear_value_head_dim=10, linear_num_key_heads=2),
    **dict(linear_num_value_heads=4, linear_conv_kernel_dim=3, num_experts=5, num_experts_per_tok=2),
    **dict(moe_intermediate_size=12, shared_expert_intermediate_size=20, max_position_embeddings=128),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """(a model of transformers with random weights, the directory in which it is saved)"""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_((0.02 if "A_log" in name else 0.1) * torch.randn(x.shape))
    directory = tmp_path_factory.mktemp("qwen3_next")
    model.save_pretrained(directory)
    return model, directory


def test_logits_are_those_of_transformers(theirs):
    import torch

    model, directory = theirs
    tokens = np.random.default_rng(0).integers(0, 37, size=(2, 100))  # longer than a chunk of 64
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    config, params = page.read_model(str(directory))
    assert [config.attend_every, config.rope_fraction, config.shared_dim] == [4, 0.25, 20]
    logits = apply(config.make_model(), params, jnp.asarray(tokens))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
