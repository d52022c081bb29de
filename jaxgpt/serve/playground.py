"""Render the playground: the page at `/` on which one tries the model, token by token.

The page is `playground.html`, `playground.css` and `playground.js`, with the style and the helpers of `tools`. It holds
nothing of the run and asks the server for everything:

- `GET /v1/models`: the first model, and of its field `jaxgpt` the entries chat, encoder, context, temperature and
  chat_stop_token_ids.
- `POST /tokenize`: the ids of a prompt as completions read it, or of a conversation as the template renders it.
- `POST /v1/completions`: always streamed, with the ids as prompt and 20 alternatives. A conversation adds
  `stop_token_ids`. To continue from another token, the page sends the ids before it, and the other one.
- `POST /detokenize`: the text of an answer, for the next turn.

A model with an encoder gets its prompts as text, and does not continue from another token.
"""

from __future__ import annotations

from importlib import resources

from jaxgpt.tools.html_page import hash_source, read_asset


def playground_page() -> tuple[str, str]:
    """Return the page as HTML, and its Content-Security-Policy, which allows requests to its own server alone."""
    style, program = read_asset("page.css"), read_asset("page.js") + _read("playground.js")
    own = _read("playground.css")
    html = _read("playground.html")
    for mark, text in (("/*page.css*/", style), ("/*playground.css*/", own), ("/*playground.js*/", program)):
        html = html.replace(mark, text)
    styles = " ".join(f"'{hash_source(text)}'" for text in (style, own))
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {styles}; "
        f"script-src '{hash_source(program)}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return html, policy


def _read(name: str) -> str:
    return resources.files("jaxgpt.serve").joinpath(name).read_text(encoding="utf-8")
