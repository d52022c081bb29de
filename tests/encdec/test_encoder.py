"""A model with an encoder: who reads whom, cached and not; the sizes of 2017; loss and schedule."""

import contextlib
import dataclasses
import functools
import json
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.config import DataConfig, OptimConfig
from jaxgpt.errors import Preempted, UserError
from jaxgpt.fitting import fit
from jaxgpt.loss import chunked_next_token_loss, next_token_loss
from jaxgpt.model import GPT
from jaxgpt.optim import learning_rate, muon_labels
from jaxgpt.parallel.device import count_parameters
from jaxgpt.sample import Decoding, Sampling
from jaxgpt.sample.cache import KVCache
from jaxgpt.sample.engine import generate
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.sample.search import beam_search
from jaxgpt.tools.convert import export_hf
from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation
from jaxgpt.tools.report import make_report
from jaxgpt.tools.xray.activations import capture_activations
from jaxgpt.tools.xray.xray import xray
from tests.conftest import REPOSITORY
from tests.helpers import FLOAT32_REORDERED, TINY, make_model, run_command, tiny_experiment

CONFIG = dataclasses.replace(
    TINY,
    n_encoder_layer=2,
    norm_position="post",
    activation="relu",
    position="sinusoidal",
    scale_embeddings=True,
)
EVERY = {
    "2017": {},
    "modern": {"norm_position": "pre", "position": "rope", "norm": "rmsnorm", "qk_norm": True, "n_kv_head": 1},
    "sandwich": {"norm_position": "sandwich", "activation": "swiglu", "position": "learned"},
    "parallel": {"norm_position": "pre", "parallel_residual": True, "remat": "full"},
}
SOURCE = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
SEGMENTS = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
TARGET = jnp.array([[7, 8, 2, 1], [7, 1, 8, 3]])


# But for one, the architectures by `-m slow`: each of their laws compiles a program or two.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "modern" else pytest.mark.slow) for name in EVERY],
)
def model(request):
    return make_model(dataclasses.replace(CONFIG, **EVERY[request.param]))


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, target, source=None, segments=None, target_segments=None):
    read = {"source_BS": source, "source_segments_BS": segments, "segments_BT": target_segments}
    return model.apply({"params": params}, target, **{name: x for name, x in read.items() if x is not None})


def test_who_reads_whom(model):
    """By the gradient of a token's features to every embedding: the target up to itself, the source but for padding."""
    model, params = model
    table_VD = params["wte"]["embedding"]

    def features(rows_ND, t):
        # Each token an id of its own, so that the gradient to its row is that to its place.
        swapped = {**params, "wte": {"embedding": rows_ND}}
        x_BTD = model.apply(
            {"params": swapped},
            jnp.arange(4)[None],
            source_BS=4 + jnp.arange(5)[None],
            source_segments_BS=jnp.array([[1, 1, 1, 0, 0]]),
            method="hidden_states",
        )
        return jnp.abs(x_BTD[0, t]).sum()

    reach = jax.jit(jax.vmap(jax.grad(features), in_axes=(None, 0)))(table_VD, jnp.arange(4))[:, :9]
    reach_TN = np.abs(reach).sum(axis=-1) > 0
    expected_TN = np.concatenate([np.tri(4, dtype=bool), np.tile([True, True, True, False, False], (4, 1))], axis=1)
    np.testing.assert_array_equal(reach_TN, expected_TN)


def test_the_encoder_reads_both_ways(model):
    model, params = model

    def features(table_VD, s):
        swapped = {**params, "wte": {"embedding": table_VD}}
        x_BSD = model.apply({"params": swapped}, jnp.arange(4)[None], jnp.ones((1, 4), jnp.int32), method="encode")
        return jnp.abs(x_BSD[0, s]).sum()

    reach = jax.jit(jax.vmap(jax.grad(features), in_axes=(None, 0)))(params["wte"]["embedding"], jnp.arange(4))
    assert (np.abs(reach[:, :4]).sum(axis=-1) > 0).all()


