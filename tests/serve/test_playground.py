"""The playground in a real browser, over a server without a model: every click and key, and text that stays text."""

import re

import pytest

pytest.importorskip("starlette", reason="the server: pip install '.[serve]'")
pytest.importorskip("uvicorn", reason="the server: pip install '.[serve]'")
pytest.importorskip("playwright", reason="playwright drives the browser: pip install '.[test]'")

from playwright.sync_api import expect

from jaxgpt.serve.app import playground_page
from jaxgpt.tools.html_page import hash_source
from tests.browser import unnamed, watch
from tests.serve import fake_server
from tests.serve.conftest import start_server
from tests.serve.fake_server import ANSWER, END_OF_TURN, IMAGE, SCRIPT, Fake, distribution, make_app, reply, text_of

PROMPT = "Once <b>upon</b> 7"


@pytest.fixture(scope="module")
def served():
    fake = Fake()
    with fake_server.running(make_app(fake)) as address:
        yield fake, address


@pytest.fixture
def fake(served):
    served[0].__init__()
    return served[0]


@pytest.fixture
def visit(chromium, served, fake):
    """(width, color_scheme) -> the page, begun; what it complains of, or asks another origin for, is in `.complaints`."""
    context, pages = chromium.new_context(reduced_motion="reduce"), []

    def visit(width=1200, color_scheme="light", ready=True, address=served[1]):
        page = context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=color_scheme)
        watch(page, address)
        page.goto(address)
        if ready:
            page.locator("html[data-ready]").wait_for()
        pages.append(page)
        return page

    yield visit
    for page in pages:
        assert [c for c in page.complaints if "the server responded with a status of 4" not in c] == []
    context.close()


def begin(page, text=PROMPT, tokens=20):
    """Type, start, and wait for the end."""
    page.fill("[name=max_tokens]", str(tokens))
    page.fill("#prompt", text)
    page.click("#start")
    wait(page)


def wait(page, said="tokens, on average"):
    for status in page.locator(".status").all():
        status.get_by_text(re.compile(said)).wait_for()


def shown(page, pane=0):
    """The generated text as the browser has it, without the signs for what is invisible."""
    return page.evaluate(
        """n => [...document.querySelectorAll(".pane")[n].querySelectorAll(".tok")].map(e =>
             [...e.childNodes].filter(c => c.nodeType === 3).map(c => c.data).join(""))""",
        pane,
    )


def expected(body):
    """What `shown` has for a request: a tab is only a sign."""
    return [text_of([i]).replace("\t", "") for i, *_ in reply(body)[0]]


def test_the_policy_names_what_is_in_the_page():
    html, policy = playground_page()
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'" and directives["connect-src"] == "'self'" and "unsafe" not in policy
    programs = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(programs) == 1 and html.count("<script") == 1
    assert directives["script-src"] == f"'{hash_source(programs[0])}'"
    styles = [hash_source(style) for style in re.findall(r"<style>(.*?)</style>", html, re.DOTALL)]
    assert directives["style-src"] == " ".join(f"'{style}'" for style in styles)
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "") and "https:" not in html
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| on[a-z]+=\"", html)


def test_type_and_read(visit, fake):
    page = visit()
    assert page.title() == "Playground: tiny" and page.input_value("[name=temperature]") == "0.8"
    page.fill("[name=top_k]", "7")
    page.fill("[name=stop]", "END\n\\n\\n")
    begin(page)
    (body,) = fake.bodies("/v1/completions")
    assert body["prompt"] == [ord(c) for c in PROMPT] and body["stream"] is True and body["logprobs"] == 20
    sampling = {name: body[name] for name in ("seed", "temperature", "top_k", "max_tokens", "stop")}
    assert sampling == {"seed": 1, "temperature": 0.8, "top_k": 7, "max_tokens": 20, "stop": ["END", "\n\n"]}
    assert "min_p" not in body and "top_p" not in body and "stop_token_ids" not in body
    assert shown(page) == expected(body)
    bits = [-p / 0.6931471805599453 for _, p, _ in reply(body)[0]]
    much = page.eval_on_selector_all(".tok", "all => all.map(e => parseFloat(e.style.getPropertyValue('--much')))")
    assert much == pytest.approx([min(100 * b / 8, 100) for b in bits], abs=0.51)
    status = page.text_content(".status")
    assert "Ended at max tokens" in status and f"20 tokens, on average {sum(bits) / 20:.3g} bits" in status
    assert page.text_content(".given") == PROMPT
    page.click("text=Continue")  # at the end, with the same settings
    expect(page.locator(".tok")).to_have_count(40)
    assert fake.bodies("/v1/completions")[1]["prompt"] == body["prompt"] + [i for i, *_ in reply(body)[0]]


def test_stop_frees_the_server(visit, fake):
    fake.delay = 0.05
    page = visit()
    page.fill("[name=max_tokens]", "200")
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Control+Enter")
    page.locator(".tok >> nth=4").wait_for()
    assert (
        page.get_attribute("#stop", "aria-disabled") == "false" and page.get_attribute(".strip", "aria-busy") == "true"
    )
    page.click("#stop")
    wait(page, "Stopped")
    count = len(shown(page))
    page.wait_for_timeout(150)
    assert 4 < len(shown(page)) == count < 100 and fake.left == 1
    assert page.get_attribute("#stop", "aria-disabled") == "true" and page.text_content(".wrong >> nth=1") == ""
    fake.delay = 0
    begin(page)
    assert len(shown(page)) == 20


