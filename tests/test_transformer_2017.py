"""experiments/transformer_2017: who reads whom, cached and not; the sizes of 2017; beams; pairs; from file to target."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.data.pipeline import training_batches, validation_batches
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig, label_parameters, learning_rate
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import load
from jaxgpt.sample.programs import read
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.training import fit
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model, tiny_experiment

beams, encoder_decoder, pairs, train, translate = import_pages(
    "transformer_2017", "beams", "encoder_decoder", "pairs", "train", "translate"
)

CONFIG = encoder_decoder.EncoderDecoderConfig(
    **dataclasses.asdict(TINY)
    | dict(norm_position="post", activation="relu", position="sinusoidal", scale_embeddings=True, n_encoder_layer=2)
)
EVERY = {
    "2017": {},
    "modern": {"norm_position": "pre", "position": "rope", "norm": "rmsnorm", "qk_norm": True, "n_kv_head": 1},
    "sandwich": {"norm_position": "sandwich", "activation": "swiglu", "position": "learned", "remat": "full"},
}
SOURCE = jnp.array([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]])
SEGMENTS = jnp.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
TARGET = jnp.array([[7, 8, 2, 1], [7, 1, 8, 3]])


@pytest.fixture(scope="module", params=EVERY)
def model(request):
    return make_model(dataclasses.replace(CONFIG, **EVERY[request.param]))


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, target, source, segments=None, target_segments=None):
    read = {"source_BS": source, "source_segments_BS": segments, "segments_BT": target_segments}
    return model.apply({"params": params}, target, **read)


@pytest.mark.slow
def test_who_reads_whom(model):
    """By the gradient of a token's features to every embedding: the target up to itself, the source but for padding."""
    model, params = model

    def features(rows_ND, t):
        # Each token an id of its own, so that the gradient to its row is that to its place.
        swapped = {**params, "wte": {"embedding": rows_ND}}
        source = {"source_BS": 4 + jnp.arange(5)[None], "source_segments_BS": jnp.array([[1, 1, 1, 0, 0]])}
        x_BTD = model.apply({"params": swapped}, jnp.arange(4)[None], **source, method="hidden_states")
        return jnp.abs(x_BTD[0, t]).sum()

    table_VD = params["wte"]["embedding"]
    reach = jax.jit(jax.vmap(jax.grad(features), in_axes=(None, 0)))(table_VD, jnp.arange(4))[:, :9]
    expected_TN = np.concatenate([np.tri(4, dtype=bool), np.tile([True, True, True, False, False], (4, 1))], axis=1)
    np.testing.assert_array_equal(np.abs(reach).sum(axis=-1) > 0, expected_TN)


@pytest.mark.slow
def test_cached_equals_uncached(model):
    model, params = model
    whole = logits(model, params, TARGET, SOURCE, SEGMENTS)
    cache = beams.make_cache(model, params, 8, SOURCE, SEGMENTS)

    @jax.jit
    def step(cache, tokens_BT, t):
        x_BTD, cache = read(model, params, cache, tokens_BT, jnp.broadcast_to(t, (2, 1)))
        return model.apply({"params": params}, x_BTD, method="unembed"), cache

    for t in range(4):
        one, cache = step(cache, TARGET[:, t : t + 1], jnp.asarray(t))
        np.testing.assert_allclose(one[:, 0], whole[:, t], **FLOAT32_REORDERED)


# The paper's numbers ---------------------------------------------------------------------------------------------------


def test_the_base_model_of_2017():
    """Table 3 of arXiv:1706.03762: N=6, d_model=512, d_ff=2048, h=8, d_k=64, about 37,000 shared tokens, 65 million."""
    shapes = dataclasses.replace(train.base.model, vocab_size=37_000).make_model().shapes()
    assert shapes["h_5"]["cross"]["k"]["kernel"].shape == (512, 8 * 64)
    assert set(shapes["h_0"]) == {"attn", "cross", "mlp", "ln_1", "ln_cross", "ln_2"} and "lm_head" not in shapes
    assert count_parameters(shapes) == 37_000 * 512 + 6 * 3_152_384 + 6 * 4_204_032  # by table, encoder and decoder
    labels = label_parameters(shapes)
    assert labels["encoder_1"]["mlp"]["c_fc"] == {"kernel": "matrix", "bias": "vector"}
    assert labels["h_0"]["cross"]["v"]["kernel"] == "matrix" and labels["wte"]["embedding"] == "table"


