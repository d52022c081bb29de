"""Weights of families that jaxgpt does not know, by the pages of experiments/zoo: the logits equal transformers'."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxgpt
from tests.helpers import import_pages

import_hf, qwen3_moe, deepseek = import_pages("zoo", "import_hf", "qwen3_moe", "deepseek")

# Sizes that all differ, so that a swapped axis cannot pass.
SIZES = {"vocab_size": 51, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "max_position_embeddings": 64}
QWEN = {"num_key_value_heads": 2, "head_dim": 6, "num_experts": 5, "norm_topk_prob": True, **EXPERTS}
LATENT = {"kv_lora_rank": 14, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
DEEPSEEK = {**LATENT, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, **EXPERTS}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}
YARN |= {"beta_fast": 2, "beta_slow": 0.5, "rope_theta": 50.0}
MODELS = {
    "Qwen3-MoE": (qwen3_moe, "Qwen3MoeForCausalLM", QWEN),
    "Qwen3-MoE, a dense layer, tied": (
        qwen3_moe,
        "Qwen3MoeForCausalLM",
        QWEN | {"mlp_only_layers": [0], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "V2": (deepseek, "DeepseekV2ForCausalLM", DEEPSEEK | {"routed_scaling_factor": 1.5}),
    "V2, groups, whole queries": (
        deepseek,
        "DeepseekV2ForCausalLM",
        DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "V3": (deepseek, "DeepseekV3ForCausalLM", DEEPSEEK | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    "V2, YaRN": (deepseek, "DeepseekV2ForCausalLM", DEEPSEEK | {"qk_rope_head_dim": 8, "rope_parameters": YARN}),
}


def save(directory, name, more):
    """Save a random model, all of whose tensors are far from zero and one. Return it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**SIZES | more)).eval()
    with torch.no_grad():
        for _, x in [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if "correction" in n)]:
            x.add_(0.2 * torch.randn(x.shape))
    model.save_pretrained(directory)
    return model


def logits_of(model, tokens):
    torch = importlib.import_module("torch")
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    page, name, more = MODELS[kind]
    theirs = save(tmp_path, name, more)
    rules = page.import_rules(json.loads((tmp_path / "config.json").read_text()))
    params = import_hf.read_params(str(tmp_path), **rules)
    tokens = np.random.default_rng(0).integers(0, 51, (3, 33))
    found = rules["config"].make_model().apply({"params": params}, jnp.asarray(tokens))
    np.testing.assert_allclose(found, logits_of(theirs, tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["Qwen3-MoE", "V3"])
def test_a_run_that_samples(kind, tmp_path):
    """By the command's function; greedy tokens, of which each is the likeliest by transformers."""
    page, name, more = MODELS[kind]
    theirs = save(tmp_path / "hf", name, more)
    import_hf.write_run(page, str(tmp_path / "hf"), str(tmp_path / "run"), "ids")
    run = jaxgpt.load(tmp_path / "run")
    prompt = [3, 1, 4, 1, 5]
    drawn = jaxgpt.generate(
        run.model, run.params, [prompt], key=jax.random.key(0), max_new_tokens=8, sampling=jaxgpt.Sampling(greedy=True)
    )
    tokens = prompt + drawn.tokens[0]
    likeliest = logits_of(theirs, np.array([tokens]))[0].argmax(axis=-1)
    assert drawn.tokens[0] == likeliest[4:-1].tolist()
