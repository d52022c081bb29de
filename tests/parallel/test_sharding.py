"""The table of parameters' axes: complete, unambiguous, and the shardings that it gives."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxgpt.config import GPTConfig, LoraConfig
from jaxgpt.encdec import build_model
from jaxgpt.hf.families import FAMILIES
from jaxgpt.lora import init_adapters
from jaxgpt.parallel.mesh import PARAMETER_AXES, parameter_axes
from tests.helpers import TINY
from tests.hf.test_families import MODELS
from tests.test_model import ARCHITECTURES

CONFIGS = {name: dataclasses.replace(TINY, **kind) for name, kind in ARCHITECTURES.items()}
CONFIGS |= {f"{kind} of hf": FAMILIES[kind].read(MODELS[kind]) for kind in FAMILIES}
CONFIGS["encoder"] = dataclasses.replace(TINY, n_encoder_layer=1, norm_position="sandwich")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_parameter_has_exactly_one_rule(config):
    configs = [dataclasses.replace(config, tie_embeddings=tied) for tied in (True, False)]
    if config.global_every is None and not config.n_encoder_layer:
        configs.append(dataclasses.replace(config, scan_layers=True))
    for config in configs:
        params = build_model(config).shapes()
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            matches = [axes for rule, axes in PARAMETER_AXES.items() if re.fullmatch(f"(.*/)?{rule}", name)]
            assert len(matches) == 1 and x.ndim - len(matches[0]) == name.startswith("h/"), name
        lora = LoraConfig(rank=1, targets=("q", "k", "v", "c_proj"))
        adapters = jax.eval_shape(
            lambda key, params, lora=lora: init_adapters(lora, key, params), jax.random.key(0), params
        )
        for tree in (params, adapters):
            axes = parameter_axes(tree, config)
            assert jax.tree.all(jax.tree.map(lambda x, spec: len(spec) == x.ndim, tree, axes))


def test_the_axes_of_a_model():
    config = GPTConfig(vocab_size=8, n_layer=1, n_head=2, n_embd=8, qk_norm=True, norm="rmsnorm", activation="swiglu")
    config = dataclasses.replace(config, bias=False, qkv_bias=True, tie_embeddings=False, scan_layers=True)
    projection = {"kernel": P("layers", "embed", "heads"), "bias": P("layers", "heads_bias")}
    block = {
        "attn": {
            **{name: projection for name in "qkv"},
            "c_proj": {"kernel": P("layers", "heads", "embed")},
            "q_norm": {"scale": P("layers", None)},
            "k_norm": {"scale": P("layers", None)},
        },
        "mlp": {
            "c_fc": {"kernel": P("layers", "embed", "mlp")},
            "c_gate": {"kernel": P("layers", "embed", "mlp")},
            "c_proj": {"kernel": P("layers", "mlp", "embed")},
        },
        "ln_1": {"scale": P("layers", "embed")},
        "ln_2": {"scale": P("layers", "embed")},
    }
    expected = {
        "wte": {"embedding": P("vocab", "embed")},
        "wpe": {"embedding": P(None, "embed")},
        "h": {"block": block},
        "ln_f": {"scale": P("embed")},
        "lm_head": P("embed", "vocab"),
    }
    assert parameter_axes(build_model(config).shapes(), config) == expected
    over_heads = dataclasses.replace(config, qk_norm_over="heads")
    assert parameter_axes(build_model(over_heads).shapes(), over_heads)["h"]["block"]["attn"]["q_norm"]["scale"] == P(
        "layers", "heads_bias"
    )
    adapters = {"h_0": {"mlp": {"c_fc": {"lora_a": jnp.zeros((8, 1)), "lora_b": jnp.zeros((1, 8))}}}}
    assert parameter_axes(adapters, config) == {
        "h_0": {"mlp": {"c_fc": {"lora_a": P("embed", None), "lora_b": P(None, "mlp")}}}
    }
