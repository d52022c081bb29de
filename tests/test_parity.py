"""The outside oracle: transformers' GPT-2 on random weights gives the logits that ours gives with the same weights."""

from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.model import GPT
from tests.helpers import apply, stack_layers

GOLDEN = Path(__file__).parent / "golden" / "gpt2.npz"

# Two implementations of float32, logits up to about 10 in size.
PARITY = dict(rtol=1e-4, atol=1e-4)


def ours(golden) -> dict:
    """transformers' GPT-2 weights under our names. Its Conv1D keeps kernels as [in, out], as linen does."""

    def get(name):
        return golden[f"weights/transformer.{name}"]

    def norm(name):
        return {"scale": get(f"{name}.weight"), "bias": get(f"{name}.bias")}

    def linear(name):
        return {"kernel": get(f"{name}.weight"), "bias": get(f"{name}.bias")}

    def block(name):
        c_attn = linear(f"{name}.attn.c_attn")
        split = {part: np.split(value, 3, axis=-1) for part, value in c_attn.items()}
        qkv = {head: {part: split[part][i] for part in split} for i, head in enumerate("qkv")}
        return {
            "ln_1": norm(f"{name}.ln_1"),
            "ln_2": norm(f"{name}.ln_2"),
            "attn": {**qkv, "c_proj": linear(f"{name}.attn.c_proj")},
            "mlp": {"c_fc": linear(f"{name}.mlp.c_fc"), "c_proj": linear(f"{name}.mlp.c_proj")},
        }

    return {
        "wte": {"embedding": get("wte.weight")},
        "wpe": {"embedding": get("wpe.weight")},
        "ln_f": norm("ln_f"),
        **{f"h_{i}": block(f"h.{i}") for i in range(2)},
    }


@pytest.mark.parametrize("scan_layers", [False, True])
def test_logits_equal_those_of_transformers(scan_layers):
    golden = np.load(GOLDEN, allow_pickle=False)
    config = GPTConfig(vocab_size=37, block_size=12, n_layer=2, n_head=4, n_embd=16, scan_layers=scan_layers)
    params = stack_layers(ours(golden), 2) if scan_layers else ours(golden)
    logits = apply(GPT(config), params, golden["tokens"].astype(np.int32))
    np.testing.assert_allclose(logits, golden["logits"], **PARITY)
    assert np.abs(golden["logits"]).max() > 1.0


def test_the_other_gelu_is_seen():
    """With the erf form the same weights give other logits: the oracle can fail."""
    golden = np.load(GOLDEN, allow_pickle=False)
    config = GPTConfig(vocab_size=37, block_size=12, n_layer=2, n_head=4, n_embd=16, activation="gelu")
    logits = apply(GPT(config), ours(golden), golden["tokens"].astype(np.int32))
    assert not np.allclose(logits, golden["logits"], **PARITY)
