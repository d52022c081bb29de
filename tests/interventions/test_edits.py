"""Interventions: each place equals the same arithmetic by hand, text is generated under edits, and some are refused."""

import functools

import chex
import jax
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.interventions import add, edit, replace, run, run_each, scale, zero
from jaxgpt.interventions.model import place_shapes, token_losses
from jaxgpt.model import GPTConfig
from jaxgpt.sample import Sampling
from jaxgpt.sample.engine import generate
from jaxgpt.sample.quantize import for_decoding
from tests.helpers import apply, make_model, quick

SIZE = {"vocab_size": 23, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 16}
LLAMA = dict(n_kv_head=2, norm="rmsnorm", position="rope", activation="swiglu", qk_norm=True, bias=False)
CONFIGS = {
    "gpt2": GPTConfig(**SIZE),
    "gqa": GPTConfig(**SIZE, **LLAMA),
    "sandwich": GPTConfig(**SIZE, norm_position="sandwich", sliding_window=4, attention_softcap=9.0, scan_layers=True),
    "parallel": GPTConfig(**SIZE, parallel_residual=True, tie_embeddings=False, remat="full"),
    "post": GPTConfig(**SIZE, norm_position="post"),
}
TOKENS = np.random.default_rng(0).integers(0, 23, (2, 11))


@functools.cache
def make(config):
    """Return a model with random parameters that are large enough for all its parts to matter."""
    model, params = make_model(config)
    return model, jax.tree.map_with_path(lambda path, x: x if path[-1].key == "scale" else 3.0 * x, params)


@pytest.fixture(scope="module")
def model_params():
    return make(CONFIGS["gpt2"])


@quick(CONFIGS, "gqa")
def test_nothing_changes_without_an_edit_or_with_what_was_there(name):
    """Replacing any activation by itself gives the logits of the model."""
    model, params = make(CONFIGS[name])
    logits_BTV = apply(model, params, TOKENS)
    names = [*place_shapes(model.config)]
    plain = run(model, params, TOKENS, read=names)
    chex.assert_trees_all_close(plain.logits_BTV, logits_BTV, rtol=1e-4, atol=1e-4)
    assert plain.activations.keys() == set(names)
    places = [(place, int(layer[2:]) if layer else None) for layer, _, place in (n.rpartition("/") for n in names)]
    same = [[replace(*place, by=plain.activations[n][0])] for n, place in zip(names, places, strict=True)]
    gone = [[zero(*place)] for place in places]
    found = run_each(model, params, TOKENS[:1], same + gone, lambda logits_BTV: logits_BTV)
    for name, kept, lost in zip(names, found[: len(names)], found[len(names) :], strict=True):
        chex.assert_trees_all_close(kept, logits_BTV[:1], rtol=1e-3, atol=1e-3, custom_message=name)
        assert np.abs(lost - logits_BTV[:1]).max() > 1e-2, name


def test_a_part_off_is_its_rows_of_the_projection_off(model_params):
    model, params = model_params
    by_hand = jax.tree.map(np.array, params)
    by_hand["h_1"]["attn"]["c_proj"]["kernel"][8:12] = 0  # head 2 of size 4
    by_hand["h_0"]["mlp"]["c_proj"]["kernel"][[3, 5]] = 0
    expected = apply(model, by_hand, TOKENS)
    for head in (zero("heads", 1, index=2), zero("pattern", 1, index=2)):
        found = run(model, params, TOKENS, [head, zero("units", 0, index=[3, 5])]).logits_BTV
        chex.assert_trees_all_close(found, expected, atol=1e-5)


def test_edits_apply_in_their_order_at_their_positions(model_params):
    model, params = model_params
    vector = np.arange(16, dtype=np.float32)
    edits = [scale("stream", 0, by=2.0), add("stream", 0, vector=vector, positions=[3, 5]), scale("stream", 0, by=0.5)]
    plain = run(model, params, TOKENS, read=["h_0/stream"])
    after = run(model, params, TOKENS, edits, read=["h_0/stream"]).activations["h_0/stream"]
    expected = np.array(plain.activations["h_0/stream"])
    expected[:, [3, 5]] += vector / 2
    chex.assert_trees_all_close(after, expected, atol=1e-5)
    early = run(model, params, TOKENS, [zero("embedding", positions=7)]).logits_BTV
    chex.assert_trees_all_equal(early[:, :7], plain.logits_BTV[:, :7])


def generate_greedily(model, params, prompt):
    how = dict(max_new_tokens=5, sampling=Sampling(greedy=True), logprobs=True)
    made = generate(model, params, [prompt], key=jax.random.key(0), **how)
    return made.tokens[0], np.array(made.logprobs[0])


@pytest.mark.slow
@quick(["gqa", "sandwich"], "gqa")
def test_text_is_generated_under_an_intervention(name):
    """Cached decoding gives the tokens of whole forward passes under the same edits."""
    model, params = make(CONFIGS[name])
    edits = [
        zero("heads", 0, index=1),
        add("stream", 1, vector=np.full(16, 0.5)),
        scale("mlp", 1, by=2.0, positions=[6]),
    ]
    prompt = TOKENS[0, :5].tolist()
    new, logprobs = generate_greedily(*for_decoding(*edit(model, params, edits)), prompt)
    tokens = [[*prompt, *new]]
    logits_BTV, plain_BTV = (run(model, params, tokens, made).logits_BTV for made in (edits, []))
    assert new == logits_BTV[0, 4:-1].argmax(axis=-1).tolist()
    chex.assert_trees_all_close(logprobs, np.asarray(-token_losses(logits_BTV, tokens)[0, 4:]), atol=1e-4)
    assert np.abs(logprobs + token_losses(plain_BTV, tokens)[0, 4:]).max() > 0.01


def test_a_wrong_edit_is_one_clear_line(model_params):
    model, params = model_params
    for edits, words in (
        ([zero("head", 0)], "'h_0/head': give h_0/PLACE, to h_1, with one of embedding, queries"),
        ([zero("units", 0, index=[1.5])], r"h_0/units, index=\[1.5\]: needs integers from 0 to 63"),
        ([zero("mlp", 0, positions=[16])], r"h_0/mlp, positions=\[16\]: needs integers from 0 to 15"),
        ([add("mlp", 0, vector=np.ones(15))], r"h_0/mlp: got an array of shape \[15\], needs \[1, 16\]"),
        ([scale("mlp", 0, by=float("nan"))], "h_0/mlp: give finite numbers"),
        ([], "needs at least one set of edits that is not empty"),
    ):
        with pytest.raises(UserError, match=words) as e:
            run_each(model, params, TOKENS, [edits], lambda logits_BTV: logits_BTV)
        assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="'h_x/mlp': give h_0/PLACE"):
        run(model, params, TOKENS, read=["h_x/mlp"])
    with pytest.raises(UserError, match="tokens_BT has ids from 0 to 23, the model knows 0 to 22"):
        run(model, params, [[0, 23]])
    with pytest.raises(UserError, match="h_1/pattern: a pattern cannot be edited while text is generated"):
        generate_greedily(*edit(model, params, [zero("pattern", 1)]), [1, 2])
