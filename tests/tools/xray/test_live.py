"""The page that is the model: its tokens, tokenizers and switches against Python's, in a real browser."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.data.bpe import WORDS, BPETokenizer, train_bpe
from jaxgpt.data.tokenizer import ByteTokenizer, CharTokenizer, IdTokenizer
from jaxgpt.encdec import build_model
from jaxgpt.errors import UserError
from jaxgpt.interventions import edit, zero
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.session import fit
from jaxgpt.tools.xray.activations import capture_activations
from jaxgpt.tools.xray.live import hold, make_page, restore
from tests.helpers import apply, make_model, stack_layers, tiny_experiment

CHARACTERS = "\n <>/=()abcdefghijklmnopqrstuvwxyzñ"
NARROW = GPTConfig(vocab_size=len(CHARACTERS) + 3, block_size=24, n_layer=2, n_head=2, n_embd=16)  # 3 of padding

# Together they have every option that changes what a decoder computes.
ARCHITECTURES = {
    "gpt2": {},
    "quickstart": dict(
        bias=False, norm="rmsnorm", activation="swiglu", position="rope", qk_norm=True, tie_embeddings=False
    ),
    "original": dict(norm_position="post", position="sinusoidal", activation="relu", scale_embeddings=True),
    "olmo": dict(
        norm_position="output", norm="rmsnorm", activation="gelu", position="none", qk_norm=True, qk_norm_over="heads"
    ),
    "gemma": dict(
        n_layer=3, n_head=4, n_kv_head=2, head_dim=6, mlp_dim=21, norm="rmsnorm", norm_offset=True,
        norm_position="sandwich", activation="geglu_tanh", position="rope", rope_local_theta=50.0, sliding_window=5,
        global_every=3, query_scale=9.0, attention_softcap=2.0, logit_softcap=3.0, scale_embeddings=True, bias=False,
    ),
    "neox": dict(
        parallel_residual=True, activation="relu2", position="rope", rope_fraction=0.5, rope_scaling="llama3",
        rope_factor=4.0, rope_original_context=32, n_kv_head=1, qkv_bias=True, out_bias=False, sliding_window=7,
    ),
    "stacked": dict(
        scan_layers=True, activation="geglu", position="rope", rope_scaling="linear", rope_factor=2.0, remat="full"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of characters, whose model is replaced by others."""
    directory = tmp_path_factory.mktemp("live")
    (directory / "text.txt").write_text(CHARACTERS * 20)
    experiment = tiny_experiment(directory / "text.txt", steps=2, eval_every=2)
    return fit(dataclasses.replace(experiment, name="live"), directory / "run", progress=False)


def with_model(base, config, tokenizer=None):
    """The run with a random model that has opinions."""
    model, params = make_model(dataclasses.replace(config, scan_layers=False))
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)
    if config.scan_layers:
        model, params = build_model(config), stack_layers(params, config.n_layer)
    return dataclasses.replace(base, model=model, params=params, tokenizer=tokenizer or CharTokenizer(CHARACTERS))


def of_page(run, weights="int8"):
    """(model, params) with which Python computes what the page does."""
    model, params = unstack_layers(run.model, run.params)
    return model, restore(hold(params, weights))


@pytest.fixture
def visit(open_page, tmp_path):
    """(run, ...) -> its page, which must complain of nothing."""
    pages = []

    def visit(run, prompt="", **options):
        path = tmp_path / f"{len(pages)}.html"
        path.write_text(make_page(run, prompt, **options), encoding="utf-8")
        pages.append(open_page(path))
        return pages[-1]

    yield visit
    for page in pages:
        assert page.complaints == []
        page.close()


GREEDY = """([prompts, length]) => prompts.map((prompt) => {
  engine.tokens.length = 0;
  prompt.forEach((token) => engine.step(token));
  while (engine.tokens.length < length) engine.step(engine.ranked().ids[0]);
  return engine.tokens.slice();
})"""
READ = "(tokens) => { engine.tokens.length = 0; tokens.forEach((token) => engine.step(token)); }"


