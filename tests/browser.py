"""A real browser, where there is one."""

import os
import shutil

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT = 60_000  # ms that any step of the browser may take: on a busy machine a page was seen to need over ten seconds


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives it: pip install '.[test]'")
    playwright.expect.set_options(timeout=TIMEOUT)
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is on the PATH (Debian's package: chromium)")
    with playwright.sync_playwright() as p:
        # Its sandbox does not run as root, and what it opens here is our own.
        browser = p.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def open_page(chromium):
    """(path, color_scheme) -> the page, drawn; whatever it complains of, or asks a network for, is in `.complaints`."""
    from playwright.sync_api import TimeoutError

    def open_page(path, color_scheme="light", width=1200):
        for is_last in (False, True):  # a tab has been seen to stay blank for a minute, once in some thousand
            page = chromium.new_page(
                color_scheme=color_scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce"
            )
            watch(page, "file:")
            try:
                page.goto(path.as_uri())
                # Not wait_for_function, which evaluates a string whenever it looks again: the pages do not allow that.
                page.wait_for_selector("html[data-ready], html[data-failed]", state="attached")
                break
            except TimeoutError:
                page.close()
                if is_last:
                    raise
        assert page.evaluate("document.documentElement.dataset.ready") == "true", page.complaints
        return page

    return open_page


LEAST = 10  # px, the smallest text of a chart that is read without enlarging it


def unreadable(page):
    """The texts of the page's charts that are small, cut, or out of reach by scrolling."""
    return page.evaluate(
        """least => [...document.querySelectorAll("svg text")].filter(text => {
            const svg = text.closest("svg"), [box, all] = [text, svg].map(x => x.getBoundingClientRect());
            const size = parseFloat(getComputedStyle(text).fontSize) * all.width / svg.viewBox.baseVal.width;
            let reach = svg.parentElement;
            while (reach && getComputedStyle(reach).overflowX !== "auto") reach = reach.parentElement;
            const ends = reach ? reach.getBoundingClientRect().left + reach.scrollWidth : innerWidth;
            return size < least || box.left < all.left - 1 || box.right > Math.min(all.right, ends) + 1;
        }).map(text => text.textContent)""",
        LEAST,
    )


def watch(page, own):
    """Keep what the page complains of, and what it asks of any other address than `own`, in `page.complaints`."""
    page.set_default_timeout(TIMEOUT)
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on(
        "request",
        lambda request: request.url.startswith((own, "data:", "blob:")) or page.complaints.append(request.url),
    )


def unnamed(page) -> list[str]:
    """Controls and regions for which a screen reader has no word."""
    return page.evaluate("""() => [...document.querySelectorAll("button, [role=button], [role=group], [role=region], nav, select, input, textarea")].filter((e) =>
      !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length)).map((e) => e.outerHTML)""")
