"""experiments/zoo/qwen3_next.py: the logits of transformers' model with random weights, cached decoding, refusals."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
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


@pytest.mark.parametrize(
    "change", [{"mlp_only_layers": [1]}, {"model_type": "qwen3_moe"}, {"rope_scaling": {"factor": 4.0}}]
)
def test_another_architecture_is_refused(tmp_path, change):
    config = SIZES | {"model_type": "qwen3_next", "rope_theta": 1e7, "rms_norm_eps": 1e-6, "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert page.read_config(tmp_path).n_expert == 5
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match="this page knows"):
        page.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next"}))
    with pytest.raises(UserError, match="has no vocab_size"):
        page.read_config(tmp_path)


def test_the_small_one_has_every_part():
    config = dataclasses.replace(page.experiment.model, vocab_size=65)
    shapes = config.make_model().shapes()
    assert {"conv", "log_rate"} < set(shapes["h_2"]["attn"]) and "gate" in shapes["h_3"]["attn"]
    assert {"router", "shared", "shared_gate", "c_fc"} < set(shapes["h_0"]["mlp"])
