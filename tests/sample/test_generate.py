import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample import Decoding, Sampling
from jaxgpt.sample.engine import generate, stream
from jaxgpt.sample.programs import allocate_cache, decode, read
from jaxgpt.sample.quantize import _LAID_OUT, for_decoding, lay_out_once
from tests.helpers import TINY, apply, check_command, make_model

GREEDY = Sampling(greedy=True)
C = TINY.block_size
PROMPTS = [[3], [1, 2, 3, 4, 5], [4] * C, [10, 9, 8, 7, 6, 5, 4]]


@functools.cache
def even(position="learned"):
    """A model to which all tokens are about equally likely."""
    return make_model(dataclasses.replace(TINY, n_layer=1, position=position, n_head=4, n_kv_head=2))


@functools.cache
def lively(position):
    """A model whose greedy text is not one token for ever."""
    model, params = make_model(dataclasses.replace(TINY, n_layer=1, position=position, n_head=4, n_kv_head=2))
    return model, jax.tree.map(lambda x: 5.0 * x, params)


def run(model, params, prompts, new=12, seed=0, **kwargs):
    return generate(model, params, prompts, key=jax.random.key(seed), max_new_tokens=new, **kwargs)


def run_stream(model, params, prompts, *, every, **options):
    return list(stream(model, params, prompts, Decoding(**options), key=jax.random.key(0), every=every))