def check_greedy(page, run, weights, prompts):
    """The page's tokens after each prompt are those that Python's model finds most probable."""
    model, params = of_page(run, weights)
    T, V = run.model.config.block_size, run.tokenizer.vocab_size
    tokens_BT = np.array(page.evaluate(GREEDY, [prompts.tolist(), T]))
    best_BT = np.argmax(apply(model, params, jnp.asarray(tokens_BT))[..., :V], axis=-1)
    first = prompts.shape[1]
    np.testing.assert_array_equal(tokens_BT[:, :first], prompts)
    np.testing.assert_array_equal(tokens_BT[:, first:], best_BT[:, first - 1 : -1])
    return tokens_BT


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_and_activations_are_pythons(base, visit, name):
    run = with_model(base, dataclasses.replace(NARROW, **ARCHITECTURES[name]))
    weights = "float32" if name == "gpt2" else "int8"
    page = visit(run, weights=weights)
    prompts = np.random.default_rng(0).integers(0, run.tokenizer.vocab_size, (8, 4))
    tokens_BT = check_greedy(page, run, weights, prompts)
    assert len({tuple(row) for row in tokens_BT[:, 4:]}) > 1  # the prompt matters

    text = np.random.default_rng(1).integers(0, run.tokenizer.vocab_size, 20).tolist()
    page.evaluate(READ, text)
    plain = "JSON.parse(JSON.stringify(engine.activations(), (_, x) => (ArrayBuffer.isView(x) ? [...x] : x)))"
    seen = page.evaluate(plain)
    model, params = of_page(run, weights)
    found = capture_activations(model, params, text, run.tokenizer.vocab_size)
    check_activations(seen, found)


def unpack(reference):
    return np.array(reference["values"]).reshape(reference["shape"])


def check_activations(seen, found):
    """What the page's engine hands to the sections is what the X-ray captures in Python."""
    near = dict(rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(seen["bits"][1:]) * -np.log(2), found.guess.logprob_T[:-1], **near)
    for guess, expected in zip([seen["guess"], *seen["lens"]], [found.guess, *found.lens], strict=True):
        np.testing.assert_array_equal(unpack(guess["ids"]), expected.tokens_TK)
        np.testing.assert_allclose(unpack(guess["p"]), expected.probabilities_TK, **near)
        np.testing.assert_allclose(guess["actual"][:-1], np.exp(expected.logprob_T[:-1]), **near)
    for drawn, weights_NTS in zip(seen["attention"], found.weights_LNTS, strict=True):
        np.testing.assert_allclose(unpack(drawn["roots"]), 255 * np.sqrt(weights_NTS), atol=0.51)
    np.testing.assert_allclose(seen["start"], found.start_T, **near)
    for branch, expected in zip(seen["branches"], found.branches, strict=True):
        assert branch["name"] == expected.name
        np.testing.assert_allclose(branch["added"], expected.added_T, **near)
        np.testing.assert_allclose(branch["stream"], expected.stream_T, **near)
    norms = {norm.name: norm for norm in found.norms}
    assert sorted(norm["name"] for norm in seen["norms"]) == sorted(norms)
    for norm in seen["norms"]:
        expected = norms[norm["name"]]
        np.testing.assert_allclose(norm["x"], expected.before_TD[:, :8], **near)
        np.testing.assert_allclose(norm["before"]["mean"], expected.before_TD.mean(axis=1), **near)
        np.testing.assert_allclose(norm["after"]["variance"], expected.after_TD.var(axis=1), **near)
        np.testing.assert_allclose(norm["scales"][0], expected.scale_D.mean(), **near)
    for units, hidden_TF in zip(seen["mlp"], found.hidden_LTF, strict=True):
        np.testing.assert_allclose(unpack(units["values"])[:, 0], hidden_TF.max(axis=1), **near)
        np.testing.assert_allclose(units["peaks"]["values"], np.maximum(hidden_TF.max(axis=0), 0), **near)
    np.testing.assert_allclose(unpack(seen["sampling"]["logits"]), np.sort(found.logits_V)[::-1], **near)


