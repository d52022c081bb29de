"""Read and write models as GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).

Fields have no prefix of the architecture here. llama.cpp ignores ours, which begin with "jaxgpt.". Tensors that show a part
of the configuration count as fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config.validate import check_count, short
from jaxgpt.errors import UserError
from jaxgpt.files import open_file, open_whole
from jaxgpt.gguf.tokenizers import read_tokenizer
from jaxgpt.hf.family import SCALINGS, ConfigRule, Family, Json, fields, find_differences, never, weight_rules
from jaxgpt.hf.source import Source, check_vocabulary, load_named_tokenizer
from jaxgpt.hf.weights import DTYPES, Tensor, Tensors, check, hold, to_tensors
from jaxgpt.model import GPTConfig

OUTPUT, FREQUENCIES = "output.weight", "rope_freqs.weight"
LONGROPE = {"rope_factors_short.weight": "rope_short_factors", "rope_factors_long.weight": "rope_long_factors"}
ORIGINAL, MAGNITUDE = "rope.scaling.original_context_length", "rope.scaling.attn_factor"
ROTATIONS = (FREQUENCIES, *LONGROPE)  # tensors that follow from the configuration
QKV_BIAS, OUT_BIAS, UP_BIAS = "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias"
FLOATS = ("epsilon", "freq_base", "freq_base_swa", "factor", "softcapping")  # endings of fields that are never integers
SIZES = {"vocab_size": "vocab_size", "block_size": "context_length", "n_embd": "embedding_length"}
SIZES |= {"n_layer": "block_count", "n_head": "attention.head_count", "mlp_dim": "feed_forward_length"}
EPSILON = {"layernorm": "attention.layer_norm_epsilon", "rmsnorm": "attention.layer_norm_rms_epsilon"}
WINDOW, PERIOD = "attention.sliding_window", "attention.sliding_window_pattern"
RMS = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu"}
NO_BIAS = {"bias": False, "out_bias": False}
GEMMA = RMS | NO_BIAS | {"activation": "geglu_tanh", "norm_offset": True, "scale_embeddings": True}
# What all models of an architecture have in common, by llama.cpp's name of it.
USUAL: dict[str, Json] = {
    "gpt2": {"norm": "layernorm", "activation": "gelu_tanh"},
    "llama": RMS,
    "qwen2": RMS | NO_BIAS,
    "qwen3": RMS | NO_BIAS | {"qk_norm": True},
    "phi3": RMS | NO_BIAS,
    "gemma": GEMMA,
    "gemma2": GEMMA | {"norm_position": "sandwich"},
    "gemma3": GEMMA | {"norm_position": "sandwich", "qk_norm": True},
    "gptneox": {"norm": "layernorm", "position": "rope", "activation": "gelu"},
    "olmo2": RMS | NO_BIAS | {"norm_position": "output", "qk_norm": True, "qk_norm_over": "heads"},
}
# Norms of a layer by their position: our name -> theirs.
NORMS = {
    "pre": {"ln_1": "attn_norm", "ln_2": "ffn_norm"},
    "output": {"ln_1": "post_attention_norm", "ln_2": "post_ffw_norm"},
    "sandwich": dict(ln_1="attn_norm", ln_1_out="post_attention_norm", ln_2="ffn_norm", ln_2_out="post_ffw_norm"),
}
WITH_HEAD_SIZE = ("llama", "qwen3", "gemma", "gemma2", "gemma3")  # in the others it is n_embd / n_head
TIED_WITH_COPY = ("gptneox", "olmo2")  # llama.cpp needs the output matrix of these
COPY = ("jaxgpt.tie_embeddings", False)
# Fields that are stored as they are.
OWN = {
    "gptneox": fields(tie_embeddings=COPY, parallel_residual="use_parallel_residual"),
    "olmo2": fields(tie_embeddings=COPY),
    "gemma2": fields(
        attention_softcap=("attn_logit_softcapping", 50.0), logit_softcap=("final_logit_softcapping", 30.0)
    ),
    "gemma3": fields(logit_softcap=("final_logit_softcapping", None)),
}
ALWAYS_TIED = ("gemma", "gemma2")  # all others are tied if there is no output matrix
# Size and period of windows if their fields are absent, and the layers by which llama.cpp knows the model of 27B.
WINDOWED = {"gemma2": (4096, 2, 46), "gemma3": (None, 6, 62)}


def _write(name: str, c: GPTConfig) -> Json:
    """Return the fields of an architecture. What it cannot express is left out."""
    usual = USUAL[name]
    values: Json = {key: getattr(c, ours) for ours, key in SIZES.items()}
    if usual.get("position") == "rope":
        values |= {"rope.freq_base": c.rope_theta, "rope.dimension_count": int((c.head_dim or 0) * c.rope_fraction)}
        if c.rope_scaling == "linear":
            values |= {"rope.scaling.type": "linear", "rope.scaling.factor": c.rope_factor}
        if c.rope_scaling == "longrope" and name == "phi3":
            values |= {key: hold(np.array(getattr(c, ours), np.float32)) for key, ours in LONGROPE.items()}
            values |= {ORIGINAL: c.rope_original_context, MAGNITUDE: c.rope_magnitude}
    values[EPSILON[usual["norm"]]] = c.norm_eps
    if usual["norm"] == "rmsnorm":
        values |= {"attention.head_count_kv": c.n_kv_head, QKV_BIAS: c.qkv_bias or None}
    if name == "llama":
        if c.rope_scaling == "llama3":
            values |= {f"jaxgpt.{ours}": getattr(c, ours) for ours in SCALINGS["llama3"].values()}
            values[FREQUENCIES] = hold(_find_divisors(c))  # llama.cpp divides the angle of each pair by this tensor
        values |= {OUT_BIAS: c.out_bias or None, UP_BIAS: c.bias or None}
    if name in WITH_HEAD_SIZE:
        values |= dict.fromkeys(("attention.key_length", "attention.value_length"), c.head_dim)
    if name not in (*TIED_WITH_COPY, *ALWAYS_TIED) and not c.tie_embeddings:
        values[OUTPUT] = True
    # llama.cpp has only the tanh form of GELU. By erf it is at most 4.7e-4 away, and ggml's table in float16 up to 2e-3.
    if c.activation != usual["activation"] and usual["activation"].startswith(c.activation.removesuffix("_tanh")):
        values["jaxgpt.activation"] = c.activation
    if name == "gemma3":
        values["rope.freq_base_swa"] = c.rope_local_theta or c.rope_theta
    if name in WINDOWED and c.window(0) is not None:  # else no layer has one
        values |= {WINDOW: c.sliding_window, PERIOD: c.global_every or 0}
    return values


def _read(name: str, values: Json) -> Json:
    """Return the fields of `GPTConfig` for the model that llama.cpp computes, with its defaults."""
    usual, get = USUAL[name], values.get
    needed = fields(norm_eps=EPSILON[usual["norm"]], **SIZES)
    ours = usual | never(expert_count=0).read(values) | needed.read(values)
    head_size = check_count("n_embd", get("embedding_length")) // check_count("n_head", get("attention.head_count"))
    if name in WITH_HEAD_SIZE:
        head_size = ours["head_dim"] = check_count("head_dim", get("attention.key_length", head_size))
    if usual.get("position") == "rope":
        ours |= {"rope_theta": get("rope.freq_base", 10_000.0)} | _read_scaling(values, head_size)
        missing = None if name == "gptneox" else head_size
        rotated = check_count("rope.dimension_count", get("rope.dimension_count", missing))
        if name in ("gptneox", "phi3"):
            ours["rope_fraction"] = rotated / max(head_size, 1)
        elif rotated != head_size:
            raise UserError(f"rope.dimension_count={rotated}: needs the head size, {head_size}")
    if usual["norm"] == "rmsnorm":
        ours |= {"n_kv_head": get("attention.head_count_kv"), "qkv_bias": QKV_BIAS in values}
    if name == "llama":
        ours |= {"out_bias": OUT_BIAS in values, "bias": UP_BIAS in values}
    if name not in (*TIED_WITH_COPY, *ALWAYS_TIED):
        ours["tie_embeddings"] = OUTPUT not in values
    ours["activation"] = get("jaxgpt.activation", usual["activation"])
    if name == "gemma3":
        ours["rope_local_theta"] = get("rope.freq_base_swa", 10_000.0)
    if name in WINDOWED:
        size, every, deepest = WINDOWED[name]
        ours["sliding_window"] = get(WINDOW, size) or None
        ours["global_every"] = (get(PERIOD, every) or None) if ours["sliding_window"] else None
        if values["block_count"] == deepest:  # this model's scores have the scale of n_embd / n_head
            ours["query_scale"] = ours["n_embd"] // ours["n_head"]
    return ours


def _read_scaling(values: Json, head_size: int) -> Json:
    """Return the fields of `GPTConfig` for scaled rotations. Raises `UserError` for scalings that it does not have."""
    kind = values.get("rope.scaling.type")
    if kind not in (None, "none", "linear"):
        raise UserError(f"rope.scaling.type={short(kind)}: only none and linear are supported, and Llama 3's")
    if given := LONGROPE.keys() & values.keys():  # GPTConfig needs all of them, and names what is missing
        factors = {LONGROPE[key]: tuple(values[key].read().ravel()[:head_size].tolist()) for key in given}
        context = {"rope_original_context": values.get(ORIGINAL)}
        return factors | context | {"rope_scaling": "longrope", "rope_magnitude": values.get(MAGNITUDE, 1.0)}
    if FREQUENCIES not in values:
        factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
        is_scaled = factor is not None and kind != "none"
        return {"rope_scaling": "linear", "rope_factor": factor} if is_scaled else {}
    found: Json = {"rope_scaling": "llama3"} | {x: values.get(f"jaxgpt.{x}") for x in SCALINGS["llama3"].values()}
    if found["rope_factor"] is None:  # written by another program: what Llama 3 has, by the largest divisor
        divisors = values[FREQUENCIES].read()
        found |= {"rope_factor": float(divisors.max()), "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
        found |= {"rope_original_context": 8192}
        theta = values.get("rope.freq_base", 10_000.0)
        model = GPTConfig(n_layer=1, n_head=1, n_embd=head_size, position="rope", rope_theta=theta, **found)
        if divisors.shape != (head_size // 2,) or not np.allclose(divisors, _find_divisors(model), rtol=1e-3):
            raise UserError(f"{FREQUENCIES} is not Llama 3's scaling with a factor of {divisors.max():g}")
    return found


def _find_divisors(config: GPTConfig) -> np.ndarray:
    """Return what the angle of each pair is divided by, where Llama 3's rotations are scaled."""
    rope = config.make_rope(None)
    assert rope is not None
    return np.asarray(rope._replace(scaling="none").frequencies() / rope.frequencies())


