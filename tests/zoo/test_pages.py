"""Every page of experiments/zoo: what it brings trains, is resumed, and samples."""

import dataclasses
import re

import pytest

from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.training import fit
from tests.conftest import REPOSITORY
from tests.helpers import replace_fields

FILES = sorted((REPOSITORY / "experiments" / "zoo").glob("*.py"))
PAGES = [path for path in FILES if re.search("^variants = ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_what_a_page_brings_trains_is_resumed_and_samples(path, text_file, tmp_path):
    *_, own = load_variants(str(path)).values()
    model = dict(vocab_size=None, block_size=16, n_layer=2, n_head=2, n_embd=16, head_dim=8)
    train = dict(batch_size=4, eval_every=2, checkpoint_every=2, sample_tokens=0)
    small = replace_fields(own, model=model, optim={"warmup_steps": 1}, train=train)
    small = dataclasses.replace(small, data=dataclasses.replace(own.data, path=str(text_file)))
    for steps in (2, 3):
        how = {"progress": False, "extend": True, "trust_code": True}
        run = fit(replace_fields(small, train={"steps": steps}), tmp_path / "run", **how)
    assert run.val_loss > 0 and len(run.sample("lance", max_new_tokens=20)) == 20
