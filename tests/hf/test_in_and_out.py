"""Export and import: other programs open our directories, we open theirs, and nothing is lost."""

import dataclasses
import functools
import importlib.util
import json
import signal

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

import jaxgpt
from jaxgpt.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer
from jaxgpt.errors import UserError
from jaxgpt.hf import families
from jaxgpt.hf.families import find_family
from jaxgpt.hf.family import canonical_form
from jaxgpt.hf.source import open_source, tokenizer_config, tokenizer_json
from jaxgpt.hf.weights import INDEX, list_tensors
from jaxgpt.model import GPTConfig
from jaxgpt.presets import quickstart
from jaxgpt.tools.convert import _hide_folders, export_hf, import_model
from jaxgpt.tools.evaluate.evaluate import evaluate_run
from tests.conftest import TEXT
from tests.helpers import check_command, tiny_experiment
from tests.hf.test_parity import live

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
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_other_programs_pad_and_generate(trained, kind):
    """Batches give the texts of single prompts, which are ours, and no text ends early or loses a newline."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    run, out = trained(kind)
    model, prompts = AutoModelForCausalLM.from_pretrained(out), ["In\na ", "one of"]
    text = "In a village of La Mancha,\n one of"
    ids = AutoTokenizer.from_pretrained(out)(text)["input_ids"]
    assert ids == run.tokenizer.encode(text).tolist()
    greedy = dict(max_new_tokens=6, do_sample=False)
    alone = [text + run.sample(text, max_new_tokens=6, greedy=True) for text in prompts]
    for side in ("left", "right"):
        tokenizer = AutoTokenizer.from_pretrained(out, padding_side=side)
        batch = tokenizer(prompts, padding=True, return_tensors="pt")
        assert batch["input_ids"].max() < model.config.vocab_size == len(tokenizer)
        lengths = [len(run.tokenizer.encode(text)) for text in prompts]
        assert batch["attention_mask"].sum(1).tolist() == lengths
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        for size in (1, 2):
            assert [t["generated_text"] for (t,) in generate(prompts, batch_size=size, **greedy)] == alone
    if kind != "bpe":
        assert model.generation_config.eos_token_id is None is tokenizer.eos_token_id


VLLM = {"GPT2LMHeadModel", *(f"{name}ForCausalLM" for name in "Gemma Gemma2 Gemma3 GPTNeoX Llama Mistral".split())}
VLLM |= {"Olmo2ForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def test_an_export_is_what_vllm_loads(exported):
    """As its source asks: a known class, an output matrix where none is tied, ids inside the vocabulary."""
    known = {family.architecture for family in families.FAMILIES.values()}
    assert known <= VLLM  # vllm/model_executor/models/registry.py
    run, out = exported
    names = ("config", "generation_config", "tokenizer_config")
    config, generation, tokenizer = (json.loads((out / f"{name}.json").read_text()) for name in names)
    assert config["tie_word_embeddings"] is run.model.config.tie_embeddings
    assert ("lm_head.weight" in list_tensors(out)) is not config["tie_word_embeddings"]
    assert {i for i in generation.values() if i is not None} <= set(range(config["vocab_size"]))
    assert tokenizer["model_max_length"] == config["max_position_embeddings"] == run.model.config.block_size
    # It stops at the tokenizer's eos whatever generation_config.json says: vllm/renderers/base.py.
    assert tokenizer["eos_token"] == "<|endoftext|>" and "eos_token" not in tokenizer_config(CharTokenizer("ab"), 16)


def test_an_export_has_a_card_and_if_large_several_files_and_an_index(exported, tmp_path):
    run, out = exported
    card = (out / "README.md").read_text()
    for said in ("library_name: transformers", "mancha.txt", f"{run.val_loss:.4f} nats", "jaxgpt import DIR"):
        assert said in card, (said, card)
    assert str(run.directory.parent) not in card and str(tmp_path.parent) not in card
    assert [_hide_folders(name) for name in ("/home/ada/a", "~/x/y", "org/name")] == ["a", "y", "org/name"]
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
    (out / "README.md").write_text("---\nlicense: mit\n---\n")
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
    assert (again / "README.md").read_text() == "---\nlicense: mit\n---\n"  # that of the model
    run = jaxgpt.load(tmp_path / "run")
    with pytest.raises(UserError, match="imported model, with no text of its own: name one with --data FILE"):
        evaluate_run(run)
    with pytest.raises(UserError, match="holds an imported model, which cannot be resumed"):
        jaxgpt.fit(run.experiment, tmp_path / "run")


@pytest.mark.slow
def test_the_command_line_goes_the_whole_way(exported, tmp_path):
    """Through the host's memory alone: here there is no such device."""
    _, out = exported
    command = functools.partial(check_command, "-m", "jaxgpt", cwd=tmp_path, JAX_PLATFORMS="cuda")
    done = command("import", str(out), "--run-dir", "run")
    assert "qwen3: " in done.stdout, done.stderr
    done = command("export", "run", "--to", "hf", "--out", "out", "--dtype", "float16", "--json")
    assert "model.safetensors" in json.loads(done.stdout)["files"]
    assert {t.kind for t in list_tensors(tmp_path / "out").values()} == {"F16"}
    done = command("export", "run", "--to", "gguf", "--out", "m.gguf", "--dtype", "bf16", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["bytes"] == (tmp_path / "m.gguf").stat().st_size
    done = command("import", "m.gguf", "--run-dir", "again", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["model_type"] == "qwen3", done.stderr


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_our_tokenizers_are_theirs(kind):
    """The same ids for any text, line ends and all, and the text back."""
    texts = [TEXT, "", "\n", "a\r\n\tb  c\u2028d", "ñandú 🐎 漢字\x00\x7f", "ĊăĀÿ\n\x03"]
    ours = CharTokenizer("".join(texts)) if kind == "char" else ByteTokenizer()
    end = ours.encode("\x03")[0].item()
    for ends in (None, end):
        theirs = BPETokenizer(tokenizer_json(ours, ends))
        library = Tokenizer.from_str(tokenizer_json(ours, ends))  # as every other program reads and prints texts
        assert theirs.vocab_size == library.get_vocab_size() == ours.vocab_size
        for text in texts:
            ids = ours.encode(text)
            np.testing.assert_array_equal(theirs.encode(text), ids)
            np.testing.assert_array_equal(library.encode(text).ids, ids)
            np.testing.assert_array_equal(theirs.locate(text, specials=False)[1], ours.locate(text, specials=False)[1])
            assert theirs.decode(ids) == text
            assert library.decode(ids) == (text if ends is None else text.replace("\x03", ""))
    if kind == "char":
        assert theirs.encode("a\x01b").tolist() == ours.encode("a\nb").tolist()


def test_an_architecture_that_nobody_else_has_is_told_with_the_nearest():
    config = dataclasses.replace(quickstart().model, vocab_size=60)
    assert find_family(config).model_type == "qwen3"
    with pytest.raises(UserError, match=r"nearest, qwen3, does not support activation=relu2$"):
        find_family(dataclasses.replace(config, activation="relu2"))
    with pytest.raises(UserError, match=r"The nearest, .* does not support .*position=sinusoidal"):
        find_family(dataclasses.replace(config, position="sinusoidal"))


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="huggingface_hub is not installed")
def test_an_id_is_downloaded_without_pickles(exported, monkeypatch):
    """From the Hub, of which a folder is the stand-in here; without a network from what was kept."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils import filter_repo_objects

    def download(name, **patterns):
        if name == "org/other":
            raise LocalEntryNotFoundError("no network")
        del patterns["local_files_only"]
        files = [*(path.name for path in exported[1].iterdir()), "pytorch_model.bin", "code.py"]
        asked.update(filter_repo_objects(files, **patterns))
        return str(exported[1])

    asked = set()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_source("org/name").tokenizer.to_json() == open_source(str(exported[1])).tokenizer.to_json()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= asked
    assert not {"pytorch_model.bin", "code.py"} & asked
    with pytest.raises(UserError, match="give that directory instead"):
        open_source("org/other")
