"""Models become files that the gguf package reads, and come back with the same parameters."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util

import jaxgpt
from jaxgpt.cli.main import bind_command
from jaxgpt.data.template import CHATML, Jinja
from jaxgpt.data.tokenizer import ByteTokenizer, train_bpe
from jaxgpt.errors import UserError
from jaxgpt.gguf.file import FAMILIES, open_gguf, to_gguf, write_fields, write_gguf
from jaxgpt.gguf.tokenizers import tokenizer_fields
from jaxgpt.hf.families import FAMILIES as HF_FAMILIES
from jaxgpt.hf.family import canonical_form
from jaxgpt.hf.weights import hold, read_params, shapes_of
from jaxgpt.tools.convert import export_gguf, import_model
from tests.conftest import TEXT
from tests.helpers import quick
from tests.hf.peers import BODY, GPT2, LLAMA3, LONG, NEOX, SHAPES

gguf = pytest.importorskip("gguf", reason="without the gguf package")

SMALL = dict(vocab_size=260, num_hidden_layers=2, hidden_size=32, intermediate_size=40)
BODY = BODY | SMALL
WINDOWS = dict(head_dim=12, sliding_window=6, query_pre_attn_scalar=12)
# (model_type, its config.json): each family, and what its architecture can vary.
ONE_EACH = ("gpt2", "llama", "mistral-nemo", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "neox", "olmo2")
MORE = ("gpt2-untied-erf", "llama-3", "llama-biases", "llama-linear", "olmo2-tied")
MODELS = {name: SHAPES[name] for name in (*ONE_EACH, *MORE)} | {
    "gemma2": ("gemma2", BODY | WINDOWS),
    "gemma3": ("gemma3_text", BODY | WINDOWS | dict(sliding_window_pattern=2, final_logit_softcapping=9.0)),
    "gemma3-every-6": ("gemma3_text", BODY | WINDOWS | dict(num_hidden_layers=7)),
    "llama-3.2": ("llama", BODY | dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=8192))),
    "phi3": ("phi3", BODY),
    "phi3-longrope": ("phi3", BODY | LONG | dict(partial_rotary_factor=0.75, max_position_embeddings=2**17)),
    "neox-in-series": ("gpt_neox", NEOX | SMALL | dict(use_parallel_residual=False, tie_word_embeddings=True)),
}


def make(name):
    """(model_type, configuration, random parameters by path)."""
    kind, hf = MODELS[name]
    config = HF_FAMILIES[kind].read(hf | {"vocab_size": 260})
    rng = np.random.default_rng(0)
    return kind, config, {p: rng.standard_normal(s).astype(np.float32) for p, s in shapes_of(config).items()}


def model_parts(name):
    """(fields, tensors)."""
    kind, config, params = make(name)
    return to_gguf(traverse_util.unflatten_dict(params, sep="/"), config, kind)


def export(name, path, dtype=None):
    """(configuration, parameters, float32 tensors of the file as the gguf package reads them)."""
    _, config, params = make(name)
    fields, tensors = model_parts(name)
    fields |= tokenizer_fields(ByteTokenizer(), config.vocab_size, chat_template=None, ends=())
    write_gguf(path, fields, tensors, dtype)
    found = (t for t in gguf.GGUFReader(path).tensors if t.tensor_type.name == "F32")
    return config, params, {t.name: np.array(t.data).reshape(t.shape[::-1]) for t in found}


def close(writer):
    """Write the file of a `gguf.GGUFWriter`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path):
    """(configuration, parameters by path)."""
    source, _ = open_gguf(path, "ids")
    params = read_params(source.tensors, source.family, source.config)
    return source.config, {p: np.asarray(x) for p, x in traverse_util.flatten_dict(params, sep="/").items()}


@quick(MODELS, *ONE_EACH)
def test_a_model_comes_back_bit_for_bit_but_for_gemmas_norms(name, tmp_path):
    config, params, _ = export(name, tmp_path / "m.gguf")
    back, loaded = load(tmp_path / "m.gguf")
    assert canonical_form(back) == canonical_form(config)
    assert loaded.keys() == params.keys()
    for path, x in params.items():
        np.testing.assert_allclose(loaded[path], x, rtol=0, atol=2e-7 * config.norm_offset, strict=True, err_msg=path)


