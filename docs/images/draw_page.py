"""Draw README's picture in motion: a text is typed into a run's page, and a head is switched off and on again.

python docs/images/draw_page.py PAGE.html docs/images/page.gif     (PAGE.html is what `jaxgpt page` writes)

It needs Chromium, and `playwright` and `pillow`, which the extra `test` and matplotlib bring.
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

TEXT = "The function is call"
STYLE = """
    header, nav, .position, #surprise p, #surprise h2 {display: none !important}
    body {padding: 8px !important; margin: 0 !important} section {margin: 0 0 8px !important}
    textarea {height: 44px !important; min-height: 0 !important}
    .clicked {outline: 4px solid #e8710a !important}
"""


def take(page: Page) -> Image.Image:
    """Return a picture of the text with its switches, and of the prediction that follows."""
    page.wait_for_timeout(400)  # the page computes in between
    boxes = [page.locator(name).bounding_box() for name in ("#live", "#surprise")]
    bottom = max(box["y"] + box["height"] for box in boxes if box)
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": bottom + 8}
    return Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")


def draw(page: Page) -> list[tuple[Image.Image, int]]:
    """Return the pictures, and for how many milliseconds each is shown."""
    frames = []
    for end in range(4, len(TEXT) + 1, 4):
        page.fill("textarea", TEXT[:end])
        frames.append((take(page), 350))
    frames.append((frames.pop()[0], 2200))
    switch = page.locator("#live button", has_text="head 0").first
    for shown in (2800, 1800):
        switch.evaluate("button => button.classList.add('clicked')")
        frames.append((take(page), 500))
        switch.click()
        frames.append((take(page), shown))
        switch.evaluate("button => button.classList.remove('clicked')")
    return frames


def main(source: str, target: str) -> None:
    """Draw the page at `source` into the GIF `target`."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 640, "height": 1000}, bypass_csp=True)
        page.goto(Path(source).resolve().as_uri())
        page.wait_for_selector("html[data-ready]", state="attached")
        page.add_style_tag(content=STYLE)
        frames = draw(page)
        browser.close()
    height = max(picture.height for picture, _ in frames)
    pictures = []
    for picture, _ in frames:
        whole = Image.new("RGB", (picture.width, height), "white")
        whole.paste(picture)
        pictures.append(whole.quantize(64, dither=Image.Dither.NONE))
    shown = [milliseconds for _, milliseconds in frames]
    pictures[0].save(target, save_all=True, append_images=pictures[1:], duration=shown, loop=0, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
