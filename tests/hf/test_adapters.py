"""Adapters in PEFT's format: PEFT adds to a base what a merge here would add."""

import dataclasses
import importlib.util
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxgpt
from jaxgpt.cli.main import main
from jaxgpt.errors import UserError
from jaxgpt.hf.families import FAMILIES
from jaxgpt.hf.weights import to_peft, to_tensors
from jaxgpt.lora import LoraConfig, init_adapters, merge_adapters
from jaxgpt.model import GPTConfig
from jaxgpt.tools.convert import export_hf, export_peft, import_model
from tests.helpers import FLOAT32_REORDERED, make_model, tiny_experiment
from tests.hf.test_families import MODELS
from tests.hf.test_parity import PARITY

LIVE = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("peft", "transformers", "torch"))), reason="peft is not installed"
)
GPT2 = GPTConfig(block_size=16, n_layer=2, n_head=2, n_embd=8)


def draw_adapters(lora, params):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda params: init_adapters(lora, jax.random.key(0), params), params)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


@pytest.mark.parametrize(("kind", "targets"), [*zip(FAMILIES, itertools.cycle(["q v", "k c_proj c_fc"]))])
def test_the_tensors_are_those_of_the_merge(kind, targets):
    """In GPT-2 and GPT-NeoX q, k and v are one tensor, with one adapter of a higher rank."""
    family, lora = FAMILIES[kind], LoraConfig(rank=2, alpha=3.0, targets=tuple(targets.split()))
    config = family.read(MODELS[kind])
    _, params = make_model(config)
    adapters = draw_adapters(lora, params)
    before, after = (to_tensors(x, family, config) for x in (params, merge_adapters(lora, adapters, params)))
    tensors, values = to_peft(adapters, lora, family, config)
    changed = set()
    for name, tensor in before.items():
        expected, found, module = after[name].read(), tensor.read(), name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        if (key := f"base_model.model.{module}.lora_A.weight") in tensors:
            rank = values["rank_pattern"].get(last, values["r"])
            a, b = tensors[key].read(), tensors[key.replace("lora_A", "lora_B")].read()
            assert a.shape[0] == b.shape[1] == rank
            delta = values["alpha_pattern"].get(last, values["lora_alpha"]) / rank * (b @ a)
            found = found + (delta.T if values["fan_in_fan_out"] else delta)
            changed.add(last)
        np.testing.assert_allclose(found, expected, **FLOAT32_REORDERED, err_msg=name)
    assert set(values["target_modules"]) == changed and 2 * len(changed) * config.n_layer <= len(tensors)


@pytest.fixture(scope="module")
def adapted(text_file, tmp_path_factory):
    """(a base in Hugging Face's format, a run with adapters for it)."""
    place = tmp_path_factory.mktemp("adapted")
    first = dataclasses.replace(tiny_experiment(text_file), model=GPT2)
    base = export_hf(jaxgpt.fit(first, place / "base", progress=False).directory, place / "model")
    lora = LoraConfig(rank=2, targets=("q", "v", "c_proj"))
    second = tiny_experiment(text_file, init_from=str(base))
    second = dataclasses.replace(second, lora=lora, optim=dataclasses.replace(second.optim, learning_rate=0.1))
    return base, jaxgpt.fit(second, place / "run", progress=False)


@pytest.mark.slow
@LIVE
@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_peft_opens_them(adapted, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base, run = adapted
    out = export_peft(run.directory, tmp_path / "out")
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    model, ids = AutoModelForCausalLM.from_pretrained(base), np.arange(8)[None] % run.model.config.vocab_size
    with torch.no_grad():
        plain = model(torch.tensor(ids)).logits.numpy()
        found = PeftModel.from_pretrained(model, out).eval()(torch.tensor(ids)).logits.numpy()
    expected = run.model.apply({"params": run.params}, ids)
    np.testing.assert_allclose(found, expected, **PARITY)
    assert np.abs(found - plain).max() > 0.1
    text = "lance en el"
    assert AutoTokenizer.from_pretrained(out)(text)["input_ids"] == run.tokenizer.encode(text).tolist()


@pytest.mark.slow
def test_what_has_no_adapters_is_refused_and_a_base_is_named(adapted, text_file, tmp_path, capsys):
    """A base that is an imported run is named as what it was imported from, and one that was trained here is refused."""
    base, run = adapted
    with pytest.raises(UserError, match=r"has no adapters \(--lora.rank\)"):
        export_peft(base.parent / "base", tmp_path / "none")
    main(["export", str(run.directory), "--to", "peft", "--out", str(tmp_path / "half"), "--dtype", "bfloat16"])
    assert "adapter_config.json, adapter_model.safetensors" in capsys.readouterr().out
    tensors = load_file(tmp_path / "half" / "adapter_model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"bfloat16"}
    import_model(str(base), tmp_path / "imported")
    for source in (tmp_path / "imported", base.parent / "base"):
        experiment = tiny_experiment(text_file, init_from=str(source), steps=1)
        experiment = dataclasses.replace(experiment, model=GPTConfig(scan_layers=True), lora=LoraConfig(rank=2))
        directory = tmp_path / f"from {source.name}"
        jaxgpt.fit(experiment, directory, progress=False)
        if source.name == "base":
            with pytest.raises(UserError, match="adapts a run, and PEFT opens none"):
                export_peft(directory, tmp_path / "none")
            continue
        config = export_peft(directory, tmp_path / "out") / "adapter_config.json"
        assert json.loads(config.read_text())["base_model_name_or_path"] == str(base)
