"""The playground in a real browser: every click and key, and text that stays text."""

import dataclasses
import json
import re

import pytest

pytest.importorskip("playwright", reason="playwright drives the browser: pip install '.[test]'")

from playwright.sync_api import expect

from jaxgpt.serve.server import playground_page
from jaxgpt.tools.html_page import hash_source
from tests.browser import unnamed, watch
from tests.helpers import replace_fields
from tests.serve.conftest import TEXTS, FakeEngine, listening, wait_for

PROMPT = "Once <b>upon</b> <script>pwned=1</script><img src=x onerror=pwned=1>"


@pytest.fixture
def visit(chromium):
    """(client) -> the page of its server, ready. What it has asked is in `.asked`; it complains of nothing."""
    context, pages, servers = chromium.new_context(reduced_motion="reduce"), [], []

    def visit(client, width=1200, scheme="light", key=None):
        servers.append(listening(client.guard))
        address = servers[-1].__enter__()
        page = context.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        watch(page, address)
        page.asked = []
        page.on("request", lambda request: page.asked.append((request.url.removeprefix(address), request.post_data)))
        page.goto(address)
        if key is not None:
            page.fill("#key", key)
            page.keyboard.press("Enter")
        page.locator("html[data-ready]").wait_for()
        pages.append(page)
        return page

    yield visit
    for page in pages:
        assert [c for c in page.complaints if "the server responded with a status of 4" not in c] == []
        assert page.evaluate("typeof pwned") == "undefined" and page.locator("script").count() == 1
    context.close()
    for server in servers:
        server.__exit__(None, None, None)


def begin(page, text=PROMPT, tokens=20):
    """Type, start, and wait for the end."""
    page.fill("[name=max_tokens]", str(tokens))
    page.fill("#prompt", text)
    page.click("#start")
    wait(page)


def wait(page, said="tokens, on average"):
    for status in page.locator(".status").all():
        status.get_by_text(re.compile(said)).wait_for()


def bodies(page, path=TEXTS):
    """What the page has asked of a path, but for the texts of ids."""
    found = [json.loads(body) for at, body in page.asked if at == path and body]
    return [body for body in found if not body.get("echo")]


def shown(page, pane=0):
    """The tokens as the browser has them, without the signs for what is invisible."""
    return page.evaluate(
        """n => [...document.querySelectorAll(".pane")[n].querySelectorAll(".tok")].map(e =>
             [...e.childNodes].filter(c => c.nodeType === 3).map(c => c.data).join(""))""",
        pane,
    )


def expected(client, body):
    """What `shown` has for a request: a tab is only a sign."""
    logprobs = client.ask(**body | {"stream": False}).json()["choices"][0]["logprobs"]
    return [re.sub("[\t\r]", "", text) for text in logprobs["tokens"]]


def test_the_policy_names_what_is_in_the_page():
    html, policy = playground_page()
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'" and directives["connect-src"] == "'self'" and "unsafe" not in policy
    (program,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert directives["script-src"] == f"'{hash_source(program)}'"
    styles = [hash_source(style) for style in re.findall(r"<style>(.*?)</style>", html, re.DOTALL)]
    assert directives["style-src"] == " ".join(f"'{style}'" for style in styles)
    assert "http:" not in html.replace("http://www.w3.org/2000/svg", "") and "https:" not in html


def test_a_text_is_continued_and_branches_at_another_token(real, visit):
    page = visit(real)
    page.fill("[name=top_k]", "7")
    page.fill("[name=stop]", "END\n\\n\\n")
    begin(page)
    (body,) = bodies(page)
    assert bytes(body["prompt"]).decode() == PROMPT == page.text_content(".given")
    assert (body["top_k"], body["stop"], body["logprobs"], "min_p" in body) == (7, ["END", "\n\n"], 20, False)
    first = shown(page)
    assert first == expected(real, body) and len(first) == 20
    page.click("text=Continue")
    expect(page.locator(".tok")).to_have_count(40)
    assert bodies(page)[1]["prompt"][: len(body["prompt"])] == body["prompt"]
    page.locator(".tok").nth(5).click()
    page.locator(".choices button:not([aria-current])").nth(0).click()
    expect(page.locator(".tok")).to_have_count(26)
    wait(page)
    again = bodies(page)[2]
    assert len(again["prompt"]) == len(body["prompt"]) + 6 and shown(page)[6:] == expected(real, again)
    page.click(".branches button >> nth=0")
    assert shown(page)[:20] == first and len(bodies(page)) == 3


def test_two_settings_with_one_seed(real, visit):
    page = visit(real)
    page.check("#compare")
    begin(page)
    page.locator("#agreement").get_by_text(re.compile("Tokens until A and B differ")).wait_for()
    a, b = sorted(bodies(page), key=lambda body: -body["temperature"])
    assert (b["temperature"], a["seed"], a["prompt"]) == (0, b["seed"], b["prompt"])
    assert shown(page, 0) == expected(real, a) and shown(page, 1) == expected(real, b)


def test_a_conversation(byte_run, faked, visit):
    experiment = replace_fields(byte_run.experiment, data={"path": "chats.jsonl"})
    client = faked(FakeEngine(answer=b"Well met.\x03"), run=dataclasses.replace(byte_run, experiment=experiment))
    page = visit(client)
    for turn in ("Hello", "More"):
        page.fill("#prompt", turn)
        page.keyboard.press("Enter")
        wait(page)
    assert [m["content"] for m in bodies(page, "/tokenize")[-1]["messages"]] == ["Hello", "Well met.", "More"]
    assert bodies(page)[-1]["stop_token_ids"] == [3] and page.locator(".turn p").count() == 3


def test_stop_frees_the_server(faked, visit):
    client = faked(FakeEngine(delay=0.02, endless=True))
    page = visit(client)
    page.fill("#prompt", PROMPT)
    page.keyboard.press("Control+Enter")
    page.locator(".tok >> nth=4").wait_for()
    page.click("#stop")
    wait(page, "Stopped")
    wait_for(lambda: client.engine.cancelled == [0])
    assert page.get_attribute("#stop", "aria-disabled") == "true"


def test_a_key_is_asked_for_and_errors_are_shown(faked, visit):
    client = faked(key="secret" * 3)
    page = visit(client, key="secret" * 3)
    assert "secret" not in page.url and page.evaluate("localStorage.length + sessionStorage.length") == 0
    client.engine.is_broken = True
    page.fill("#prompt", PROMPT)
    page.click("#start")
    page.get_by_text("decoding has failed").first.wait_for()


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_by_keyboard_alone_everything_fits_and_has_a_name(faked, visit, scheme, width):
    page = visit(faked(), width, scheme)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#prompt")
    page.keyboard.type(PROMPT + "x" * 100)
    page.keyboard.press("Control+Enter")
    wait(page)
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className").startswith("tok"):
            break
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.t") == "1"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    assert page.evaluate("document.documentElement.scrollWidth") <= width and unnamed(page) == []