def test_llama_rotates_neighbours(tmp_path):
    """llama.cpp turns elements 2i and 2i + 1 of a head together; here they are i and i + half a head."""
    config, params, tensors = export("llama-biases", tmp_path / "m.gguf")
    half = config.head_dim // 2
    for ours, theirs, heads in (("q", "attn_q", config.n_head), ("k", "attn_k", config.n_kv_head)):
        for part, name in (("kernel", "weight"), ("bias", "bias")):
            x, y = params[f"h_1/attn/{ours}/{part}"].T, tensors[f"blk.1.{theirs}.{name}"]
            for head in range(heads):
                x_H, y_H = (z[head * 2 * half : (head + 1) * 2 * half] for z in (x, y))
                np.testing.assert_array_equal(y_H[0::2], x_H[:half])
                np.testing.assert_array_equal(y_H[1::2], x_H[half:])
    np.testing.assert_array_equal(tensors["blk.1.attn_v.weight"], params["h_1/attn/v/kernel"].T)


def test_what_llama_cpp_wants_otherwise(tmp_path):
    """Fused queries, keys and values, whole scales of Gemma, a second copy of tied matrices, factors of rotations."""
    _, params, tensors = export("neox-in-series", tmp_path / "neox.gguf")
    joined = np.concatenate([params[f"h_0/attn/{x}/kernel"].T for x in "qkv"])
    np.testing.assert_array_equal(tensors["blk.0.attn_qkv.weight"], joined)
    np.testing.assert_array_equal(tensors["output.weight"], tensors["token_embd.weight"])
    _, params, tensors = export("gemma", tmp_path / "gemma.gguf")
    np.testing.assert_array_equal(tensors["blk.1.ffn_norm.weight"], params["h_1/ln_2/scale"] + 1)
    _, _, tensors = export("llama-3", tmp_path / "llama3.gguf")
    frequency = 5e5 ** (-np.arange(0, 6, 2) / 6)  # 4 heads of 6 elements
    turns = 32 * frequency / (2 * np.pi)
    kept = np.clip((turns - 1.0) / 3.0, 0, 1)
    np.testing.assert_allclose(tensors["rope_freqs.weight"], 1 / (kept + (1 - kept) / 8.0), rtol=1e-5)


# transformers takes other sizes than the file's for what it does not read there: heads of Qwen3 and Gemma, for one.
GEMMA = BODY | dict(head_dim=256, query_pre_attn_scalar=256, sliding_window=6)
PEERS = {
    "F16": ("gpt2", GPT2 | dict(n_positions=1024)),
    "Q8_0": MODELS["llama"],
    "Q4_0": MODELS["qwen2"],
    "Q5_0": ("phi3", BODY),
    "Q5_1": ("qwen3", BODY | dict(head_dim=128)),
    "BF16": ("gemma2", GEMMA),
    "Q4_1": ("gemma3_text", GEMMA | dict(num_hidden_layers=7)),
}


@pytest.mark.peers
@pytest.mark.parametrize("quantisation", PEERS)
def test_transformers_computes_the_same_from_the_file(quantisation, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, "peer", PEERS[quantisation])
    fields, tensors = model_parts("peer")
    fields = {key: x for key, x in fields.items() if not key.startswith("jaxgpt.")}
    kind = gguf.GGMLQuantizationType[quantisation]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", fields.pop("general.architecture"))
    tokens = {"tokenizer.ggml.model": "none", "tokenizer.ggml.padding_token_id": 0}  # theirs is for larger vocabularies
    for key, value in (fields | tokens).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    writer.add_token_list([f"t{i}" for i in range(260)])
    for key, tensor in tensors.items():
        x = np.ascontiguousarray(tensor.read(), np.float32) * np.float32(0.3)
        whole = x.ndim == 2 and x.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 and key != "position_embd.weight"
        of = kind if whole else gguf.GGMLQuantizationType.F32
        writer.add_tensor(key, gguf.quants.quantize(x, of), raw_dtype=of)
    close(writer)
    source, _ = open_gguf(tmp_path / "m.gguf", "ids")
    params = read_params(source.tensors, source.family, source.config)
    ids = np.random.default_rng(1).integers(0, 260, (2, 20))
    ours = jaxgpt.GPT(source.config).apply({"params": params}, ids)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = peer(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0"])
def test_matrices_are_rounded_and_vectors_are_not(dtype, tmp_path):
    _, params, _ = export("gpt2", tmp_path / "m.gguf", dtype)  # rows of 24 and 96 elements
    _, loaded = load(tmp_path / "m.gguf")
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for path, x in params.items():
        if x.ndim == 2 and path != "wpe/embedding":
            if dtype == "q8_0" and path.endswith("mlp/c_proj/kernel"):
                x = gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(x.T), q8_0), q8_0).T
            else:  # rows of 24 are not whole blocks
                x = x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
        np.testing.assert_array_equal(loaded[path], x, strict=True, err_msg=path)