def restarting(model, params, prompt, new):
    """Greedy text, one forward pass over the whole window per token; a full window begins anew from its last half."""
    window, ids = list(prompt), []
    for _ in range(new):
        if len(window) > C:
            window = window[-(C // 2) :]
        padded = jnp.array([window + [0] * (C - len(window))])
        ids.append(int(apply(model, params, padded)[0, len(window) - 1].argmax()))
        window.append(ids[-1])
    return ids


@functools.partial(jax.jit, static_argnums=0)
def banded_logits(model, params, tokens_BT):
    """Of a text of any length in one pass, each token reading the C before it; nothing is a ring here."""
    B, T = tokens_BT.shape
    cache = allocate_cache(model, params, B, T, None)
    x_BTD, _ = read(model, params, cache, tokens_BT, jnp.broadcast_to(jnp.arange(T), (B, T)))
    return model.apply({"params": params}, x_BTD, method="unembed")


@pytest.mark.parametrize("position", ["learned", pytest.param("sinusoidal", marks=pytest.mark.slow)])
def test_greedy_equals_recomputation_of_ragged_prompts_far_past_the_context(position):
    model, params = lively(position)
    out = run(model, params, PROMPTS, new=3 * C, sampling=GREEDY)
    assert out.tokens == [restarting(model, params, prompt, 3 * C) for prompt in PROMPTS]
    assert max(len(set(tokens)) for tokens in out.tokens) > 2 and out.logprobs is None


@pytest.mark.parametrize("position", ["rope", pytest.param("none", marks=pytest.mark.slow)])
def test_greedy_equals_recomputation_with_a_sliding_window(position):
    """For each token: its greedy choice given all before it, in one uncached pass over four contexts of text."""
    model, params = lively(position)
    out = run(model, params, PROMPTS, new=4 * C, sampling=GREEDY)
    for prompt, tokens in zip(PROMPTS, out.tokens, strict=True):
        text = prompt + tokens
        padded = text + [0] * (5 * C - len(text))
        best = np.asarray(banded_logits(model, params, jnp.array([padded])).argmax(-1))[0]
        np.testing.assert_array_equal(best[len(prompt) - 1 : len(text) - 1], tokens)
        inside = text[:C]  # within the context that is the plain model
        plain = np.asarray(apply(model, params, jnp.array([inside])).argmax(-1))[0]
        np.testing.assert_array_equal(plain[len(prompt) - 1 : -1], inside[len(prompt) :])
    assert max(len(set(tokens)) for tokens in out.tokens) > 2


def test_equal_prompts_draw_differently():
    """And so does another key; but a row is the same at any place, alone and in any company."""
    model, params = even()
    rows = run(model, params, [[1, 2]] * 4, new=20).tokens
    assert len({tuple(row) for row in rows}) == 4
    assert min(len(set(row)) for row in rows) > 4  # of 11 that are about equally likely: each token has its own draw
    assert run(model, params, [*PROMPTS, [1, 2], [5], [1, 2]], new=20).tokens[-3::2] == rows[:2]
    alone, other = (run(model, params, [[1, 2]], new=20, seed=seed).tokens[0] for seed in (0, 1))
    assert alone == rows[0] != other


def test_rows_end_before_a_stop_token_and_the_program_when_all_have():
    model, params = even()
    free = run(model, params, PROMPTS, new=50).tokens
    out = run(model, params, PROMPTS, new=50, stop_tokens=[3, 7]).tokens
    for row, before in zip(free, out, strict=True):
        at = next((i for i, token in enumerate(row) if token in (3, 7)), len(row))
        assert before == row[:at]
    assert len({len(row) for row in out}) > 1
    started = run_stream(model, params, PROMPTS, max_new_tokens=50, stop_tokens=range(11), every=8)
    assert started == [[[], [], [], []]]  # every token is a stop: one is drawn and the program is done


def test_streaming_is_the_same_text_by_the_same_program():
    model, params = even()
    expected = run(model, params, PROMPTS, new=21, stop_tokens=[3]).tokens
    compiled = decode._cache_size()
    pieces = run_stream(model, params, PROMPTS, max_new_tokens=21, stop_tokens=[3], every=5)
    assert decode._cache_size() == compiled
    assert len(pieces[0][0]) <= 1
    assert [[token for piece in pieces for token in piece[row]] for row in range(4)] == expected


def test_the_repetition_penalty_knows_prompt_and_text():
    model, params = lively("learned")
    prompts, new = [[token, 10 - token] for token in range(4)], C - 2
    found = run(model, params, prompts, new=new, sampling=Sampling(greedy=True, repetition_penalty=3.0)).tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        text = list(prompt)
        for _ in range(new):
            logits_V = np.array(apply(model, params, jnp.array([text + [0] * (C - len(text))]))[0, len(text) - 1])
            for token in set(text):
                logits_V[token] *= 3.0 if logits_V[token] < 0 else 1 / 3.0
            text.append(int(logits_V.argmax()))
        assert text[2:] == tokens
    assert found != run(model, params, prompts, new=new, sampling=GREEDY).tokens


def test_counted_penalties_know_the_text_and_not_the_prompt():
    """Also where a full window is read anew, past the last position."""
    model, params = lively("learned")
    penalties = dict(frequency_penalty=2.0, presence_penalty=0.5)
    prompts, new = [[token, 10 - token] for token in range(4)], 2 * C
    biased = Sampling(greedy=True, logit_bias=((4, -100.0),), **penalties)
    found = run(model, params, prompts, new=new, sampling=biased).tokens
    for prompt, tokens in zip(prompts, found, strict=True):
        assert 4 not in tokens
        for n in range(C - 2):
            text = prompt + tokens[:n]
            logits_V = np.array(apply(model, params, jnp.array([text + [0] * (C - len(text))]))[0, len(text) - 1])
            counts_V = np.bincount(tokens[:n], minlength=11)
            logits_V -= 2.0 * counts_V + 0.5 * (counts_V > 0)
            logits_V[4] -= 100.0
            assert logits_V.argmax() == tokens[n]
        # Twice the context draws each of 10 tokens nearly equally often: what was drawn early is still counted.
        counts_V = np.delete(np.bincount(tokens, minlength=11), 4)
        assert counts_V.max() - counts_V.min() <= 6, counts_V
    with pytest.raises(UserError, match="logit_bias has ids from 11 to 11, the model knows 0 to 10"):
        run(model, params, prompts, new=1, sampling=Sampling(logit_bias=((11, 1.0),)))


def test_trained_parameters_are_laid_out_once_while_they_are_the_same():
    model, params = lively("rope")
    params = jax.tree.map(jnp.copy, params)
    expected = run(*for_decoding(model, params), PROMPTS).tokens
    held = lay_out_once(model, params)[1]
    assert run(model, params, PROMPTS).tokens == expected
    assert lay_out_once(model, params)[1] is held  # no second layout
    params["wte"] = {"embedding": -params["wte"]["embedding"]}  # in place
    assert run(model, params, PROMPTS).tokens == run(*for_decoding(model, params), PROMPTS).tokens != expected
    params["wte"]["embedding"].delete()  # as a step of training does
    with pytest.raises(RuntimeError, match="deleted"):
        run(model, params, PROMPTS)
    lay_out_once(model, jax.tree.map(jnp.copy, lively("rope")[1]))
    assert not _LAID_OUT  # it is freed with what it was made of


def test_padded_vocabulary_is_never_drawn():
    assert np.max(run(*even(), [[0]] * 4, new=50, vocab_size=4).tokens) == 3


def test_lengths_within_a_bucket_and_numbers_share_one_compilation():
    """Prompts of 1 to 8 tokens, other temperatures and limits: one program. So do parameters of a checkpoint."""
    model, params = make_model(dataclasses.replace(TINY, n_layer=1, position="rope"))
    compiled = decode._cache_size()
    for number, length in enumerate((1, 4, C)):
        how = {"sampling": Sampling(temperature=0.5 + 0.01 * number, top_p=0.9), "stop_tokens": [5] * (number % 3)}
        run(model, params, [[1] * length], new=3 + number, bucket=32, **how)
    assert decode._cache_size() == compiled + 1
    committed = jax.device_put(params, jax.devices()[0])
    run_stream(model, committed, [[1]], max_new_tokens=9, bucket=32, every=2)
    assert decode._cache_size() == compiled + 2  # another one for them, and no third for what it gives back


def test_a_long_prompt_is_read_from_its_last_window_and_it_is_said():
    model, params = lively("learned")
    with pytest.warns(UserWarning, match=r"prompt 0 has 10 tokens, block_size=8: only its last 8 are read"):
        out = run(model, params, [list(range(10))], sampling=GREEDY).tokens
    assert out == run(model, params, [list(range(2, 10))], sampling=GREEDY).tokens


@pytest.mark.parametrize(
    ("prompts", "kwargs", "said"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[11]], {}, "the model knows 0 to 10"),
        ([[1], np.array([1.0, 2.0])], {}, r"prompt 1 is array\(\[1., 2.\]\)"),
        ([[1]], {"new": 2.5}, "max_new_tokens=2.5: needs a whole number"),
        ([[1]], {"cache_dtype": "int4"}, "cache_dtype='int4'"),
    ],
)
def test_misuse_is_told(prompts, kwargs, said):
    with pytest.raises(UserError, match=said):
        run(*even(), prompts, **kwargs)


@pytest.mark.slow
def test_parameters_sharded_over_a_mesh_write_the_same(tmp_path):
    """Two devices, each with half of every matrix."""
    code = """
import jax, dataclasses
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxgpt import Sampling, for_decoding, generate
from tests.helpers import TINY, make_model
model, params = make_model(dataclasses.replace(TINY, position="rope"))
mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
place = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "tensor") if x.ndim == 2 else P()))
texts = []
for p in (params, jax.tree.map(place, params)):
    for q in ((model, p), for_decoding(model, p)):
        texts.append(generate(*q, [[1, 2, 3], [4]], key=jax.random.key(0), max_new_tokens=6, sampling=Sampling(greedy=True)).tokens)
assert len(jax.tree.leaves(q[1])[0].sharding.device_set) == 2
assert texts[0] == texts[1] == texts[2] == texts[3], texts
"""
    check_command("-c", code, cwd=tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2")