def test_padding_of_the_source_changes_nothing(model):
    model, params = model
    plain = logits(model, params, TARGET[1:], SOURCE[1:, :3], SEGMENTS[1:, :3])
    padded = logits(model, params, TARGET[1:], SOURCE[1:].at[0, 3:].set(8), SEGMENTS[1:])
    np.testing.assert_allclose(plain, padded, **FLOAT32_REORDERED)


def test_documents_of_a_row_do_not_read_each_other(model):
    """Two pairs in one row give what each gives alone."""
    model, params = model
    together = logits(
        model,
        params,
        jnp.array([[7, 8, 7, 1, 8, 0]]),
        jnp.array([[3, 1, 4, 9, 2, 0]]),
        jnp.array([[1, 1, 1, 2, 2, 0]]),
        jnp.array([[1, 1, 2, 2, 2, 0]]),
    )
    for target, source, here in (([7, 8], [3, 1, 4], slice(0, 2)), ([7, 1, 8], [9, 2], slice(2, 5))):
        alone = logits(model, params, jnp.array([target]), jnp.array([source]))
        np.testing.assert_allclose(together[0, here], alone[0], **FLOAT32_REORDERED)


def test_cached_equals_uncached(model):
    model, params = model
    c = model.config.explicit()
    whole = logits(model, params, TARGET, SOURCE, SEGMENTS)
    cache = KVCache.empty(batch=2, columns=8, n_layer=c.n_layer, n_kv_head=c.n_kv_head, head_dim=c.head_dim)
    cache = model.apply({"params": params}, cache, SOURCE, SEGMENTS, method="init_cross_cache")
    assert len(cache.encoder_kv) == c.n_layer and cache.encoder_kv[0].k_BKSH.shape == (2, c.n_kv_head, 5, c.head_dim)

    @jax.jit
    def step(cache, tokens_BT, t):
        x_BTD, cache = cache.decode(model, params, tokens_BT, jnp.broadcast_to(t, (2, 1)))
        return model.apply({"params": params}, x_BTD, method="unembed"), cache

    for t in range(4):
        one, cache = step(cache, TARGET[:, t : t + 1], jnp.asarray(t))
        np.testing.assert_allclose(one[:, 0], whole[:, t], **FLOAT32_REORDERED)


def test_greedy_writes_the_likeliest(model):
    """Sources of several lengths in one batch, packed weights: what the whole model, read anew each time, would write."""
    model, params = model
    sources = [[3, 1, 4, 1, 5], [9, 2, 6]]
    out = generate(
        *for_decoding(model, params),
        [[7], [7]],
        sources=sources,
        key=jax.random.key(0),
        max_new_tokens=5,
        sampling=Sampling(greedy=True),
    )
    texts = jnp.full((2, 6), 7)  # what comes later is not read
    for t in range(5):
        last = logits(model, params, texts, SOURCE, SEGMENTS)[:, t]
        texts = texts.at[:, t + 1].set(last.argmax(axis=-1))
    assert out.tokens == texts[:, 1:].tolist()


def test_sources_decide_what_is_drawn():
    model, params = make_model(CONFIG)
    how = dict(key=jax.random.key(0), max_new_tokens=6)
    one, two, three = generate(model, params, [[7]] * 3, sources=[[3, 1], [3, 1], [3, 2]], **how).tokens
    assert one != two and two != three  # the second of the same kind has a key of its own
    assert generate(model, params, [[7]], sources=[[3, 2]], **how).tokens == [three]


