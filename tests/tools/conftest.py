"""A run whose text a browser could take for a program, which the pages of several tests show. Tests only read it."""

import dataclasses

import pytest

from jaxgpt.training import fit
from tests.helpers import tiny_experiment

TEXT = "In a village <script>pwned=1</script><img src=x onerror=pwned=1> of La Mancha there lived one.\n" * 30


@pytest.fixture(scope="session")
def shown_run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shown")
    (directory / "text.txt").write_text(TEXT)
    e = tiny_experiment(directory / "text.txt", steps=12, eval_every=4, keep_last=2, sample_prompt="In a ")
    model = dataclasses.replace(e.model, block_size=48, n_layer=2, activation="relu")
    return fit(dataclasses.replace(e, name="shown", model=model), directory / "run", progress=False)