def test_the_schedule_of_2017():
    """Equation 3: d_model^-0.5 min(step^-0.5, step warmup^-1.5), steps from 1; ours warms up one step longer."""
    config = OptimConfig(schedule="inverse_sqrt", warmup_steps=4000, learning_rate=(512 * 4001) ** -0.5)
    rate = learning_rate(config, 100_000)
    for step in (1, 100, 4001, 20_000, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4001**-1.5)
        assert float(rate(step - 1)) == pytest.approx(paper, rel=1e-4)  # optax counts in float32


# Beams -----------------------------------------------------------------------------------------------------------------

START, END = 1, 3


def search(model, params, sources, **how):
    how = {"start": START, "end": END, "vocab_size": model.config.vocab_size} | how
    return beams.beam_search(*for_decoding(model, params), sources, **how)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.6, 0.0])
def test_a_wide_search_finds_the_best_of_all_targets(alpha):
    """Every target of up to block_size tokens, scored by the whole model."""
    model, params = make_model(dataclasses.replace(CONFIG, vocab_size=5, block_size=3), seed=3)
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)
    source, others = [1, 2, 0], [token for token in range(5) if token != END]
    scored = []
    for length in (1, 2, 3):
        texts = [[*text, END] for text in itertools.product(others, repeat=length - 1)]
        texts += [list(text) for text in itertools.product(others, repeat=3)] if length == 3 else []
        rows_BT = jnp.array([[START, *text] for text in texts])
        logprobs_BTV = jax.nn.log_softmax(
            logits(model, params, rows_BT[:, :-1], jnp.tile(jnp.array(source), (len(texts), 1)))
        )
        nats_B = jnp.take_along_axis(logprobs_BTV, rows_BT[:, 1:, None], axis=2)[:, :, 0].sum(axis=1)
        scored += zip((nats_B / ((5 + length) / 6) ** alpha).tolist(), texts, strict=True)
    score, best = max(scored)
    found = search(model, params, [source], beams=64, length_penalty=alpha)
    assert found.tokens[0][0] == [token for token in best if token != END]
    assert found.scores[0][0] == pytest.approx(score, abs=1e-4)
    assert found.scores[0] == sorted(found.scores[0], reverse=True)
    assert len({tuple(text) for text in found.tokens[0]}) == len(found.tokens[0])  # none twice


@pytest.mark.slow
def test_a_search_waits_for_a_longer_target_that_may_yet_win():
    """Tokens that follow each other by a table. After 0 the end is the likeliest, and 1 the next: then for ever 1."""
    sizes = dict(vocab_size=4, n_layer=1, n_encoder_layer=1, position="none", scale_embeddings=False, block_size=6)
    config = dataclasses.replace(CONFIG, **sizes, norm="rmsnorm", norm_position="pre", tie_embeddings=False)
    model, params = make_model(config)
    params = jax.tree.map(np.zeros_like, params)
    params["wte"]["embedding"] += np.eye(4, 8, dtype=np.float32)  # whose norm is sqrt(8) times it
    params["ln_f"]["scale"] += 1.0
    after_0, after_1 = np.log([0.02, 0.45, 0.03, 0.5]), np.log([0.01, 0.97, 0.01, 0.01])
    params["lm_head"]["kernel"][:2] += np.float32([after_0, after_1]) / 8**0.5
    found = search(model, params, [[2]], beams=1, start=0, length_penalty=2.0)
    assert found.tokens == [[[1] * 6]]
    assert found.scores[0][0] == pytest.approx((np.log(0.45) + 5 * np.log(0.97)) / (11 / 6) ** 2, rel=1e-4)
    shorter = search(model, params, [[2]], beams=1, start=0, length_penalty=0.0)
    assert (shorter.tokens, shorter.scores[0][0]) == ([[[]]], pytest.approx(np.log(0.5), rel=1e-4))  # the end counts