@pytest.mark.parametrize("name", ["quickstart", "gemma", "neox"])
def test_what_is_switched_off_is_zero_as_in_python(base, visit, name):
    run = with_model(base, dataclasses.replace(NARROW, **ARCHITECTURES[name]))
    page = visit(run)
    text = np.random.default_rng(1).integers(0, run.tokenizer.vocab_size, 20)
    tokens_BT, losses = jnp.asarray(text)[None], []
    for off, edits in {
        (): [],
        ("1,1",): [zero("heads", 1, index=1)],
        ("0,mlp",): [zero("mlp", 0)],
        ("0,0", "0,1", "1,mlp"): [zero("heads", 0, index=[0, 1]), zero("mlp", 1)],
    }.items():
        page.evaluate("(off) => { engine.off = new Set(off); }", off)
        page.evaluate(READ, text.tolist())
        seen = page.evaluate("engine.tokens.slice(1).map((_, t) => engine.logprob(t))")
        model, params = edit(*of_page(run), edits)
        logits_TV = model.apply({"params": params}, tokens_BT)[0, :-1, : run.tokenizer.vocab_size]
        logprob_T = jnp.take_along_axis(jax.nn.log_softmax(logits_TV), tokens_BT[0, 1:, None], axis=1)[:, 0]
        np.testing.assert_allclose(seen, logprob_T, atol=1e-4)
        losses.append(np.mean(seen))
    assert np.ptp(losses[1:]) > 1e-3 and min(abs(loss - losses[0]) for loss in losses[1:]) > 1e-3


# Tokenizers -----------------------------------------------------------------------------------------------------------

ODD = (
    "a lugar, ñandú\n\n  3.14 it's IT'S we'LL x'ſ\tüber\r\n\r\n  end",
    "日本語 \U0001f600\U0001f468‍\U0001f469‍\U0001f467 é é ﬁ Ǆ \u0085next\ufeffbom\u00a0nbsp\u2028line\u3000wide",
    "12345 ١٢٣ Ⅷ ²³ ___ !!\n!! \x00\x01 <|endoftext|> 'S 'Re",
    "   ",
    "",
)


def bpe(pattern=None):
    tokenizer = train_bpe([text * 3 for text in ODD], 400)
    saved = json.loads(tokenizer.to_json())
    if pattern is not None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = saved["pre_tokenizer"] | {"use_regex": False}
        saved["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return BPETokenizer(json.dumps(saved))


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "gpt4", "llama3"])
def test_tokenizers_are_pythons(base, visit, kind):
    if kind not in ("char", "byte"):
        pytest.importorskip("tokenizers")
    tokenizer = {
        "char": lambda: CharTokenizer("".join(ODD)),
        "byte": ByteTokenizer,
        "gpt2": bpe,
        "gpt4": lambda: bpe(WORDS[0]),
        "llama3": lambda: bpe(WORDS[1]),
    }[kind]()
    run = with_model(base, dataclasses.replace(NARROW, vocab_size=tokenizer.vocab_size), tokenizer)
    page = visit(run)
    for text in ODD:
        seen = page.evaluate("(text) => tokenizer.encode(text)", text)
        assert seen == {"ids": tokenizer.encode(text).tolist(), "unknown": []}, text
        back = page.evaluate(
            "(ids) => new TextDecoder('utf-8', { ignoreBOM: true }).decode(Uint8Array.from(ids.flatMap((id) => [...tokenizer.bytes[id]])))",
            seen["ids"],
        )
        assert back == text


# What it refuses ------------------------------------------------------------------------------------------------------


def test_what_it_refuses(base, monkeypatch):
    run = with_model(base, NARROW)
    refused = [
        (dict(weights="int4"), run, "weights='int4': needs int8 or float32"),
        (dict(prompt="a Z"), run, r"'Z' \(U\+005A\)"),
        ({}, with_model(base, dataclasses.replace(NARROW, n_encoder_layer=1)), "has an encoder, .*jaxgpt xray"),
        ({}, run.for_decoding("int8"), "converted by for_decoding"),
        ({}, dataclasses.replace(run, tokenizer=IdTokenizer(30)), "bare ids"),
        ({}, dataclasses.replace(run, params=jax.tree.map(lambda x: x * jnp.nan, run.params)), "is not finite"),
    ]
    for options, bad, message in refused:
        with pytest.raises(UserError, match=message):
            make_page(bad, **options)
    monkeypatch.setattr("jaxgpt.tools.xray.live.MOST_PARAMETERS", 1000)
    with pytest.raises(UserError, match="has [0-9,]+ parameters, too many for a page: at most 1,000"):
        make_page(run)
