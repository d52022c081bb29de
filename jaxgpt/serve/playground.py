"""The page at `/`."""

from __future__ import annotations


def playground_page() -> tuple[str, str]:
    """Return the page, and its Content-Security-Policy."""
    return "<!doctype html><title>jaxgpt</title><p>The server is running.</p>\n", "default-src 'none'"
