"""The outside oracle: with the same weights our logits are transformers', and so are 64 tokens of greedy text.

What transformers says is kept in tests/golden/families.npz, and asked anew where it and torch are installed.
"""

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxgpt.hf.families import FAMILIES, find_family, get_family
from jaxgpt.hf.family import ORIGINAL, canonical_form
from jaxgpt.hf.weights import ONE, hold, list_tensors, read_params, to_tensors, write
from jaxgpt.model import GPT
from tests.conftest import REPOSITORY
from tests.hf.peers import NEW_TOKENS, PROMPT, SHAPES, make_peer, named_parameters, weights

# Two implementations of float32, logits up to 8 in size, in two to four layers. Seen: 2.7e-5, in Gemma 3.
PARITY = dict(rtol=0, atol=1e-4)

live = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None,
    reason="transformers and torch are not installed: the golden file speaks for them",
)
every_shape = pytest.mark.parametrize("name", SHAPES)
assert {kind for kind, _ in SHAPES.values()} == set(FAMILIES)


@pytest.fixture(scope="module")
def golden():
    with np.load(REPOSITORY / "tests" / "golden" / "families.npz", allow_pickle=False) as file:
        return dict(file)


@pytest.fixture(scope="module")
def imported(golden, tmp_path_factory):
    """name -> (family, config, the peer's tensors, our parameters), from a directory as the Hub has them."""

    @functools.cache
    def of(name):
        hf = json.loads(str(golden[f"{name}/config"]))
        family = get_family(hf)
        directory = tmp_path_factory.mktemp(name)
        tensors = {key: weights(key, tuple(shape)) for key, shape in json.loads(str(golden[f"{name}/shapes"])).items()}
        write(directory, {key: hold(x) for key, x in tensors.items()})
        config = family.read(hf)
        return family, config, tensors, read_params(list_tensors(directory), family, config)

    return of


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, tokens_T):
    return model.apply({"params": params}, tokens_T[None])[0]


@every_shape
def test_logits_and_greedy_text_are_transformers(golden, imported, name):
    """The text by one pass over it: each of its tokens is the likeliest after those before. Cached equals uncached, see
    tests/sample; and the families' usual shapes are written below."""
    _, config, _, params = imported(name)
    tokens, expected = golden[f"{name}/tokens"], golden[f"{name}/logits"]
    found = logits_of(GPT(config), params, tokens)
    print(f"{name}: {np.abs(found - expected).max():.1e} of {np.abs(expected).max():.1f}")  # for -rP
    np.testing.assert_allclose(found, expected, **PARITY)
    assert np.abs(expected).max() > 3.0 and len(tokens) == len(PROMPT) + NEW_TOKENS
    np.testing.assert_array_equal(found[len(PROMPT) - 1 : -1].argmax(-1), tokens[len(PROMPT) :])


@every_shape
def test_there_and_back_nothing_changes(golden, imported, name, tmp_path):
    """export(import(dir)) has the same tensors, import(export(params)) the same parameters, bit for bit."""
    family, config, tensors, params = imported(name)
    out = to_tensors(params, family, config)
    assert out.keys() == tensors.keys()
    for key, tensor in out.items():
        np.testing.assert_array_equal(tensor.read(), tensors[key], strict=True)
    write(tmp_path, out)
    again = read_params(list_tensors(tmp_path), family, config)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), again, params)
    written = family.write(config)
    assert canonical_form(family.read(written)) == canonical_form(config)
    assert (written.get(ORIGINAL) == 6) == (name == "phi3-longrope")  # else Phi3Config's default is taken
    assert find_family(config, family.model_type) is family
    assert find_family(config).model_type in (family.model_type, "llama", "mistral")  # matrices apart
    # In the spelling before version 5: rope_theta and rope_scaling, a pattern and no list of layers.
    hf = json.loads(str(golden[f"{name}/config"]))
    if (five := hf.pop("rope_parameters", None)) is not None:
        whole = dict(five.get("full_attention", five))
        hf[{"gpt_neox": "rotary_emb_base"}.get(family.model_type, "rope_theta")] = whole.pop("rope_theta")
        if "partial_rotary_factor" in whole:
            hf["rotary_pct"] = whole.pop("partial_rotary_factor")
        if "full_attention" in five:
            hf["rope_local_base_freq"] = five["sliding_attention"]["rope_theta"]
        whole["type"] = whole.pop("rope_type")
        hf["rope_scaling"] = None if whole["type"] == "default" else whole
    if "layer_types" in hf:
        kinds = hf.pop("layer_types")
        hf["sliding_window_pattern"] = kinds.index("full_attention") + 1 if "full_attention" in kinds else 99
    assert canonical_form(family.read(hf)) == canonical_form(config)


def test_half_precision_is_kept_and_parameters_go_where_they_are_told(imported, tmp_path):
    family, config, _, params = imported("qwen3")
    write(tmp_path, to_tensors(params, family, config, jnp.bfloat16))
    tensors = list_tensors(tmp_path)
    kept = read_params(tensors, family, config)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype("bfloat16"), strict=True), kept, params
    )
    widened = read_params(tensors, family, config, dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(widened)} == {jnp.dtype("float32")}


def test_checkpoints_of_the_body_alone_and_with_masks_are_read(imported, tmp_path):
    """GPT-2 on the Hub: names without "transformer.", and the causal masks of every layer, of any type, beside them."""
    family, config, tensors, params = imported("gpt2")
    bare = {key.removeprefix("transformer."): x for key, x in tensors.items()}
    bare |= {f"h.{i}.attn.bias": np.ones((1, 1, 4, 4), bool) for i in range(2)}
    save_file(bare, tmp_path / ONE)
    again = read_params(list_tensors(tmp_path), family, config)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), again, params)


@pytest.mark.slow
@live
@every_shape
def test_transformers_still_says_so(golden, name):
    import torch

    model = make_peer(name)
    with torch.no_grad():
        logits = model(torch.tensor(golden[f"{name}/tokens"][None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits, golden[f"{name}/logits"], **PARITY)
    assert {k: list(x.shape) for k, x in named_parameters(model)} == json.loads(str(golden[f"{name}/shapes"]))