def test_what_goes_wrong_is_said():
    model, params = make_model(CONFIG)
    plain, plain_params = make_model(TINY)
    how = dict(key=jax.random.key(0), max_new_tokens=2)
    for call, said in (
        (lambda: model.apply({"params": params}, TARGET), "needs source_BS"),
        (lambda: GPT(CONFIG).shapes(), "n_encoder_layer=2: GPT has no encoder"),
        (lambda: generate(model, params, [[1]], **how), "needs a source for each of 1 prompts, got 0"),
        (lambda: generate(model, params, [[1]], sources=[[1], [2]], **how), "for each of 1 prompts, got 2"),
        (lambda: generate(model, params, [[1]], sources=[[1] * 9], **how), "source 0 has 9 tokens: needs 1 to 8"),
        (lambda: generate(model, params, [[1]], sources=[[]], **how), "source 0 has 0 tokens: needs 1 to 8"),
        (lambda: generate(model, params, [[1]], sources=[[99]], **how), "99"),
        (lambda: generate(plain, plain_params, [[1]], sources=[[1]], **how), "for a model with an encoder"),
        (lambda: dataclasses.replace(CONFIG, scan_layers=True), "n_encoder_layer=2 with scan_layers=True"),
        (lambda: dataclasses.replace(CONFIG, sliding_window=4), "n_encoder_layer=2 with sliding_window=4"),
    ):
        with pytest.raises(UserError, match=said):
            call()


# The paper's numbers ---------------------------------------------------------------------------------------------------


def test_the_base_model_of_2017():
    """Table 3 of arXiv:1706.03762: N=6, d_model=512, d_ff=2048, h=8, d_k=64, about 37,000 shared tokens, 65 million."""
    base = load_experiment(str(REPOSITORY / "experiments/transformer_2017.py:base")).model
    config = dataclasses.replace(base, vocab_size=37_000)
    model = config.make_model()
    shapes = jax.tree.map(lambda x: x.shape, model.shapes())
    D, F, attention = 512, 2048, 4 * (512 * 512 + 512)
    mlp, norm = D * F + F + F * D + D, 2 * D
    assert shapes["encoder_0"]["attn"]["q"] == {"kernel": (D, 8 * 64), "bias": (512,)}
    assert shapes["h_5"]["cross"]["k"]["kernel"] == (D, 8 * 64) and shapes["h_5"]["mlp"]["c_fc"]["kernel"] == (D, F)
    assert "lm_head" not in shapes and shapes["wte"]["embedding"] == (37_000, D)
    assert set(shapes["h_0"]) == {"attn", "cross", "mlp", "ln_1", "ln_cross", "ln_2"}
    expected = 37_000 * D + 6 * (attention + mlp + 2 * norm) + 6 * (2 * attention + mlp + 3 * norm)
    count = count_parameters(model.shapes())
    assert count == expected == 63_082_496
    assert abs(count / 65e6 - 1) < 0.03
    tokens = jax.ShapeDtypeStruct((2, 9), jnp.int32)
    variables = {"params": model.shapes()}
    out = jax.eval_shape(lambda v, t, s: model.apply(v, t, source_BS=s), variables, tokens, tokens)
    assert out.shape == (2, 9, 37_000)


def test_the_schedule_of_2017():
    """Equation 3: d_model^-0.5 min(step^-0.5, step warmup^-1.5), steps from 1; ours warms up one step longer."""
    warmup, peak = 4000, (512 * 4001) ** -0.5
    config = OptimConfig(schedule="inverse_sqrt", warmup_steps=warmup, learning_rate=peak)
    rate = learning_rate(config, 100_000)
    for step in (1, 100, 4001, 20_000, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4001**-1.5)
        assert float(rate(step - 1)) == pytest.approx(paper, rel=1e-4)  # optax counts in float32