REFUSED = [
    ("gpt2", GPT2 | dict(activation_function="relu"), "gpt2 of llama.cpp does not support activation=relu"),
    ("mistral", BODY | dict(sliding_window=7), "llama of llama.cpp does not support sliding_window=7"),
    ("gemma2", BODY | WINDOWS | dict(query_pre_attn_scalar=9), "gemma2 of llama.cpp .* support query_scale=9"),
    ("gemma2", BODY | WINDOWS | dict(num_hidden_layers=46, head_dim=16), "query_scale=12"),  # taken for the 27B
    ("gpt_neox", NEOX | dict(attention_bias=False, num_attention_heads=3), "out_bias=False, qkv_bias=False"),
]


def test_what_llama_cpp_would_not_compute_is_refused():
    for kind, hf, said in REFUSED:
        with pytest.raises(UserError, match=said):
            write_fields(FAMILIES[kind], HF_FAMILIES[kind].read(hf))
    # A window as long as the context is none.
    fields = write_fields(FAMILIES["mistral"], HF_FAMILIES["mistral"].read(BODY | dict(sliding_window=96)))
    assert "attention.sliding_window" not in fields
    fields = write_fields(FAMILIES["gemma2"], HF_FAMILIES["gemma2"].read(BODY | WINDOWS | dict(sliding_window=96)))
    assert fields["attention.sliding_window"] == 96


def test_a_file_becomes_a_run_with_its_template_and_ends_and_the_run_the_same_file(tmp_path):
    fields, tensors = model_parts("qwen3")
    tokenizer, file, again = train_bpe([TEXT], 258), tmp_path / "m.gguf", tmp_path / "again.gguf"
    fields |= {"general.name": "m-gguf"}
    fields |= tokenizer_fields(tokenizer, 260, chat_template=CHATML.jinja(), ends=[tokenizer.end_of_text, 7])
    write_gguf(file, fields, tensors, "float16")
    import_model(str(file), tmp_path / "run")
    export_gguf(tmp_path / "run", again)
    assert again.read_bytes() == file.read_bytes()
    with pytest.raises(UserError, match="exists and is not empty: name another"):
        export_gguf(tmp_path / "run", again)
    run = jaxgpt.load(tmp_path / "run")
    template = run.prompt_format.template
    assert isinstance(template, Jinja) and template.source == CHATML.jinja()
    assert run.prompt_format.stop_tokens(False) == [run.tokenizer.end_of_text, 7]
    assert (run.params["wte"]["embedding"].dtype, run.params["ln_f"]["scale"].dtype) == (np.float16, np.float32)


def test_a_file_is_used_as_a_run_is(tmp_path, text_file, monkeypatch, capsys):
    """It is imported by the first command, into the cache."""
    fields, tensors = model_parts("qwen3")
    fields |= tokenizer_fields(train_bpe([TEXT], 258), 260, chat_template=None, ends=())
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_gguf(Path("m.gguf"), fields, {name: hold(x.read() / 8) for name, x in tensors.items()}, "q8_0")
    for _ in range(2):
        bind_command("evaluate", "m.gguf", "--data", str(text_file))()
    assert capsys.readouterr().err.count("importing m.gguf into ") == 1
