"""experiments/speculative.py: speculation changes the time and nothing else."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.sample import Decoding, Sampling
from jaxgpt.sample.engine import generate
from jaxgpt.sample.filters import SamplingRows
from jaxgpt.sample.programs import pad_stop_tokens
from tests.helpers import TINY, apply, make_model, script

page = script("speculative")

C = TINY.block_size


@functools.cache
def lively(position, seed=0, **kwargs):
    model, params = make_model(dataclasses.replace(TINY, n_layer=1, position=position, **kwargs), seed=seed)
    return model, jax.tree.map(lambda x: 5.0 * x, params)


def run(big, small, prompt, new=4 * C, num_draft_tokens=3, every=8, **kwargs):
    decoding = Decoding(max_new_tokens=new, **kwargs)
    options = {"every": every, "num_draft_tokens": num_draft_tokens}
    pieces = page.speculate(*big, *small, prompt, decoding, key=jax.random.key(0), **options)
    return [token for piece in pieces for token in piece]


@pytest.mark.parametrize(
    ("small", "how", "said"),
    [
        ({"vocab_size": 7}, {}, "the draft knows 7 tokens, the model writes 11"),
        ({}, {"grammar": object()}, "speculative decoding follows no grammar"),
    ],
)
def test_misuse_is_told(small, how, said):
    with pytest.raises(UserError, match=said):
        run(lively("rope"), lively("rope", **small), [1], **how)


@pytest.mark.slow
def test_greedy_text_is_the_same_far_past_the_context():
    """With a penalty too, up to a stop token; by a draft that begins anew at other times."""
    big, small = lively("rope"), lively("learned", 3, block_size=C + 3)
    sampling = Sampling(greedy=True, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((2, -9.0),))
    for prompt in ([1, 2, 3, 4, 5], [4] * C):
        (expected,) = generate(*big, [prompt], key=jax.random.key(0), max_new_tokens=4 * C, sampling=sampling).tokens
        assert run(big, small, prompt, sampling=sampling) == expected
    stopped = run(big, small, prompt, sampling=sampling, stop_tokens=expected[7:8])
    assert stopped == expected[: expected.index(expected[7])]


@pytest.mark.slow
def test_the_distribution_is_exact():
    """Chi-squared of five tokens of 10,000 texts against the model's own probabilities of all 243.

    The table of positions ends after four: then the text begins anew from its last two, and a guess past the end has
    not failed.
    """
    V, C, draws, new, sampling = 3, 4, 10_000, 5, Sampling(temperature=8.0, top_p=0.9)
    small = dataclasses.replace(TINY, vocab_size=V, block_size=C, n_layer=1)
    (model, params), (draft, draft_params) = (make_model(small, seed=seed) for seed in (2, 7))
    params, draft_params = (jax.tree.map(lambda x: 5.0 * x, p) for p in (params, draft_params))
    prompt = (1, 2)

    how = dict(prompt=prompt, new=new + 3, decoding=Decoding(max_new_tokens=new, bucket=1), G=2)
    t, d = page.init_sequence(model, params, **how), page.init_sequence(draft, draft_params, **how)

    @jax.jit
    @jax.vmap
    def five(key):
        rows = SamplingRows.stack([sampling])
        done, _ = page._advance(model, draft, params, draft_params, t, d, key, rows, pad_stop_tokens([], 4), new, V, 2)
        return done.tokens_X[len(prompt) : len(prompt) + new]

    got = np.asarray(five(jax.random.split(jax.random.key(1), draws))) @ V ** np.arange(new)[::-1]
    counts = np.bincount(got, minlength=V**new)

    windows = list(itertools.product(range(V), repeat=C))

    def each(of, parameters):
        """The probabilities of what follows each token of each window."""
        logits_NV = apply(of, parameters, jnp.array(windows)).reshape(-1, V)
        found_BTV = np.asarray(SamplingRows.stack([sampling]).probabilities(logits_NV), np.float64).reshape(-1, C, V)
        return dict(zip(windows, found_BTV, strict=True))

    after = each(model, params)
    p = np.ones(V**new)
    for number, ends in enumerate(itertools.product(range(V), repeat=new)):
        window = prompt
        for token in ends:
            window = window[-(C // 2) :] if len(window) > C else window
            p[number] *= after[(*window, *[0] * (C - len(window)))][len(window) - 1, token]
            window = (*window, token)
    assert (counts[p == 0] == 0).all()
    likely = p * draws >= 5  # the rest together, as the test wants it
    expected = np.append(p[likely], p[~likely].sum()) * draws
    observed = np.append(counts[likely], counts[~likely].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    freedom = len(expected) - 1
    assert freedom > 100  # else hardly anything is drawn, and nothing tested
    assert ((observed - expected) ** 2 / expected).sum() < freedom + 3.3 * np.sqrt(2 * freedom) + 7  # 99.9%
    beginning = (*prompt, 0, 0)
    difference = each(draft, draft_params)[beginning][1] - after[beginning][1]
    assert np.abs(difference).sum() > 0.3  # a draft that is wrong enough to be caught


@pytest.mark.slow
def test_the_page_writes_what_the_run_writes(tiny_run, capsys):
    """Greedily; else equal prompts get different completions. The tokenizers must be the same."""
    run = tiny_run
    prompts, greedy = ["lance", "a", "lance"], {"max_new_tokens": 12, "greedy": True}
    assert page.sample(run, run, prompts, **greedy) == run.sample(prompts, **greedy)
    first, _, third = page.sample(run, run, prompts, max_new_tokens=12)
    assert first != third and [first] == page.sample(run, run, prompts[:1], max_new_tokens=12)
    page.main([str(run.directory)] * 2 + ["--prompt", "lance", "--max-new-tokens", "12"])
    assert capsys.readouterr().out.startswith(f"lance{first}\n\nwith the draft ")
    with pytest.raises(UserError, match="the draft .* has another tokenizer than"):
        page.sample(run, dataclasses.replace(run, tokenizer=ByteTokenizer()), prompts, **greedy)