def test_label_smoothing_is_optaxs():
    rng = np.random.default_rng(0)
    logits_BTV = jnp.asarray(rng.normal(size=(2, 6, 11)), jnp.float32)
    targets_BT, mask_BT = jnp.asarray(rng.integers(0, 11, (2, 6))), jnp.asarray(rng.random((2, 6)) < 0.7)
    nats, count = next_token_loss(logits_BTV, targets_BT, mask_BT, smoothing=0.1)
    smooth_BTV = optax.smooth_labels(jax.nn.one_hot(targets_BT, 11), 0.1)
    expected = jnp.sum(optax.softmax_cross_entropy(logits_BTV, smooth_BTV), where=mask_BT)
    np.testing.assert_allclose(nats, expected, **FLOAT32_REORDERED)
    assert count == mask_BT.sum()

    def chunked(logits_BTV):
        model: Any = types.SimpleNamespace(apply=lambda variables, x_BTV, method: variables["params"] * x_BTV)
        head = jnp.ones(())
        return chunked_next_token_loss(model, head, logits_BTV, targets_BT, mask_BT, chunk=2, smoothing=0.1)[0]

    value, grad = jax.value_and_grad(chunked)(logits_BTV)
    whole, whole_grad = jax.value_and_grad(lambda x: next_token_loss(x, targets_BT, mask_BT, smoothing=0.1)[0])(
        logits_BTV
    )
    np.testing.assert_allclose(value, whole, **FLOAT32_REORDERED)
    np.testing.assert_allclose(grad, whole_grad, **FLOAT32_REORDERED)


def test_muon_takes_the_encoders_matrices():
    labels = muon_labels(CONFIG.make_model().shapes())
    assert labels["encoder_1"]["mlp"]["c_fc"] == {"kernel": "muon", "bias": "adamw"}
    assert labels["h_0"]["cross"]["v"]["kernel"] == "muon" and labels["wte"]["embedding"] == "adamw"


# Beam search -----------------------------------------------------------------------------------------------------------

STOP = 3


def search(model, params, prompts, *, beams, length_penalty=0.6, sources=None, **options):
    decoding = Decoding(**options)
    return beam_search(model, params, prompts, decoding, beams=beams, length_penalty=length_penalty, sources=sources)


def best_of_all(model, params, prompt, new, alpha, source=None):
    """Every text of up to `new` tokens, scored by the whole model: (the best, its score)."""
    texts = [[]]
    every = []
    for length in range(1, new + 1):
        ended = [[*text, STOP] for text in texts]
        texts = [[*text, token] for text in texts for token in range(5) if token != STOP]
        every += ended + (texts if length == new else [])
    by_length: dict = {}
    for text in every:
        by_length.setdefault(len(text), []).append(text)
    scored = []
    for length, those in by_length.items():
        rows_BT = jnp.array([[*prompt, *text] for text in those])
        read = None if source is None else jnp.tile(jnp.array([source]), (len(those), 1))
        logprobs_BTV = jax.nn.log_softmax(logits(model, params, rows_BT[:, :-1], read))
        of_text = jnp.take_along_axis(logprobs_BTV, rows_BT[:, 1:, None], axis=2)[:, len(prompt) - 1 :, 0]
        scores = of_text.sum(axis=1) / ((5 + length) / 6) ** alpha
        scored += [(float(score), text) for score, text in zip(scores, those, strict=True)]
    return max(scored)


@pytest.mark.parametrize("alpha", [0.6, *(pytest.param(a, marks=pytest.mark.slow) for a in (0.0, 2.0))])
@pytest.mark.parametrize("encoder", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_wide_search_finds_the_best_of_all_texts(encoder, alpha):
    config = dataclasses.replace(CONFIG if encoder else TINY, vocab_size=5)
    model, params = make_model(config, seed=3)
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)  # with opinions
    source = [1, 2, 0] if encoder else None
    score, best = best_of_all(model, params, [1, 2], 3, alpha, source)
    found = search(
        model,
        params,
        [[1, 2]],
        beams=64,
        max_new_tokens=3,
        stop_tokens=[STOP],
        length_penalty=alpha,
        sources=None if source is None else [source],
    )
    assert found.tokens[0][0] == [token for token in best if token != STOP]
    assert found.scores[0][0] == pytest.approx(score, abs=1e-4)
    assert found.scores[0] == sorted(found.scores[0], reverse=True)
    assert len({tuple(text) for text in found.tokens[0]}) == len(found.tokens[0])  # no text twice


