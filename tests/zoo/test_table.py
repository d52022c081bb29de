"""docs/zoo.md: a row for every page of the zoo, with the parameters that its variants have."""

import dataclasses
import re

import pytest

from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.parallel.limits import count_parameters
from tests.conftest import REPOSITORY

SHAKESPEARE = 65  # characters


@pytest.mark.slow
def test_every_page_has_a_row_with_its_parameters():
    table = (REPOSITORY / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)\.py` \|[^|]+\| ([\d,; ]+) \|", table, flags=re.MULTILINE)
    said = {name: {int(number.replace(",", "")) for number in numbers.split(";")} for name, numbers in rows}
    files = (REPOSITORY / "experiments" / "zoo").glob("*.py")
    pages = [path for path in files if re.search("^variants = ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)]
    assert said.keys() == {path.stem for path in pages}
    sizes = {}
    for path in pages:
        models = [
            dataclasses.replace(experiment.model, vocab_size=SHAKESPEARE)
            for experiment in load_variants(str(path)).values()
        ]
        for model in {*models} - sizes.keys():
            sizes[model] = count_parameters(model.make_model().shapes())
        assert f"The baseline has {sizes[models[0]]:,}." in table
        own = {sizes[model] for model in models if model.is_foreign}
        assert said[path.stem] == own or (not own and said[path.stem] == {sizes[models[0]]}), (path.name, own)