def _family(name: str) -> Family:
    has_qkv = name in ("gpt2", "gptneox", "phi3")
    matrices = {"attn/qkv": "attn_qkv"} if has_qkv else {f"attn/{x}": f"attn_{x}" for x in "qkv"}
    matrices |= {"mlp/gate_up": "ffn_up"} if name == "phi3" else {"mlp/c_gate": "ffn_gate", "mlp/c_fc": "ffn_up"}
    rules = weight_rules(
        {"wte": "token_embd", "wpe": "position_embd", "lm_head": "output", "ln_f": "output_norm"},
        "blk.{}",
        matrices
        | {"attn/c_proj": "attn_output", "mlp/c_proj": "ffn_down"}
        | NORMS[USUAL[name].get("norm_position", "pre")]
        | {"attn/q_norm": "attn_q_norm", "attn/k_norm": "attn_k_norm"},
        rotated="pairs" if name == "llama" else "rows",
    )
    config_rule = ConfigRule((), functools.partial(_read, name), functools.partial(_write, name))
    return Family(model_type=name, config_rules=(config_rule, OWN.get(name, never())), weight_rules=rules)


ARCHITECTURES = {name: _family(name) for name in USUAL}
RENAMED = {"gemma3_text": ARCHITECTURES["gemma3"], "gpt_neox": ARCHITECTURES["gptneox"]}
FAMILIES = RENAMED | ARCHITECTURES | {"mistral": ARCHITECTURES["llama"]}  # by the model_type of Hugging Face


