"""How adapters begin; what is trained of them is in runs/test_pretrained.py."""

import jax
import numpy as np

from jaxgpt.config import LoraConfig
from jaxgpt.lora import init_adapters


def test_a_is_drawn_for_each_matrix_and_b_is_zero():
    """Two matrices of one shape: each a is normal with a variance of 1 / D."""
    params = {"h_0": {"attn": {name: {"kernel": np.zeros((400, 100))} for name in ("q", "k", "v")}}}
    adapters = init_adapters(LoraConfig(rank=50, targets=("q", "v")), jax.random.key(0), params)["h_0"]["attn"]
    assert set(adapters) == {"q", "v"}
    for adapter in adapters.values():
        assert adapter["lora_a"].shape == (400, 50) and adapter["lora_b"].shape == (50, 100)
        np.testing.assert_allclose(np.std(adapter["lora_a"]) * 400**0.5, 1.0, atol=0.03)  # 6 standard errors of 20,000
        assert not adapter["lora_b"].any()
    assert abs(np.corrcoef(*(adapter["lora_a"].ravel() for adapter in adapters.values()))[0, 1]) < 0.05
