"""A run that is trained enough for context to help it."""

import pytest

from jaxgpt.training import fit
from tests.helpers import replace_fields, tiny_experiment


@pytest.fixture(scope="package")
def run(tmp_path_factory, text_file):
    """A model of bytes, on text that has more bytes than characters."""
    text = tmp_path_factory.mktemp("evaluate") / "mancha.txt"
    text.write_text(text_file.read_text().replace("n", "ñ"), encoding="utf-8")
    e = tiny_experiment(text, steps=150, eval_every=150, checkpoint_every=150, log_every=150, sample_tokens=0)
    model = {"position": "rope", "n_embd": 16}
    e = replace_fields(e, model=model, data={"tokenizer": "byte"}, optim={"learning_rate": 2e-2})
    return fit(e, tmp_path_factory.mktemp("run") / "run", progress=False)