def write_fields(family: Family, config: GPTConfig) -> Json:
    """Return the fields of an architecture, without prefix. Raises `UserError` if llama.cpp computes another model."""
    written = family.write(config).items()
    values = {key: float(x) if key.endswith(FLOATS) else x for key, x in written if x is not None}
    try:
        differs = find_differences(config, family.read(values))
    except UserError as e:
        differs = [f"this model: {e}"]
    if differs and config.rope_local_theta is None and config.block_size <= (config.sliding_window or 0):
        return write_fields(family, dataclasses.replace(config, sliding_window=None, global_every=None))  # the same
    if differs:
        raise UserError(f"the {family.model_type} of llama.cpp does not support {', '.join(differs)}")
    return values


MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
LARGEST_HEADER = 2**26  # bytes before the elements. Gemma 3's, with 262,144 tokens, has 2**23
SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")  # the name of a part, as gguf-split writes it
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # struct's codes
FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}  # llama.cpp's numbers
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}  # for users
EMBEDDING, NORM = "token_embd.weight", "norm.weight"


def parse_dtype(name: str | None, known: Collection[str] = NAMES) -> str | None:
    """Return the name of a dtype in `known`. f32, f16 and bf16 are accepted too. None means None."""
    found = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}.get(str(name), name)
    if found is not None and found not in known:
        raise UserError(f"dtype={short(name)}: needs one of {', '.join(known)}")
    return found