# Pairs -----------------------------------------------------------------------------------------------------------------

TEXTS = [(f"{n} " + "x" * (n % 5), "y" * (n % 7 + 1)) for n in range(40)]


def test_each_pair_once_an_epoch_and_whole(tmp_path):
    """Sources lie apart, with the number of the target that is made of them; what is too long is left out."""
    path = tmp_path / "pairs.tsv"
    path.write_text("\ufeff" + "\n".join(f"{source}\t{target}" for source, target in TEXTS) + "\n\n")
    assert list(pairs.read_pairs(path)) == TEXTS
    tokenizer, T = ByteTokenizer(), 16
    split = pairs.Pairs.encode(TEXTS, tokenizer, T)
    for batches in (
        validation_batches(split, block_size=T, batch_size=4),
        itertools.islice(training_batches(split, block_size=T, batch_size=1, seed=3), split.rows),
    ):
        found = []
        for batch in batches:
            for row in range(len(batch.inputs_BT)):
                source_S, read_S = (batch.extras[name][row] for name in ("source_BS", "source_segments_BS"))
                for number in range(1, batch.segments_BT[row].max() + 1):
                    here = batch.segments_BT[row] == number
                    assert batch.mask_BT[row, here].all() and batch.inputs_BT[row, here][0] == ord("\t")
                    target = tokenizer.decode(batch.targets_BT[row, here])
                    found.append((tokenizer.decode(source_S[read_S == number]), target.removesuffix("\n")))
        assert sorted(found) == sorted(TEXTS)
    short = pairs.Pairs.encode(TEXTS, tokenizer, 6)
    assert short.left_out == sum(max(len(source), len(target) + 1) > 6 for source, target in TEXTS) > 0
    config = pairs.PairsConfig(path=str(path), tokenizer="byte", val_fraction=0.25)
    dataset = config.open_dataset(GPTConfig(block_size=16))
    assert len(dataset.train.lengths) == 30 and len(dataset.val.lengths) == 10
    assert dataset.tokenizer.decode(dataset.val.read(0)[0]) == "\t".join(TEXTS[30]) + "\n"
    path.write_text("a\tb\nonly one\n")
    with pytest.raises(UserError, match=":2: got 'only one', needs two texts with one tab"):
        list(pairs.read_pairs(path))


# From the file to the target -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_opened_extended_and_translates(tmp_path):
    """On pairs that are turned round. Its classes are named in experiment.json, and found again."""
    path, rng = tmp_path / "pairs.tsv", np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcd"), rng.integers(1, 5))) for _ in range(60)]
    path.write_text("".join(f"{word}\t{word[::-1].upper()}\n" for word in words))
    plain: Experiment = tiny_experiment(path, steps=8, eval_every=4)
    experiment = dataclasses.replace(
        plain,
        model=dataclasses.replace(CONFIG, vocab_size=None, norm_position="pre"),
        data=pairs.PairsConfig(path=str(path), tokenizer="char"),
        optim=OptimConfig(warmup_steps=2, schedule="inverse_sqrt", label_smoothing=0.1),
    )
    run = fit(experiment, tmp_path / "run", progress=False)
    record = json.loads((run.directory / "experiment.json").read_text())["experiment"]
    assert record["model"]["class"] == "encoder_decoder:EncoderDecoderConfig"
    again = load(run.directory, which="last")
    assert again.experiment.model == experiment.model and again.experiment.data == experiment.data
    sources = ["abc", "d", "ca", "bb"]
    written = translate.translate(run, sources)
    assert written == translate.translate(run, sources[::-1])[::-1] and all(len(text) <= 8 for text in written)
    with pytest.raises(UserError, match="needs a source"):
        run.sample("abc")
    longer = dataclasses.replace(experiment, train=dataclasses.replace(experiment.train, steps=10))
    assert fit(longer, run.directory, progress=False, extend=True).step in (4, 8, 10)