@pytest.mark.slow
def test_a_search_of_one_is_greedy():
    model, params = make_model(CONFIG, seed=1)
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)
    sources = [[3, 1, 4], [1, 5], [9, 2, 6, 5], [3], [5, 8]]
    prompts = [[7]] * len(sources)
    how = dict(max_new_tokens=6, stop_tokens=[2], sources=sources)
    greedy = generate(model, params, prompts, key=jax.random.key(0), sampling=Sampling(greedy=True), **how)
    found = search(model, params, prompts, beams=1, length_penalty=0.0, **how)
    assert [texts[0] for texts in found.tokens] == greedy.tokens
    wide = search(model, params, prompts, beams=5, length_penalty=0.0, **how)
    assert all(w[0] >= n[0] - 1e-5 for w, n in zip(wide.scores, found.scores, strict=True))
    alone = search(model, params, prompts[:1], beams=5, length_penalty=0.0, **(how | {"sources": sources[:1]}))
    assert alone.tokens[0] == wide.tokens[0]  # nor does the batch matter


@pytest.mark.parametrize("position", ["rope", pytest.param("learned", marks=pytest.mark.slow)])
def test_prompts_of_several_lengths_are_searched_together(position):
    """Also to the end of the context, which comes sooner for some."""
    model, params = make_model(dataclasses.replace(TINY, position=position), seed=2)
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)
    prompts = [[1], [4, 2, 7], [1, 2], [3] * TINY.block_size]
    for new in (4, 20):
        together = search(model, params, prompts, beams=3, max_new_tokens=new, stop_tokens=[7])
        for number, prompt in enumerate(prompts):
            alone = search(model, params, [prompt], beams=3, max_new_tokens=new, stop_tokens=[7])
            assert alone.tokens[0] == together.tokens[number]
            np.testing.assert_allclose(alone.scores[0], together.scores[number], **FLOAT32_REORDERED)
            room = TINY.block_size + 1 - len(prompt)
            assert max(map(len, alone.tokens[0])) <= min(room, new)
    assert any(len(text) == TINY.block_size for text in together.tokens[0])  # else none met the end


def test_a_search_waits_for_a_longer_text_that_may_yet_win():
    """Tokens that follow each other by a table. After 0 the stop is the likeliest, and 1 the next: then for ever 1."""
    config = dataclasses.replace(TINY, vocab_size=4, n_layer=1, position="none", norm="rmsnorm", tie_embeddings=False)
    model, params = make_model(config)
    params = jax.tree.map(np.zeros_like, params)
    params["wte"]["embedding"] += np.eye(4, 8, dtype=np.float32)  # whose norm is sqrt(8) times it
    params["ln_f"]["scale"] += 1.0
    after_0, after_1 = np.log([0.02, 0.45, 0.03, 0.5]), np.log([0.01, 0.97, 0.01, 0.01])
    params["lm_head"]["kernel"][:2] += np.float32([after_0, after_1]) / 8**0.5
    searched = functools.partial(search, model, params, [[0]], beams=1, stop_tokens=[STOP], length_penalty=2.0)
    one = searched(max_new_tokens=1)
    assert (one.tokens, one.scores[0][0]) == ([[[]]], pytest.approx(np.log(0.5), rel=1e-4))  # the stop is a token
    found = searched(max_new_tokens=6)
    assert found.tokens == [[[1] * 6]]
    assert found.scores[0][0] == pytest.approx((np.log(0.45) + 5 * np.log(0.97)) / (11 / 6) ** 2, rel=1e-4)