def to_gguf(params: dict, config: GPTConfig, model_type: str) -> tuple[Json, Tensors]:
    """Return (fields, tensors by name) of a model, without the tokenizer's fields. The tensors are made when written.

    model_type: the family's name at Hugging Face. Raises `UserError` if llama.cpp has no such model.
    """
    family = FAMILIES[model_type]
    values, tensors = write_fields(family, config), to_tensors(params, family, config)
    if "jaxgpt.tie_embeddings" in values:  # llama.cpp needs the output matrix of a tied model too
        tensors.setdefault(OUTPUT, tensors[EMBEDDING])
    tensors |= {name: values[name] for name in ROTATIONS if name in values}
    own: Json = {"general.architecture": family.model_type}
    for key, value in values.items():
        if key not in tensors:
            own[key if key.startswith("jaxgpt.") else f"{family.model_type}.{key}"] = value
    return own, tensors | _shift_norms(tensors, config, 1)


def _shift_norms(tensors: Tensors, config: GPTConfig, by: int) -> Tensors:
    """Return the norms of Gemma, whose parameters are 1 less than the scales in a file."""
    return {
        name: hold(x.read().astype(np.float32) + by)
        for name, x in tensors.items()
        if config.norm_offset and name.endswith(NORM)
    }


def write_gguf(path: Path, fields: Json, tensors: Tensors, dtype: str | None = None) -> None:
    """Write a file atomically, with one tensor in memory at a time.

    Tensors with one axis and the embedding of positions are float32, as llama.cpp needs them. `dtype`, a key of `NAMES`,
    is the dtype of the matrices, by default each one's own. q8_0 becomes float16 if rows are not divisible by 32.
    """
    gguf = _package()
    named = NAMES[dtype] if dtype else None
    writer, kinds = gguf.GGUFWriter(None, fields["general.architecture"]), gguf.GGUFValueType
    own = {
        "general.file_type": FILE_TYPES[named or tensors[EMBEDDING].kind],
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
    }
    for key, value in (own | dict(fields)).items():
        if key != "general.architecture":  # the writer has added it
            writer.add_key_value(key, value, kinds.UINT32 if type(value) is int else kinds.get_type(value))
    stored = []
    for name, tensor in tensors.items():
        kind = named or tensor.kind
        if len(tensor.shape) < 2 or name == "position_embd.weight":
            kind = "F32"
        elif kind == "Q8_0" and tensor.shape[-1] % 32:
            kind = "F16"
        stored.append((name, tensor, kind))
        size, number = _count_bytes(tensor.shape, kind), gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=number)
    with open_whole(path) as f, contextlib.closing(writer):
        writer.write_header_to_file(Path(f.name))  # opens the file again, by its temporary name
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor, kind in stored:
            x = tensor.read()
            if kind == "F16" and float(np.abs(x).max(initial=0)) > float(np.finfo(np.float16).max):
                raise UserError(f"{name} has values beyond those of float16: take dtype bfloat16 or float32")
            x = np.ascontiguousarray(x, DTYPES.get(kind, np.float32))
            writer.write_tensor_data(gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0) if kind == "Q8_0" else x)


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("GGUF needs the gguf package: python -m pip install 'jaxgpt[gguf]'") from None
    return gguf


