"""Every page of experiments/zoo: what it brings trains, is resumed, and samples; its row in docs/zoo.md is right."""

import dataclasses
import re

import pytest

from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.parallel.limits import count_parameters
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


def test_every_page_has_a_row_with_its_parameters():
    """Of models of the 65 characters of Shakespeare."""
    table = (REPOSITORY / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.py` \|[^|]+\| ([\d,; ]+) \|", table, flags=re.MULTILINE)
    said = {name: {int(number.replace(",", "")) for number in numbers.split(";")} for name, numbers in rows}
    assert said.keys() == {path.stem for path in PAGES}
    sizes = {}
    for path in PAGES:
        models = [dataclasses.replace(e.model, vocab_size=65) for e in load_variants(str(path)).values()]
        for model in {*models} - sizes.keys():
            sizes[model] = count_parameters(model.make_model().shapes())
        assert f"The baseline has {sizes[models[0]]:,}." in table
        own = {sizes[model] for model in models if model.is_foreign}
        assert said[path.stem] == own or (not own and said[path.stem] == {sizes[models[0]]}), (path.name, own)
