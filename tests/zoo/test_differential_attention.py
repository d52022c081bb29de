"""experiments/zoo/differential_attention.py: against transformers' DiffLlama, and loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.layers.block import Compute
from tests.helpers import TINY, import_pages

(page,) = import_pages("zoo", "differential_attention")

CONFIG = page.DifferentialConfig(
    **dataclasses.asdict(TINY) | dict(position="rope", norm="rmsnorm", bias=False, n_embd=24, n_head=4)
)


def make(config, layer):
    module = config.make_attention(layer, Compute())
    x_BTD = jax.random.normal(jax.random.key(0), (1, 6, 24))
    params = module.init(jax.random.key(1), x_BTD)["params"]
    params = jax.tree.map(lambda p: p + 0.4 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    return module, params, x_BTD


def test_output_is_that_of_transformers():
    torch, theirs = (
        pytest.importorskip("torch"),
        pytest.importorskip("transformers.models.diffllama.modeling_diffllama"),
    )
    module, params, x_BTD = make(CONFIG, 2)
    params["pair_norm"]["scale"] = jnp.ones(12)  # they have none
    config = theirs.DiffLlamaConfig(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=4, rms_norm_eps=1e-5, attn_implementation="eager"
    )
    attention = theirs.DiffLlamaAttention(config, 2)
    of_theirs = np.array([0, 2, 1, 3])  # our head 2i is theirs i, and 2i + 1 is i + N / 2

    def reorder(kernel):  # [D, N H] -> [N H, D] in their order of heads
        heads = np.empty((4, 6, 24), np.float32)
        heads[of_theirs] = np.asarray(kernel).T.reshape(4, 6, 24)
        return torch.from_numpy(heads.reshape(24, 24))

    with torch.no_grad():
        for name in "qkv":
            getattr(attention, f"{name}_proj").weight.copy_(reorder(params[name]["kernel"]))
        attention.o_proj.weight.copy_(torch.from_numpy(np.array(params["c_proj"]["kernel"]).T))
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(attention, name).copy_(torch.from_numpy(np.array(params[name])))
        x = torch.from_numpy(np.array(x_BTD))
        turns = theirs.DiffLlamaRotaryEmbedding(config)(x, torch.arange(6)[None])
        mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
        expected = attention(x, turns, attention_mask=mask)[0].numpy()
    np.testing.assert_allclose(module.apply({"params": params}, x_BTD), expected, rtol=1e-4, atol=1e-4)