def _count_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Return the bytes of a tensor of a kind that ggml names. Raises `UserError` if a row is cut within a block."""
    gguf = _package()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if not shape or shape[-1] % block:
        raise UserError(f"rows of {[*shape]} elements, which are no blocks of {block} of {kind}")
    return math.prod(shape) // block * size


def _read_elements(path: Path, shape: tuple[int, ...], kind: str, offset: int) -> np.ndarray:
    """Read the elements of a tensor. Those that are quantised become float32."""
    with open_file(path) as f:
        f.seek(offset)
        raw = f.read(_count_bytes(shape, kind))
    if kind in DTYPES:
        return np.frombuffer(raw, DTYPES[kind]).reshape(shape)
    gguf = _package()
    number = gguf.GGMLQuantizationType[kind]
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, gguf.GGML_QUANT_SIZES[number][1])
    return gguf.quants.dequantize(blocks, number).reshape(shape)


@functools.cache
def _find_kind(number: int) -> str:
    """Return ggml's name of a dtype. Raises `UserError` if it cannot be read."""
    gguf = _package()
    try:
        kind = gguf.GGMLQuantizationType(number)
        if kind.name not in DTYPES:
            gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (ValueError, NotImplementedError):
        raise UserError(f"has dtype {number} of ggml, which the gguf package does not read") from None
    return kind.name


def open_gguf(path: Path, tokenizer: str | None = None) -> tuple[Source, Json]:
    """Open a file, and check it before any matrix is read. Returns (model, all fields).

    tokenizer: path of a tokenizer.json, or "ids" for none. None means the one in the file. Raises `UserError` if the file
    is damaged, or has an architecture, a tokenizer or a quantisation that is unknown.
    """
    values, tensors = read_gguf(path)
    try:
        family, config = read_config(values, tensors)
        tensors = {name: x for name, x in tensors.items() if name not in ROTATIONS}
        if config.n_layer > len(tensors):  # it would take long to trace
            raise UserError(f"block_count={config.n_layer}, but there are {len(tensors)} tensors")
        tensors |= _shift_norms(tensors, config, -1)
        check(tensors, family, config)
        if tokenizer is None:
            check_vocabulary(found := read_tokenizer(values), "the file", config)
        else:
            found = load_named_tokenizer(tokenizer, config)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return Source(directory=path, family=family, config=config, tokenizer=found, tensors=tensors), values


