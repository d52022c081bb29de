"""Runs become directories that others open, their directories become runs, and nothing is lost on the way."""

import contextlib
import dataclasses
import functools
import hashlib
import http.server
import importlib.util
import json
import shutil
import signal
import threading

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
from tests.helpers import edit_record, run_command, tiny_experiment
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
@pytest.mark.parametrize("tokenizer", [pytest.param("byte", marks=pytest.mark.slow), "bpe"])
def test_export_then_import_is_the_same_run(trained, tokenizer, tmp_path):
    run, out = trained(tokenizer)
    import_model(str(out), tmp_path / "back")
    back = jaxgpt.load(tmp_path / "back")
    model, params = jaxgpt.sample.quantize.unstack_layers(run.model, run.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), back.params, params)
    assert canonical_form(back.model.config) == canonical_form(model.config)
    prompt, how = "In a village", dict(max_new_tokens=20, seed=3, temperature=1.0)
    assert back.sample(prompt, **how) == run.sample(prompt, **how)


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


def test_what_is_imported_goes_out_as_it_came(exported, tmp_path):
    """The tensors bit for bit, and what came beside them: settings of generation, the chat's template."""
    _, out = exported
    (out / "chat_template.jinja").write_text("{{ messages }}")
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


def test_an_imported_model_is_used_and_not_trained_in_place(exported, tmp_path, text_file):
    _, out = exported
    import_model(str(out), tmp_path / "run")
    run = jaxgpt.load(tmp_path / "run")
    assert evaluate_run(run, str(text_file))["loss"] > 0
    with pytest.raises(UserError, match="imported model, with no text of its own: name one with --data FILE"):
        evaluate_run(run)
    with pytest.raises(UserError, match="holds an imported model, which cannot be resumed"):
        jaxgpt.fit(run.experiment, tmp_path / "run")


def test_an_import_that_fails_leaves_nothing_and_can_be_tried_again(exported, tmp_path, monkeypatch):
    _, out = exported
    with monkeypatch.context() as m:
        m.setattr("jaxgpt.tools.convert.keep_companions", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            import_model(str(out), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    import_model(str(out), tmp_path / "run")


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


def test_an_architecture_that_nobody_else_has_is_told_with_the_nearest(exported, tmp_path):
    config = dataclasses.replace(quickstart().model, vocab_size=60)
    assert find_family(config).model_type == "qwen3"
    with pytest.raises(UserError, match=r"nearest, qwen3, does not support activation=relu2$"):
        find_family(dataclasses.replace(config, activation="relu2"))
    with pytest.raises(UserError, match=r"The nearest, .* does not support .*position=sinusoidal"):
        find_family(dataclasses.replace(config, position="sinusoidal"))
    shutil.copytree(exported[0].directory, tmp_path / "run")
    edit_record(tmp_path / "run", lambda record: record["experiment"]["model"].update(activation="relu2"))
    with pytest.raises(UserError, match="no family on the Hub"):
        export_hf(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@contextlib.contextmanager
def hub(files):
    """A server that answers as the Hub does to one who downloads the model org/name: files, by name."""
    commit = "0" * 40

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path, name = self.path.partition("?")[0], self.path.rpartition("/")[2]
            if path.startswith("/api/models/org/name/tree/"):
                tree = [{"type": "file", "path": n, "size": len(x), "oid": commit} for n, x in files.items()]
                body = json.dumps(tree).encode()
            elif path.startswith("/api/models/org/name"):
                siblings = [{"rfilename": n} for n in files]
                body = json.dumps({"id": "org/name", "sha": commit, "siblings": siblings}).encode()
            elif path.startswith("/org/name/resolve/") and name in files:
                asked.append(name)
                body = files[name]
            else:
                return self.send_error(404)
            kind = "application/json" if path.startswith("/api/") else "application/octet-stream"
            headers = {"Content-Type": kind, "Content-Length": str(len(body)), "X-Repo-Commit": commit}
            self.send_response(200)
            for key, value in (headers | {"ETag": f'"{hashlib.sha256(body).hexdigest()}"'}).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body if self.command == "GET" else b"")

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    asked = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_an_id_is_downloaded_without_pickles(exported, tmp_path):
    _, out = exported
    files = {path.name: path.read_bytes() for path in out.iterdir()} | {"pytorch_model.bin": b"\x80\x02}q\x00."}
    command = ("-m", "jaxgpt", "import-hf", "org/name", "--run-dir")
    environment = {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
    with hub(files) as (address, asked):
        done = run_command(*command, "run", cwd=tmp_path, HF_ENDPOINT=address, **environment)
        assert done.returncode == 0, done.stderr
        assert "model.safetensors" in asked and "pytorch_model.bin" not in asked
    assert jaxgpt.load(tmp_path / "run").tokenizer.to_json() == open_source(str(out)).tokenizer.to_json()
    # And again without a network: from what was kept.
    done = run_command(*command, "again", cwd=tmp_path, HF_ENDPOINT=address, **environment)
    assert done.returncode == 0, done.stderr
    done = run_command("-m", "jaxgpt", "import-hf", "org/other", "--run-dir", "x", cwd=tmp_path, HF_ENDPOINT=address)
    assert done.returncode == 2 and "give that directory instead" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 3, done.stderr
