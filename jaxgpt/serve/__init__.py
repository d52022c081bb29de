"""Serve a run over HTTP, with OpenAI's interface (`pip install "jaxgpt[serve]"`)."""