def test_another_token_and_the_way_back(visit, fake):
    page = visit()
    begin(page)
    first, (body,) = shown(page), fake.bodies("/v1/completions")
    found, t = [i for i, *_ in reply(body)[0]], 5
    page.locator(".tok").nth(t).click()
    rows = page.locator(".choices button")
    best = distribution(body["prompt"] + found[:t])
    count = 20 + (found[t] not in [i for i, _ in best[:20]])
    assert rows.count() == count and page.locator(".choices .bar").count() == count
    shares = [float(s.strip("<%")) / 100 for s in page.locator(".choices .share").all_text_contents()]
    assert shares[:20] == pytest.approx([2.718281828**p for _, p in best[:20]], abs=0.006)
    assert page.locator(".choices [aria-current]").count() == 1
    # Of two tokens with one text, the second.
    same = [k for k, (i, _) in enumerate(best[:20]) if text_of([i]) == "same" and i != found[t]]
    chosen = same[-1] if same else next(k for k, (i, _) in enumerate(best) if i != found[t])
    rows.nth(chosen).click()
    wait(page)
    expect(page.locator(".tok")).to_have_count(26)
    again = fake.bodies("/v1/completions")[1]
    assert again["prompt"] == body["prompt"] + found[:t] + [best[chosen][0]]
    assert shown(page) == [*first[:t], text_of([best[chosen][0]]).replace("\t", ""), *expected(again)]
    assert page.evaluate("document.activeElement.dataset.t") == str(t)
    assert "chosen by you" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.click(".branches button >> nth=0")
    assert shown(page) == first and len(fake.bodies("/v1/completions")) == 2
    assert page.text_content(".branches [aria-current]") == "1: first"
    page.click(".branches button >> nth=1")
    assert len(shown(page)) == 26 and "at token 6 of 1" in page.text_content(".branches [aria-current]")


def test_two_settings_with_one_seed(visit, fake):
    page = visit()
    page.check("#compare")
    temperatures = page.locator("#settings [name=temperature]").all()
    assert [t.input_value() for t in temperatures] == ["0.8", "0"]
    begin(page)
    page.locator("#agreement").get_by_text(re.compile("Tokens until A and B differ")).wait_for()
    a, b = sorted(fake.bodies("/v1/completions"), key=lambda body: -body["temperature"])
    assert (a["temperature"], b["temperature"]) == (0.8, 0) and a["seed"] == b["seed"] and a["prompt"] == b["prompt"]
    assert shown(page, 0) == expected(a) and shown(page, 1) == expected(b)
    ids = [[i for i, *_ in reply(body)[0]] for body in (a, b)]
    same = next(t for t, (x, y) in enumerate(zip(*ids, strict=True)) if x != y)
    assert f"differ: {same}." in page.text_content("#agreement")
    left, right = (pane.bounding_box() for pane in page.locator(".pane").all())
    assert left["y"] == right["y"] and left["x"] + left["width"] <= right["x"]
    page.uncheck("#compare")
    assert page.locator(".pane").count() == page.locator("#settings fieldset").count() == 1
    assert shown(page) == expected(a)


