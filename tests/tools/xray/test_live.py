"""The page that is the model: its tokens, tokenizers and switches against Python's, in a real browser."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("playwright", reason="playwright drives the browser: pip install '.[test]'")

from playwright.sync_api import expect

from jaxgpt.data.tokenizer import WORDS, ByteTokenizer, CharTokenizer, IdTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.interventions import edit, zero
from jaxgpt.model import GPTConfig
from jaxgpt.sample.quantize import unstack_layers
from jaxgpt.tools.xray.live import hold, make_page
from jaxgpt.tools.xray.xray import capture_activations
from tests.helpers import apply, make_model, quick, stack_layers, with_words

CHARACTERS = "\n 1<>/=()abcdefghijklmnopqrstuvwxyzñ"
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
        scan_layers=True, activation="geglu", position="rope", rope_scaling="longrope", rope_magnitude=1.2, remat="full",
        rope_original_context=8, rope_short_factors=(1.0,) * 4, rope_long_factors=(1.1, 1.3, 2.0, 3.0),
    ),
}  # fmt: skip


@pytest.fixture
def base(shown_run):
    """A run whose model and tokenizer are replaced by others."""
    return shown_run


def with_model(base, config, tokenizer=None):
    """The run with a random model that has opinions."""
    model, params = make_model(dataclasses.replace(config, scan_layers=False))
    params = jax.tree.map(lambda x: x if x.ndim < 2 else 4 * x, params)
    if config.scan_layers:
        model, params = config.make_model(), stack_layers(params, config.n_layer)
    return dataclasses.replace(base, model=model, params=params, tokenizer=tokenizer or CharTokenizer(CHARACTERS))


def of_page(run, weights="int8"):
    """(model, params) with which Python computes what the page does."""
    model, params = unstack_layers(run.model, run.params)

    def is_matrix(x):
        return isinstance(x, dict) and "values" in x

    def restore(path, x):
        if not is_matrix(x):
            return x
        matrix_FD = x["values"].astype(np.float32) * (1 if x["scale"] is None else x["scale"][:, None])
        return matrix_FD if path[-1].key == "embedding" else matrix_FD.T

    return model, jax.tree.map_with_path(restore, hold(params, weights), is_leaf=is_matrix)


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


@quick(ARCHITECTURES, "quickstart")
def test_greedy_tokens_and_activations_are_pythons(base, visit, name):
    run = with_model(base, dataclasses.replace(NARROW, **ARCHITECTURES[name]))
    weights = "float32" if name == "gpt2" else "int8"
    page = visit(run, weights=weights)
    prompts = np.random.default_rng(0).integers(0, run.tokenizer.vocab_size, (8, 4))
    tokens_BT = np.array(page.evaluate(GREEDY, [prompts.tolist(), run.model.config.block_size]))
    model, params = of_page(run, weights)
    best_BT = np.argmax(apply(model, params, jnp.asarray(tokens_BT))[..., : run.tokenizer.vocab_size], axis=-1)
    np.testing.assert_array_equal(tokens_BT[:, :4], prompts)
    np.testing.assert_array_equal(tokens_BT[:, 4:], best_BT[:, 3:-1])
    assert len({tuple(row) for row in tokens_BT[:, 4:]}) > 1  # the prompt matters

    text = np.random.default_rng(1).integers(0, run.tokenizer.vocab_size, 20).tolist()
    page.evaluate(READ, text)
    plain = "JSON.parse(JSON.stringify(engine.activations(), (_, x) => (ArrayBuffer.isView(x) ? [...x] : x)))"
    seen = page.evaluate(plain)
    found = capture_activations(model, params, text, run.tokenizer.vocab_size)

    def unpack(reference):
        return np.array(reference["values"]).reshape(reference["shape"])

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
        np.testing.assert_allclose(norm["scale"], expected.scale_D, **near)
    for units, hidden_TF in zip(seen["mlp"], found.hidden_LTF, strict=True):
        np.testing.assert_allclose(unpack(units["values"])[:, 0], hidden_TF.max(axis=1), **near)
        np.testing.assert_allclose(units["peaks"]["values"], np.maximum(hidden_TF.max(axis=0), 0), **near)
    np.testing.assert_allclose(unpack(seen["sampling"]["logits"]), np.sort(found.logits_V)[::-1], **near)


# Tokenizers -----------------------------------------------------------------------------------------------------------

ODD = (
    "a lugar, ñandú\n\n  3.14 it's IT'S we'LL x'ſ\tüber\r\n\r\n  end",
    "日本語 \U0001f600\U0001f468‍\U0001f469‍\U0001f467 é é ﬁ Ǆ \u0085next\ufeffbom\u00a0nbsp\u2028line\u3000wide",
    "12345 ١٢٣ Ⅷ ²³ ___ !!\n!! \x00\x01 <|endoftext|> 'S 'Re",
    "a  \ufeffb  \u0085c",  # one is space to JavaScript alone, the other to Unicode
    "   ",
    "",
)


def bpe(pattern=None):
    tokenizer = train_bpe([text * 3 for text in ODD], 400)
    return tokenizer if pattern is None else with_words(tokenizer, pattern)


@quick(("char", "byte", "gpt2", "gpt4", "llama3"), "char", "llama3")
def test_tokenizers_are_pythons(base, visit, name):
    tokenizer = {
        "char": lambda: CharTokenizer("".join(ODD)),
        "byte": ByteTokenizer,
        "gpt2": bpe,
        "gpt4": lambda: bpe(WORDS[0]),
        "llama3": lambda: bpe(WORDS[1]),
    }[name]()
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
        (dict(weights="int4"), run, "weights='int4': needs one of int8, float32"),
        (dict(prompt="a Z"), run, r"'Z' \(U\+005A\)"),
        ({}, run.for_decoding("int8"), "converted by for_decoding"),
        ({}, dataclasses.replace(run, tokenizer=IdTokenizer(30)), "bare ids"),
        ({}, dataclasses.replace(run, params=jax.tree.map(lambda x: x * jnp.nan, run.params)), "is not finite"),
    ]
    model, params = edit(run.model, run.params, [zero("mlp", 0)])
    refused.append(({}, dataclasses.replace(run, model=model, params=params), "the model is edited"))
    for options, bad, message in refused:
        with pytest.raises(UserError, match=message):
            make_page(bad, **options)
    monkeypatch.setattr("jaxgpt.tools.xray.live.MOST_PARAMETERS", 1000)
    with pytest.raises(UserError, match="has [0-9,]+ parameters, too many for a page: at most 1,000"):
        make_page(run)


# The page -------------------------------------------------------------------------------------------------------------

SCRIPT = "<script>pwned=1</script>"


@pytest.fixture
def typed(base, visit):
    """(run, page), with a text typed that a browser could take for a program."""
    run = with_model(base, dataclasses.replace(NARROW, block_size=40, **ARCHITECTURES["quickstart"]))
    page = visit(run, SCRIPT)
    page.fill("#text", "a" + SCRIPT)
    expect(page.locator("#surprise .tok")).to_have_count(1 + len(SCRIPT))
    return run, page


def bits_said(page):
    """The surprise of each token, as its label says it to two digits."""
    labels = page.eval_on_selector_all("#surprise .tok", "all => all.map(e => e.getAttribute('aria-label'))")
    return [float(re.search(r"([\d.e+-]+) bits", label)[1]) for label in labels[1:]]


def bits_of(run, text, edits=()):
    model, params = edit(*of_page(run), edits)
    tokens_T = run.tokenizer.encode(text)
    logits_TV = apply(model, params, jnp.asarray(tokens_T)[None])[0, :-1, : run.tokenizer.vocab_size]
    return -np.asarray(jax.nn.log_softmax(logits_TV))[np.arange(len(tokens_T) - 1), tokens_T[1:]] / np.log(2)


ROUNDED = dict(rtol=0.01, atol=0.001)  # three digits


@pytest.mark.slow
def test_sections_follow_the_text_and_the_switches(typed):
    run, page = typed
    text = "a" + SCRIPT
    np.testing.assert_allclose(bits_said(page), bits_of(run, text), **ROUNDED)
    page.click("[data-part='1,0']")
    page.click("[data-part='0,mlp']")
    expect(page.locator("#said")).to_contain_text("Switched off: 2")
    expect(page.locator("[data-part='1,0']")).to_have_attribute("aria-pressed", "false")
    off = [zero("heads", 1, index=0), zero("mlp", 0)]
    np.testing.assert_allclose(bits_said(page), bits_of(run, text, off), **ROUNDED)
    page.fill("#text", "abc")  # fewer tokens, with the same parts off
    expect(page.locator("#surprise .tok")).to_have_count(3)
    np.testing.assert_allclose(bits_said(page), bits_of(run, "abc", off), **ROUNDED)
    page.click("#all-on")
    expect(page.locator("#said")).not_to_contain_text("Switched off")
    np.testing.assert_allclose(bits_said(page), bits_of(run, "abc"), **ROUNDED)
    page.fill("#text", "")  # the token that stands for an empty text
    expect(page.locator("#surprise .tok")).to_have_count(1)
    # No text is parsed as HTML.
    assert max(map(len, page.locator("#norm-elements td").all_inner_texts())) < 9, "three digits each"
    assert page.evaluate("typeof pwned") == "undefined" and page.locator("body script").count() == 3


@pytest.mark.slow
def test_it_writes_what_is_most_probable_and_stops(typed):
    """At temperature 0, past the context; the window moves by half of it."""
    run, page = typed
    page.locator("#temperature").fill("0")
    page.evaluate("() => { box.value = 'abc'; box.dispatchEvent(new Event('input')); button.click(); }")  # at once
    page.wait_for_selector("#said:has-text('here the last')")
    page.click("#write")
    expect(page.locator("#write")).to_have_text("write")
    text = page.input_value("#text")
    assert text.startswith("abc") and len(text) > 40
    expect(page.locator("#said")).to_contain_text(f"{len(text)} tokens; the model reads at most 40")
    model, params = of_page(run)
    logits_TV = apply(model, params, jnp.asarray(run.tokenizer.encode(text[:40]))[None])[
        0, :, : run.tokenizer.vocab_size
    ]
    assert run.tokenizer.decode(np.argmax(logits_TV[2:-1], axis=1)) == text[3:40]
    read = page.locator("#surprise .tok").count()
    assert 20 < read <= 40 and (len(text) - read) % 20 == 0
    np.testing.assert_allclose(bits_said(page), bits_of(run, text[-read:]), **ROUNDED)