@pytest.mark.parametrize(
    "how, said",
    [
        ({"beams": 0}, "beams=0: needs at least 1"),
        ({"beams": 2.5}, "beams=2.5: needs a whole number"),
        ({"beams": True}, "beams=True: needs a whole number"),
        ({"prompts": [[1.5]]}, "prompt 0 is .1.5.: needs a list of token ids"),
        ({"stop_tokens": []}, "beam search needs a stop token"),
        ({"stop_tokens": np.array([0.5])}, "stop_tokens=0.5: needs a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: needs at least 1"),
        ({"prompts": [[1], [2] * 9]}, "a prompt has 9 tokens: needs at most block_size=8"),
        ({"length_penalty": -1.0}, "length_penalty=-1.0: needs a finite number of at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"prompts": []}, "no prompts"),
        ({"sources": [[1]]}, "for a model with an encoder"),
    ],
)
def test_what_a_search_refuses(how, said):
    model, params = make_model(TINY)
    given = {"prompts": [[1, 2]], "beams": 2, "max_new_tokens": 3, "stop_tokens": [0]} | how
    with pytest.raises(UserError, match=said):
        search(model, params, given.pop("prompts"), **given)


# From the file to the page ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on pairs that are turned round: it has seen them all, and knows them."""
    directory = tmp_path_factory.mktemp("encoder")
    path = directory / "pairs.tsv"
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcd"), rng.integers(1, 5))) for _ in range(60)]
    path.write_text("".join(f"{word}\t{word[::-1].upper()}\n" for word in words))
    e = tiny_experiment(path, steps=8, eval_every=4)
    model = dataclasses.replace(CONFIG, vocab_size=None, norm_position="pre")
    experiment = dataclasses.replace(
        e, model=model, optim=OptimConfig(warmup_steps=2, schedule="inverse_sqrt", label_smoothing=0.1)
    )
    return experiment, fit(experiment, directory / "run", progress=False)


@pytest.mark.slow
def test_a_run_reads_and_writes(trained):
    _, run = trained
    one, two = run.sample(["abc", "d"], seed=3)
    assert run.sample("d", seed=3) == two and len(one) <= 8
    assert "".join(run.stream("abc", seed=3)) == one
    assert "\n" not in one and run.sample("abc", beams=3) == run.sample("abc", beams=3)
    for options, said in (
        ({"beams": 2, "temperature": 0.5}, "beams=2 searches and does not sample: leave out temperature"),
        ({"draft": run}, "a draft needs a model without an encoder"),
    ):
        with pytest.raises(UserError, match=said):
            run.sample("abc", **options)
    with pytest.raises(UserError, match="the prompt is empty"):
        run.sample("")
    with pytest.raises(UserError, match="source 0 has 9 tokens"):
        run.sample("abcdabcda")


@pytest.mark.slow
def test_a_sample_that_is_too_long_to_read_is_no_failure(trained, tmp_path):
    """After training, and in a report."""
    experiment, run = trained
    options = "--model.n-layer 1 --model.n-encoder-layer 1 --model.n-head 2 --model.n-embd 8 --model.block-size 8"
    more = "--optim.warmup-steps 1 --train.steps 2 --train.batch-size 2 --train.sample-prompt abcdabcdabcd --run-dir r"
    done = run_command(
        "-m", "jaxgpt", "train", *options.split(), *more.split(), "--data.path", experiment.data.path, cwd=tmp_path
    )
    assert done.returncode == 0 and "no sample of 'abcdabcdabcd': it is longer than block_size=8" in done.stderr
    summary, _ = make_report(run, samples=1, tokens=4)
    assert "pairs" in summary["why_no_memorisation"] and "empty" in summary["samples"][0]["text"]


@pytest.mark.slow
def test_resumed_is_uninterrupted(trained, tmp_path):
    experiment, whole = trained
    half = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, checkpoint_every=4))
    broken = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxgpt.fitting.catch_signals", _stop_at(4))
        with pytest.raises(Preempted):
            fit(half, broken, progress=False)
    fit(half, broken, progress=False)
    assert losses_of(broken) == losses_of(whole.directory) and len(losses_of(broken)) == 8


def losses_of(directory):
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line.get("loss") is not None]


def _stop_at(step):
    """A signal that comes in this step."""

    @contextlib.contextmanager
    def catch_signals():
        yield lambda asked: "SIGTERM" if asked == step else None

    return catch_signals