def test_a_conversation(visit, fake):
    fake.chat = True
    page = visit()
    assert page.is_visible("#modes") and page.is_checked("[value=chat]")
    page.fill("#prompt", "Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    page.keyboard.press("Enter")
    wait(page)
    (body,) = fake.bodies("/v1/completions")
    assert body["stop_token_ids"] == [END_OF_TURN] and "Ended by a stop" in page.text_content(".status")
    assert body["prompt"] == [ord(c) for c in "user:Hello\nyou\x03assistant:"]
    assert page.input_value("#prompt") == "" and len(shown(page)) == ANSWER
    # Another token in the answer; that branch is the conversation from now on.
    page.locator(".tok").nth(2).click()
    page.locator(".choices button").nth(3).click()
    expect(page.locator(".tok")).to_have_count(3 + ANSWER)
    wait(page)
    second = fake.bodies("/v1/completions")[1]
    answer = text_of(second["prompt"][len(body["prompt"]) :] + [i for i, *_ in reply(second)[0]])
    begin(page, "More")
    asked = fake.bodies("/tokenize")[-1]["messages"]
    assert [m["role"] for m in asked] == ["user", "assistant", "user"] and asked[1]["content"] == answer
    assert page.locator(".turn p").all_text_contents() == ["Hello\nyou", answer, "More"]
    page.click("#forget")
    assert page.locator(".tok").count() == 0
    page.check("[value=text]")
    begin(page)
    assert "stop_token_ids" not in fake.bodies("/v1/completions")[-1] and page.text_content(".given") == PROMPT


def test_a_failed_answer_is_asked_again(visit, fake):
    fake.chat, fake.fail = True, "400"
    page = visit()
    page.fill("#prompt", "Hello")
    page.keyboard.press("Enter")
    page.get_by_text(fake.message).wait_for()
    fake.fail = None
    begin(page, "Hello again")
    asked = fake.bodies("/tokenize")[-1]["messages"]
    assert asked == [{"role": "user", "content": "Hello again"}] and not page.is_visible(f"text={fake.message}")


def test_by_keyboard_alone(visit, fake):
    page = visit()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#prompt")
    page.keyboard.type(PROMPT)
    page.keyboard.press("Control+Enter")
    wait(page)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("tok"):
            break
    assert page.locator(".strip [tabindex='0']").count() == 1  # one stop for all tokens
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.t") == "2"
    assert "token 3: " in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator(".branches button")).to_have_count(2)
    wait(page)
    assert page.evaluate("document.activeElement.dataset.t") == "2"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_only_the_end_is_announced(visit, fake):
    """A live region with every token would never be silent."""
    fake.delay = 0.02
    page = visit()
    page.evaluate("""() => {
      window.said = [];
      for (const region of document.querySelectorAll("[role=status], [role=alert], [aria-live]"))
        new MutationObserver(() => said.push(region.textContent)).observe(region, { childList: true, characterData: true, subtree: true });
    }""")
    begin(page, tokens=60)
    said = [text for text in page.evaluate("said") if text]
    assert len(said) == 2 and said[0] == "Writing…" and "60 tokens" in said[1]
    assert page.locator(".strip [aria-live], .strip[aria-live], .panel[aria-live]").count() == 0
    assert page.text_content(".plain") == text_of([i for i, *_ in reply(fake.bodies("/v1/completions")[0])[0]])


def test_a_key_is_asked_for_and_kept_by_the_page_alone(visit, fake):
    fake.key = "secret"
    page = visit(ready=False)
    page.locator("#key").wait_for()
    assert page.evaluate("document.activeElement.id") == "key"
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("does not accept this key").wait_for()
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    page.locator("html[data-ready]").wait_for()
    assert not page.is_visible("#key")
    begin(page)
    assert len(shown(page)) == 20
    assert "secret" not in page.url and page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert page.evaluate("document.cookie") == ""


def test_errors_are_shown_in_the_servers_words(visit, fake):
    fake.message = f"prompt={SCRIPT}: needs less"
    page = visit()
    ended = "The connection ended before the text did."
    for fail, said in (("400", fake.message), ("event", fake.message), ("broken", ended)):
        fake.fail = fail
        page.fill("#prompt", PROMPT)
        page.click("#start")
        page.get_by_text(said).wait_for()
        assert page.evaluate("typeof pwned") == "undefined" and page.get_attribute("#stop", "aria-disabled") == "true"
    fake.fail = None
    begin(page)
    assert len(shown(page)) == 20 and page.locator(".pane .wrong").text_content() == ""


def test_no_text_is_parsed(visit, fake):
    fake.name = f"tiny{SCRIPT}{IMAGE}"
    page = visit()
    begin(page, PROMPT + SCRIPT + IMAGE, tokens=100)
    assert {SCRIPT, IMAGE} <= set(shown(page))
    page.locator(".tok").nth(3).click()
    page.locator(".choices button").nth(0).click()
    expect(page.locator(".branches button")).to_have_count(2)
    wait(page)
    assert fake.name in page.text_content("h1") and SCRIPT in page.text_content(".given")
    assert page.evaluate("typeof pwned") == "undefined" and page.locator("img").count() == 0
    assert page.locator("script").count() == 1


@pytest.mark.slow  # an engine is compiled
def test_over_a_model(visit, byte_run):
    with fake_server.running(start_server(byte_run)) as address:

        def complete(prompt, count):
            body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "logprobs": 20}
            found = page.request.post(f"{address}/v1/completions", data=body).json()["choices"][0]["logprobs"]
            return found, [re.sub("[\t\r]", "", text) for text in found["tokens"]]

        page = visit(address=address)
        page.fill("[name=temperature]", "0")
        begin(page, "né", tokens=12)
        found, texts = complete("né", 12)
        assert shown(page) == texts
        page.locator(".tok").nth(3).click()
        page.locator(".choices button").nth(1).click()
        expect(page.locator(".branches button")).to_have_count(2)
        wait(page)
        kept = [*"né".encode(), *found["token_ids"][:3], found["top_token_ids"][3][1]]
        assert shown(page)[4:] == complete(kept, 12)[1]


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_everything_fits_and_has_a_name(visit, fake, scheme, width):
    fake.chat = True
    page = visit(width, scheme)
    page.check("#compare")
    begin(page, PROMPT + "x" * 100)
    page.locator(".tok").nth(2).click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, .tok")].filter(e =>
      e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML)""")
    assert beyond == []
    light = page.evaluate("""() => ["backgroundColor", "color"].map((name) =>
      getComputedStyle(document.body)[name].match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0))""")
    assert (light[0] > light[1]) == (scheme == "light")
    assert unnamed(page) == []
    assert page.locator("h1").count() == page.locator("main").count() == 1
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
