"""The X-ray page: its numbers against NumPy's, its parts by clicks and keys in a real browser, its text as text."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample import Sampling
from jaxgpt.sample.filters import SamplingRows
from jaxgpt.tools.xray.xray import capture_activations, project_to_plane, read_embedding, xray
from tests.browser import unnamed, unreadable
from tests.helpers import make_model

SCRIPT = "<script>pwned=1</script>"
PROMPT = "La Mancha " + SCRIPT + "\n"


@pytest.fixture(scope="module")
def run(shown_run):
    _, params = make_model(shown_run.model.config)  # with opinions, which a few steps do not give
    return dataclasses.replace(shown_run, params=jax.tree.map(lambda x: x if x.ndim < 2 else 5 * x, params))


@pytest.fixture(scope="module")
def found(run):
    return capture_activations(run.model, run.params, run.tokenizer.encode(PROMPT).tolist())


@pytest.fixture(scope="module")
def path(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "xray.html"
    path.write_text(xray(run, PROMPT), encoding="utf-8")
    return path


@pytest.fixture
def page(open_page, path):
    page = open_page(path)
    yield page
    assert page.complaints == []
    page.close()


def cells(page, selector):
    """Rows of texts."""
    return page.eval_on_selector_all(
        f"{selector} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def shades(page, selector):
    """How much of its colour each token has, in percent."""
    much = "all => all.map(e => parseFloat(e.style.getPropertyValue('--much')))"
    return page.eval_on_selector_all(selector, much)


def number(text):
    return float(text.replace("%", "")) / (100 if text.endswith("%") else 1)


NEAR = dict(rel=0.06, abs=0.006)  # two digits, or whole percents


# The page as a file ---------------------------------------------------------------------------------------------------


def test_a_page_stands_alone_and_its_text_is_text(path):
    html = path.read_text()
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html
    assert SCRIPT not in html and "onerror" not in html.replace("\\u003cimg src=x onerror", "")
    assert html.count("<script") == html.count("</script>") == 3
    assert "default-src 'none'" in html and "unsafe" not in html


def test_the_plane_is_that_of_the_singular_values(size=1e30):  # its square is above the largest float32
    vectors_ND = np.random.default_rng(0).normal(size=(40, 6)) * [5, 3, 1, 1, 1, 1]
    xy_N2, share = project_to_plane((vectors_ND * size).astype(np.float32))
    u, s, _ = np.linalg.svd(vectors_ND - vectors_ND.mean(axis=0), full_matrices=False)
    expected_N2 = u[:, :2] * s[:2]
    np.testing.assert_allclose(np.abs(xy_N2) * np.abs(expected_N2).max(), np.abs(expected_N2), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(share, s[:2] ** 2 / (s**2).sum(), rtol=1e-4)


# In the browser -------------------------------------------------------------------------------------------------------


def test_surprise_and_its_alternatives(page, run, found):
    tokens = page.locator("#surprise .tok")
    assert tokens.count() == len(PROMPT)
    t = PROMPT.index("M")
    tokens.nth(t).hover()
    bits = -found.guess.logprob_T[t - 1] / math.log(2)
    assert number(re.search(r"([\d.]+) bits", page.text_content("#position"))[1]) == pytest.approx(bits, **NEAR)
    rows = cells(page, "#alternatives")
    assert len(rows) == 5
    expected = [run.tokenizer.decode([i]) for i in found.guess.tokens_TK[t - 1]]
    assert [row[0].strip("“”") for row in rows] == [e.replace("\n", "↵").replace(" ", "␣") for e in expected]
    assert [number(row[1]) for row in rows] == pytest.approx(found.guess.probabilities_TK[t - 1].tolist(), **NEAR)
    assert "bits" in tokens.nth(t).get_attribute("aria-label")
    bits = np.append(0, -found.guess.logprob_T[:-1])
    np.testing.assert_allclose(shades(page, "#surprise .tok"), 100 * bits / bits.max(), atol=1)


def test_a_head_enlarged(page, found):
    shown = page.locator("#attention .head")
    assert shown.count() == 4
    N = found.weights_LNTS[0].shape[0]
    label = page.locator(f"[data-head='1,{N - 1}']").get_attribute("aria-label")
    said = [number(x) for x in re.findall(r"[\d.]+%", label)]
    weights_TS, t = found.weights_LNTS[1][-1], np.arange(2, len(PROMPT))
    shares = [weights_TS[t, at].mean() for at in (t - 1, 0, t)]
    assert label.startswith(f"layer 1, head {N - 1}: previous") and said == pytest.approx(shares, **NEAR)
    page.click("[data-head='1,0']")
    assert page.text_content("#head-title") == "layer 1, head 0"
    t = 9
    page.locator("dialog .tok").nth(t).hover()
    row = found.weights_LNTS[1][0, t]
    rows = cells(page, "#attended")
    assert int(rows[0][1]) == np.argmax(row)
    assert [number(r[2]) for r in rows] == pytest.approx(np.sort(row)[::-1][: len(rows)].tolist(), **NEAR)
    np.testing.assert_allclose(shades(page, "dialog .tok"), 100 * row / row.max(), atol=2)


def test_tables_of_a_position(page, found):
    """Norms as the formula has them, the stream as its branches add to it, and what each layer would predict."""
    t = 4
    page.locator("#surprise .tok").nth(t).click()
    rows = cells(page, "#norms table >> nth=0") or cells(page, "#norms .scroll:first-of-type")
    for row, norm in zip(rows, found.norms, strict=True):
        x_D, y_D = norm.before_TD[t], norm.after_TD[t]
        said = [number(row[i]) for i in (1, 2, 5, 6)]
        assert said == pytest.approx([x_D.mean(), x_D.var(), y_D.mean(), y_D.var()], **NEAR)
    page.select_option("#norm", "2")
    x, inner, gamma, beta, result = cells(page, "#norm-elements")
    norm = found.norms[2]
    assert [number(v) for v in x[1:]] == pytest.approx(norm.before_TD[t, :8].tolist(), **NEAR)
    assert [number(v) for v in result[1:]] == pytest.approx(norm.after_TD[t, :8].tolist(), **NEAR)
    assert number(inner[1]) * number(gamma[1]) + number(beta[1]) == pytest.approx(number(result[1]), **NEAR)
    start, *rows = cells(page, "#stream")
    assert number(start[2]) == pytest.approx(found.start_T[t], **NEAR)
    for row, branch in zip(rows, found.branches, strict=True):
        assert [number(row[1]), number(row[2])] == pytest.approx([branch.added_T[t], branch.stream_T[t]], **NEAR)
    assert [row[0] for row in rows] == ["attention 0", "MLP 0", "attention 1", "MLP 1"]
    page.locator(f"#lens td[data-t='{t + 1}']").first.click()
    assert f"position {t + 1}, of 0 to" in page.text_content("#position")
    rows = cells(page, "#lens-predictions")
    assert len(rows) == len(found.lens) == page.locator("#lens .lens tbody tr").count()
    for row, guess in zip(rows, found.lens, strict=True):
        assert number(row[2]) == pytest.approx(math.exp(guess.logprob_T[t + 1]), **NEAR)
        said = number(re.findall(r"[\d.e-]+%", row[1])[0])
        assert said == pytest.approx(guess.probabilities_TK[t + 1, 0], **NEAR)


def test_units_and_what_excites_them(page, run, found):
    page.locator("#surprise .tok").nth(6).click()
    page.select_option("#mlp-layer", "1")
    hidden_F = found.hidden_LTF[1][6]
    rows = cells(page, "#units")
    assert [number(row[1]) for row in rows] == pytest.approx(np.sort(hidden_F)[::-1][:8].tolist(), **NEAR)
    zeros = number(re.search(r"position: ([\d.]+%)", page.text_content("#units"))[1])
    assert zeros == pytest.approx((hidden_F == 0).mean(), **NEAR)
    page.click("#units button >> nth=2")
    unit = int(page.input_value("#unit"))
    assert unit == int(rows[2][0])
    of_unit_T = found.hidden_LTF[1][:, unit]
    np.testing.assert_allclose(shades(page, "#mlp .tok"), 100 * of_unit_T / of_unit_T.max(), atol=4)  # sixteen levels
    examples = cells(page, "#examples")
    assert len(examples) == 4 and page.locator("#examples mark").count() == 4
    values = [number(row[0]) for row in examples]
    assert values == sorted(values, reverse=True) and values[0] >= 0.9 * of_unit_T.max()
    assert page.evaluate("typeof pwned") == "undefined" and page.locator("img").count() == 0


def test_embeddings_and_neighbours(page, run):
    vectors_VD = np.asarray(run.params["wte"]["embedding"])
    unit_VD = vectors_VD / np.linalg.norm(vectors_VD, axis=1, keepdims=True)
    page.select_option("#embedding-token", "3")
    cosine_V = np.delete(unit_VD @ unit_VD[3], 3)
    said = [number(row[1]) for row in cells(page, "#neighbours")]
    assert said == pytest.approx(np.sort(cosine_V)[::-1][:5].tolist(), **NEAR)
    assert page.locator("#embeddings svg text").count() == run.tokenizer.vocab_size


@pytest.mark.parametrize("how", [{"temperature": 2.0, "top_k": 4}, {"top_p": 0.6}])
def test_sliders_draw_what_sampling_draws(page, found, how):
    for name, value in ({"temperature": 1.0} | how).items():
        page.locator(f"#{name.replace('_', '-')}").fill(str(value))
    p_V = np.asarray(SamplingRows.stack([Sampling(**how)]).probabilities(jnp.asarray(found.logits_V)[None]))[0]
    expected = np.sort(p_V[p_V > 0])[::-1]
    assert re.search(r"be drawn: (\d+) of", page.text_content("#drawn"))[1] == str(len(expected))
    said = page.eval_on_selector_all("#drawn td[data-p]", "all => all.map(e => Number(e.dataset.p))")
    np.testing.assert_allclose(said, expected[:20], rtol=2e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_everything_is_named_and_can_be_read(open_page, path, scheme, width):
    """What a screen reader says of each control, and contrast in both schemes, on a telephone and a screen."""
    page = open_page(path, scheme, width)
    assert page.locator("h1").count() == 1 and page.locator("main").count() == 1
    reached = page.evaluate(
        "[...document.querySelectorAll('.strip')].map(s => s.querySelectorAll('[tabindex=\"0\"]').length)"
    )
    assert set(reached) == {1}  # one stop for each text, not one for each token
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # what is wide scrolls by itself
    assert unnamed(page) == unreadable(page) == page.complaints == []
    page.close()


# What Run.xray takes --------------------------------------------------------------------------------------------------


def data_of(html):
    return json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL)[1])


@pytest.mark.slow
def test_a_packed_run_is_seen_as_it_reads(run):
    """Its embeddings to the half of a step of 8 bits, and no scale counted as a parameter."""
    html = xray(run, "La")
    assert xray(run, run.tokenizer.encode("La").tolist()) == html
    packed, whole = run.for_decoding("int8"), data_of(html)
    found = data_of(xray(packed, "La"))
    assert found["facts"] == whole["facts"]
    rows_VD, exact_VD = read_embedding(packed.params), read_embedding(run.params)
    assert (np.abs(rows_VD - exact_VD).max(axis=1) <= 0.51 / 127 * np.abs(exact_VD).max(axis=1)).all()
    assert np.abs(rows_VD - exact_VD).max() > 0


def test_without_a_corpus_it_says_why(run, tmp_path, monkeypatch):
    moved = dataclasses.replace(run.experiment.data, path=str(tmp_path / "gone.txt"))
    gone = dataclasses.replace(run, experiment=dataclasses.replace(run.experiment, data=moved))
    assert data_of(xray(gone, "La"))["corpus"] is not None  # its tokens are in the cache
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path / "empty"))
    found = data_of(xray(gone, "La"))
    assert found["corpus"] is None and "gone.txt" in found["why_no_corpus"] and "--data" in found["why_no_corpus"]
    other = tmp_path / "other.txt"
    other.write_text("village of La " * 20)
    assert data_of(xray(gone, "La", data=str(other)))["corpus"]["window"] == 48


@pytest.mark.parametrize(
    "prompt, how, words",
    [
        ("", {}, "the prompt is empty"),
        ([0, 9999], {}, "prompt has ids from 0 to 9999"),
        ("La Mancha " * 6, {}, "has 60 tokens: give at most 48"),
        ("La", {"data": "short.txt"}, "has 5 tokens, needed 48"),
    ],
)
def test_what_it_refuses(run, tmp_path, monkeypatch, prompt, how, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("there")
    with pytest.raises(UserError, match=words):
        xray(run, prompt, **how)


@pytest.mark.slow
def test_a_prompt_of_one_token(run, open_page, tmp_path):
    path = tmp_path / "short.html"
    path.write_text(xray(run, "I"), encoding="utf-8")
    page = open_page(path)
    assert page.locator("#surprise .tok").count() == 1 and page.complaints == []
    page.close()