@pytest.mark.slow
def test_exact_matches_are_counted(trained):
    _, run = trained
    found = evaluate_run(run)
    assert found["pairs"] == 6 and 0 <= found["exact"] <= 1 and found["bits_per_byte"] is None
    table = format_evaluation(found)
    assert f"{found['exact']:.2%} of 6 pairs exact" in table
    wide = evaluate_run(run, beams=2)
    assert wide["loss"] == found["loss"] and wide["pairs"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("encoder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_text_that_a_run_writes_is_exact(trained, encoder, tmp_path):
    """Pairs made of what the run itself writes, greedily: all are exact but the one that is spoilt."""
    experiment, run = trained
    if not encoder:
        model = dataclasses.replace(experiment.model, n_encoder_layer=0, block_size=16)
        run = fit(dataclasses.replace(experiment, model=model), tmp_path / "plain", progress=False)
    sources = ["abc", "d", "ca", "bb"]
    written = run.sample(sources, greedy=True, max_new_tokens=5)
    assert run.sample([f"{source}\t" for source in sources], greedy=True, max_new_tokens=5) == written
    pairs = [[s, w] for s, w in zip(sources, written, strict=True) if w and "\t" not in w and len(w) < 5]
    if not pairs:
        pytest.skip("it writes to the end of its context, so that nothing can be exact")
    path = tmp_path / "own.tsv"
    path.write_text("".join(f"{s}\t{w}\n" for s, w in pairs))
    assert evaluate_run(run, str(path))["exact"] == 1.0
    path.write_text("".join(f"{s}\t{w}\n" for s, w in [*pairs, ["aa", "A" * 4]]))
    found, n = evaluate_run(run, str(path)), len(pairs) + 1
    assert found["exact"] == pytest.approx((n - 1) / n)
    assert found["exact_error"] == pytest.approx((n - 1) ** 0.5 / n**1.5)  # sqrt(p (1 - p) / n)


@pytest.mark.slow
def test_the_xray_shows_who_reads_what(trained):
    _, run = trained
    html = xray(run, "abcd")
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])
    names = [m["name"] for m in data["attention"]]
    assert names == [
        "layer 1",
        "layer 1, cross-attention",
        "layer 2",
        "layer 2, cross-attention",
        "encoder, layer 1",
        "encoder, layer 2",
    ]
    across = data["attention"][1]
    assert (across["queries"], across["keys"], across["shares"]) == ("text", "source", None)
    assert across["roots"]["shape"][2] == 4 and "pairs of texts" in data["why_no_corpus"]
    ids = run.tokenizer.encode("abcd").tolist()
    found = capture_activations(run.model, run.params, run.tokenizer.encode("\tD").tolist(), source=ids)
    for weights_NTS in (*found.cross_LNTS, *found.encoder_LNSS):
        np.testing.assert_allclose(weights_NTS.sum(axis=-1), 1, **FLOAT32_REORDERED)
    assert found.cross_LNTS[0].shape == (2, 2, 4) and (found.encoder_LNSS[0] > 0).all()
    assert [b.name for b in found.branches][:3] == ["h_0/attn", "h_0/cross", "h_0/mlp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, said",
    [
        ({"data": DataConfig()}, "an encoder reads the first of two texts, so the data need pairs"),
        ({"data": DataConfig(path="gone.tsv")}, "no file at gone.tsv: --data.path NAME.tsv takes a file with a pair"),
        ({"data": DataConfig(corpus="spanish-numbers.tsv", tokenizer="ids")}, "pairs need char, byte, bpe"),
    ],
)
def test_training_without_pairs(trained, tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        fit(dataclasses.replace(trained[0], **change), tmp_path / "run", progress=False)


@pytest.mark.slow
def test_no_family_has_it(trained, tmp_path):
    with pytest.raises(UserError, match="n_encoder_layer"):
        export_hf(str(trained[1].directory), str(tmp_path / "out"))