def read_config(values: Json, tensors: Tensors) -> tuple[Family, GPTConfig]:
    """Return (family, architecture) of a file. Raises `UserError` if they are unknown, or our layers do not support them."""
    name, embedding = str(values.get("general.architecture")), tensors.get(EMBEDDING)
    if name not in ARCHITECTURES:
        raise UserError(f"general.architecture={short(name)} is unknown: jaxgpt reads {', '.join(ARCHITECTURES)}")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"it has no {EMBEDDING} with two axes")
    known = {key.removeprefix(f"{name}."): value for key, value in values.items()} | tensors
    return ARCHITECTURES[name], ARCHITECTURES[name].read(known | {"vocab_size": embedding.shape[0]})


def read_gguf(path: Path) -> tuple[Json, Tensors]:
    """Return (fields, tensors by name) of an untrusted file, or of all parts of one that is split: see `_read_part`."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return _read_part(path)
    parts = [path.with_name(f"{found[1]}-{n:05}-of-{found[2]}.gguf") for n in range(1, int(found[2]) + 1)]
    values, tensors = _read_part(parts[0])
    for part in parts[1:]:
        tensors |= _read_part(part)[1]
    wanted = values.get("split.tensors.count")
    if wanted != len(tensors):
        raise UserError(f"{path}: its parts have {len(tensors)} tensors, the first says {short(wanted)}")
    return values, tensors


def _read_part(path: Path) -> tuple[Json, Tensors]:
    """Return (fields, tensors by name) of a file. Elements are read when they are needed.

    A float32 field becomes the shortest decimal number that rounds to it: 1e-05, not 9.999999747378752e-06.
    Raises `UserError` for a file that is damaged, or has tensors that the gguf package cannot dequantise.
    """
    # gguf.GGUFReader takes 34 s and 1.2 GB for the fields of Gemma 3, this 0.5 s, and never returns from a damaged array.
    with open_file(path) as f:
        size = os.fstat(f.fileno()).st_size
        raw, at = f.read(min(size, LARGEST_HEADER)), 4

    def take(code: str, count: int = 1) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from(f"<{count}{code}", raw, at)  # raises an error at the end of `raw`
        at += struct.calcsize(f"<{count}{code}")
        return values

    def take_value(kind: int) -> Any:
        if kind == STRING:
            return take("s", *take("Q"))[0].decode()
        if kind == ARRAY:
            (inner,), (count,) = take("I"), take("Q")
            return [take_value(STRING) for _ in range(count)] if inner == STRING else [*take(SCALARS[inner], count)]
        (value,) = take(SCALARS[kind])
        return float(str(np.float32(value))) if SCALARS[kind] == "f" else value

    values, infos = dict[str, Any](), list[tuple[Any, ...]]()
    if raw[:4] != MAGIC:
        raise UserError(f"{path} is not a GGUF file")
    try:
        (version,), (tensor_count, field_count) = take("I"), take("Q", 2)
        if version != VERSION:
            raise UserError(f"{path} has version {version} of GGUF: jaxgpt reads {VERSION}, little-endian")
        for _ in range(field_count):
            key = take_value(STRING)
            values[key] = take_value(*take("I"))
        for _ in range(tensor_count):
            infos.append((take_value(STRING), take("Q", *take("I"))[::-1], *take("I"), *take("Q")))
    except (struct.error, UnicodeDecodeError, KeyError) as e:
        raise UserError(f"{path} is damaged within its header ({e}): download it again") from None
    tensors, block = {}, values.get("general.alignment", ALIGNMENT)
    start = -(-at // block) * block
    for name, shape, number, offset in infos:
        try:
            kind = _find_kind(number)
            length = _count_bytes(shape, kind)
        except UserError as e:
            raise UserError(f"{path}: {name} {e}") from None
        if len(shape) > 4 or start + offset + length > size:
            raise UserError(f"{path} is damaged: it ends before the end of {name}. Download it again.")
        read = functools.partial(_read_elements, path, shape, kind, start + offset)
        tensors[name] = Tensor(shape, kind if kind in DTYPES else "F32", read, path)
    return values, tensors
