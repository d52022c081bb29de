"""Runs become directories that others open, their directories become runs, and nothing is lost on the way."""

import dataclasses
import functools
import importlib.util
import json
import signal

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt.config import GPTConfig
from jaxgpt.config.presets import quickstart
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.hf.families import find_family
from jaxgpt.hf.family import canonical_form
from jaxgpt.hf.source import open_source, tokenizer_json
from jaxgpt.hf.weights import INDEX, list_tensors
from jaxgpt.tools.convert import export_hf, import_model
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from tests.conftest import TEXT
from tests.helpers import run_command, tiny_experiment
from tests.hf.test_parity import PARITY, live

# Trained here, and a Qwen3 to everybody else.
SIZES = dict(block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=16, head_dim=6)
MODEL = GPTConfig(**SIZES, bias=False, norm="rmsnorm", activation="swiglu", position="rope", qk_norm=True)


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """tokenizer -> (the run, where it was exported to)."""

    @functools.cache
    def of(tokenizer):
        place = tmp_path_factory.mktemp(tokenizer)
        fields = {"scan_layers": True, "mup_base_width": 8} if tokenizer == "byte" else {}
        experiment = tiny_experiment(text_file)
        data = dataclasses.replace(experiment.data, tokenizer=tokenizer, bpe_vocab_size=280)
        experiment = dataclasses.replace(experiment, model=dataclasses.replace(MODEL, **fields), data=data)
        run = jaxgpt.fit(experiment, place / "run", progress=False)
        return run, export_hf(place / "run", place / "out")

    return of


@pytest.fixture
def exported(trained):
    return trained("bpe")


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_export_then_import_is_the_same_run(trained, tokenizer, tmp_path):
    run, out = trained(tokenizer)
    import_model(str(out), tmp_path / "back")
    back = jaxgpt.load(tmp_path / "back")
    model, params = jaxgpt.sample.quantize.unstack_layers(run.model, run.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), back.params, params)
    assert canonical_form(back.model.config) == canonical_form(model.config)
    how = dict(max_new_tokens=20, seed=3, temperature=1.0)
    assert back.sample("In a village", **how) == run.sample("In a village", **how)


@pytest.mark.slow
@live
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_transformers_opens_what_is_exported(trained, kind):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, out = trained(kind)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    text = "In a village of La Mancha,\n one of"
    ids = tokenizer(text)["input_ids"]
    assert ids == run.tokenizer.encode(text).tolist() and tokenizer.decode(ids) == text
    ids = ids[: MODEL.block_size]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits.numpy()
    found = run.model.apply({"params": run.params}, np.array([ids]))
    np.testing.assert_allclose(found, expected, **PARITY)


def test_an_export_has_a_card_and_if_large_several_files_and_an_index(exported, tmp_path):
    run, out = exported
    card = (out / "README.md").read_text()
    for said in ("library_name: transformers", "mancha.txt", f"{run.val_loss:.4f}", "384 tokens seen", "adamw"):
        assert said in card, (said, card)
    several = export_hf(run.directory, tmp_path / "several", shard=4000)
    index = json.loads((several / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0].startswith("model-00001-of-000")
    one, many = list_tensors(out), list_tensors(several)
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(t.read().nbytes for name, t in many.items())
    for name in one:
        np.testing.assert_array_equal(one[name].read(), many[name].read(), strict=True)


def test_what_is_imported_goes_out_as_it_came_and_is_not_trained_in_place(exported, tmp_path, text_file, monkeypatch):
    """The tensors bit for bit, and what came beside them: settings of generation, the chat's template."""
    _, out = exported
    (out / "chat_template.jinja").write_text("{{ messages }}")
    with monkeypatch.context() as m:
        m.setattr("jaxgpt.tools.convert.keep_companions", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            import_model(str(out), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_model(str(out), tmp_path / "run", dtype="bfloat16")
    again = export_hf(tmp_path / "run", tmp_path / "out")
    assert (again / "chat_template.jinja").read_text() == "{{ messages }}"
    first, second = list_tensors(out), list_tensors(again)
    for name in first:
        half = first[name].read().astype("bfloat16")
        np.testing.assert_array_equal(half, second[name].read(), strict=True)
    config = json.loads((again / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert "unchanged" in (again / "README.md").read_text()
    run = jaxgpt.load(tmp_path / "run")
    with pytest.raises(UserError, match="imported model, with no text of its own: name one with --data FILE"):
        evaluate_run(run)
    with pytest.raises(UserError, match="holds an imported model, which cannot be resumed"):
        jaxgpt.fit(run.experiment, tmp_path / "run")


@pytest.mark.slow
def test_the_command_line_goes_the_whole_way(exported, tmp_path):
    """Through the host's memory alone: here there is no such device."""
    _, out = exported
    command = functools.partial(run_command, "-m", "jaxgpt", cwd=tmp_path, JAX_PLATFORMS="cuda")
    done = command("import-hf", str(out), "--run-dir", "run")
    assert done.returncode == 0 and "qwen3: " in done.stdout, done.stderr
    done = command("export-hf", "run", "--out", "out", "--dtype", "float16", "--json")
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in json.loads(done.stdout)["files"]
    assert {t.kind for t in list_tensors(tmp_path / "out").values()} == {"F16"}
    done = command("export", "run", "--to", "gguf", "--out", "m.gguf", "--dtype", "bf16", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["bytes"] == (tmp_path / "m.gguf").stat().st_size
    done = command("import", "m.gguf", "--run-dir", "again", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["model_type"] == "qwen3", done.stderr


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_our_tokenizers_are_theirs(kind):
    """The same ids for any text, line ends and all, and the text back."""
    texts = [TEXT, "", "\n", "a\r\n\tb  c\u2028d", "ñandú 🐎 漢字\x00\x7f"]
    ours = CharTokenizer("".join(texts)) if kind == "char" else ByteTokenizer()
    theirs = BPETokenizer(tokenizer_json(ours))
    assert theirs.vocab_size == ours.vocab_size
    for text in texts:
        np.testing.assert_array_equal(theirs.encode(text), ours.encode(text))
        assert theirs.decode(ours.encode(text)) == text
    if kind == "char":
        with pytest.raises(UserError, match="UNK"):
            theirs.encode("\x01")


def test_an_architecture_that_nobody_else_has_is_told_with_the_nearest():
    config = dataclasses.replace(quickstart().model, vocab_size=60)
    assert find_family(config).model_type == "qwen3"
    with pytest.raises(UserError, match=r"nearest, qwen3, does not support activation=relu2$"):
        find_family(dataclasses.replace(config, activation="relu2"))
    with pytest.raises(UserError, match=r"The nearest, .* does not support .*position=sinusoidal"):
        find_family(dataclasses.replace(config, position="sinusoidal"))


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_an_id_is_downloaded_without_pickles(exported, tmp_path, monkeypatch):
    """From the Hub, of which a folder is the stand-in here; without a network from what was kept."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    def download(name, *, allow_patterns, ignore_patterns=None, **_):
        if name == "org/other":
            raise LocalEntryNotFoundError("no network")
        files = [*(path.name for path in exported[1].iterdir()), "pytorch_model.bin", "code.py"]
        asked.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(exported[1])

    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_source("org/name").tokenizer.to_json() == open_source(str(exported[1])).tokenizer.to_json()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {*asked} and not {
        "pytorch_model.bin",
        "code.py",
    } & {*asked}
    with pytest.raises(UserError, match="give that directory instead") as e:
        open_source("org/other")
    assert len(str(e.value).splitlines()) <= 3
