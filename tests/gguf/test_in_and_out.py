"""Files become runs, and runs the same files."""

import numpy as np
import pytest

import jaxgpt
from jaxgpt.data.template import CHATML, Jinja
from jaxgpt.data.tokenizer import train_bpe
from jaxgpt.errors import UserError
from jaxgpt.gguf.file import write_gguf
from jaxgpt.gguf.tokenizers import tokenizer_fields
from jaxgpt.tools.convert import export_gguf, import_model
from tests.conftest import TEXT
from tests.gguf.test_families import model_parts

pytest.importorskip("gguf", reason="without the gguf package")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """(file, run) of a Gemma with a chat template."""
    place = tmp_path_factory.mktemp("gguf")
    fields, tensors = model_parts("gemma")
    tokenizer = train_bpe([TEXT], 258)
    fields |= {"general.name": "m-gguf"}
    fields |= tokenizer_fields(tokenizer, 260, chat_template=CHATML.jinja(), ends=[tokenizer.end_of_text, 7])
    write_gguf(place / "m.gguf", fields, tensors, "float16")
    import_model(str(place / "m.gguf"), place / "run")
    return place / "m.gguf", place / "run"


def test_a_run_becomes_the_file_that_it_came_from(imported, tmp_path):
    file, run = imported
    export_gguf(run, tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="exists: name another file with --out"):
        export_gguf(run, tmp_path / "again.gguf")


def test_the_run_has_template_and_ends(imported):
    run = jaxgpt.load(imported[1])
    template = run.prompt_format.template
    assert isinstance(template, Jinja) and template.source == CHATML.jinja()
    assert run.prompt_format.stop_tokens(False) == [run.tokenizer.end_of_text, 7]
    assert {x.dtype for x in (run.params["wte"]["embedding"], run.params["ln_f"]["scale"])} == {
        np.dtype(np.float32),
        np.dtype(np.float16),
    }
