"""Make a page that is the model: one HTML file with the weights, in which one types and switches parts off."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config.validate import check_value
from jaxgpt.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    find_start_token,
    find_word_pattern,
)
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.hf.source import list_byte_names
from jaxgpt.interventions.model import EDITS
from jaxgpt.layers.linear import to_int8
from jaxgpt.layers.position import sinusoidal
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import Run
from jaxgpt.sample.quantize import DECODE_MATRIX, unstack_layers
from jaxgpt.tools.html_page import Arrays, render_html
from jaxgpt.tools.xray.xray import describe_run, map_embedding, most_tokens, spell
from jaxgpt.train import Params

Weights = Literal["int8", "float32"]
PROGRAMS = ("xray/sections", "xray/tokenizer", "xray/engine", "xray/live")  # of the page
MOST_PARAMETERS = 2**26  # 85 MB as int8 in base64
MOST_WEIGHTS = 2**22  # attention weights, which are drawn again as the text changes
UNUSUAL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")  # options of a BPE


def make_page(run: Run, prompt: str | None = None, *, weights: Weights = "int8") -> str:
    """Return one HTML file that is the model: its weights, its tokenizer, and an engine that shows what it computes.

    Args:
        run: the run, as it was trained.
        prompt: the text to begin with. None means the experiment's `train.sample_prompt`.
        weights: the form of the matrices. "int8" has one scale per output. Activations are float32 in both cases.

    Raises:
        UserError: for a model or a tokenizer that the page cannot run.
    """
    model, params, V = run.model, run.params, run.tokenizer.vocab_size
    check_value("weights", weights, Weights)
    if model.config.is_foreign:
        raise UserError(f"{type(model.config).__name__}: a page computes jaxgpt's own modules only: use jaxgpt serve")
    if EDITS in params or DECODE_MATRIX in params["wte"]:
        raise UserError("the model is edited, or was converted by for_decoding: give the run as jaxgpt.load returns it")
    if (count := count_parameters(params)) > MOST_PARAMETERS:
        raise UserError(f"{run.directory} has {count:,} parameters, too many for a page: at most {MOST_PARAMETERS:,}")
    if prompt is not None:
        run.tokenizer.encode(prompt)  # raises for characters that it does not know
    model, params = unstack_layers(model, params)
    arrays, config, start = Arrays(), model.config.explicit(), find_start_token(run.tokenizer)[0]
    arrays.words = {token: token for token in range(V)}
    context = most_tokens(config, MOST_WEIGHTS)
    held, windows = hold(params, weights), [config.window(layer) for layer in range(config.n_layer)]
    if config.position == "sinusoidal":
        held["wpe"] = {"embedding": np.asarray(sinusoidal(jnp.arange(context)[None], config.n_embd)[0])}
    ropes = [config.make_rope(window) for window in windows]
    data = {
        "title": f"{run.experiment.name}, live",
        "facts": [*describe_run(run), ("weights", weights)],
        "tokenizer": describe_tokenizer(run.tokenizer, arrays),
        "prefix": list(run.tokenizer.prefix),
        "empty": start,  # the token that stands for an empty text
        "stop": run.prompt_format.stop_tokens(False),
        "prompt": run.experiment.train.sample_prompt if prompt is None else prompt,
        "sampling": {"temperature": run.experiment.train.sample_temperature},
        "corpus": None,
        "why_no_corpus": "The page does not have the training text; jaxgpt xray shows the examples.",
        "embedding": map_embedding(run, [start], None, arrays),
        "words": [spell(run.tokenizer, token) for token in range(V)],
        "model": {
            "config": dataclasses.asdict(config),
            "context": context,
            "vocab_size": V,
            "windows": windows,
            "rotations": [rope and [np.asarray(rope.frequencies()).tolist(), rope.magnitude] for rope in ropes],
            "params": jax.tree.map(arrays.put, held),
        },
    }
    return render_html(PROGRAMS, data, arrays)


def hold(params: Params, weights: Weights) -> Params:
    """Return parameters of unstacked layers in float32, matrices as {"values": [F, D], "scale": [F] or None}."""

    def convert(path: Any, given: jax.Array) -> Any:
        x = np.asarray(given, np.float32)
        if not np.isfinite(x).all():
            raise UserError(f"{'/'.join(part.key for part in path)} is not finite: use another run")
        if x.ndim < 2 or path[0].key == "wpe":
            return x
        matrix_FD = x if path[-1].key == "embedding" else x.T
        if weights == "float32":
            return {"values": matrix_FD, "scale": None}
        values_FD, scale_F = jax.device_get(to_int8(jnp.asarray(matrix_FD)))
        return {"values": values_FD, "scale": scale_F}

    return jax.tree.map_with_path(convert, params)


def describe_tokenizer(tokenizer: Tokenizer, arrays: Arrays) -> Json:
    """Return the fields with which `tokenizer.js` encodes what is typed on a page."""
    alphabet, pattern, triples, whole_words = None, None, [], False
    if isinstance(tokenizer, CharTokenizer):
        tokens = [c.encode() for c in tokenizer.characters]
    elif isinstance(tokenizer, ByteTokenizer):
        tokens = [bytes([b]) for b in range(256)]
        alphabet = np.arange(256, dtype=np.int32)
    elif isinstance(tokenizer, BPETokenizer):
        parts, letters = tokenizer.parts(), list_byte_names()
        model, added, pattern = parts["model"], parts["added_tokens"], find_word_pattern(parts["pre_tokenizer"])
        vocab = model["vocab"]
        is_plain = model["type"] == "BPE" and not any(model.get(name) for name in UNUSUAL) and not parts["normalizer"]
        is_known = pattern is not None and all(c in vocab for c in letters) and all(x["special"] for x in added)
        if not is_plain or not is_known:
            known = "characters, bytes and byte-level BPE as GPT-2, GPT-4 and Llama 3 have it"
            raise UserError(f"the page cannot encode as this run's tokenizer does: it knows {known}")
        codes, tokens = {letter: byte for byte, letter in enumerate(letters)}, [b""] * tokenizer.vocab_size
        for text, i in [*vocab.items(), *((token["content"], token["id"]) for token in added)]:
            tokens[i] = bytes(codes[c] for c in text) if all(c in codes for c in text) else text.encode()
        triples = [(vocab[left], vocab[right], vocab[left + right]) for left, right in model["merges"]]
        alphabet, whole_words = np.array([vocab[x] for x in letters], np.int32), bool(model["ignore_merges"])
    else:
        raise UserError("the page needs text, and this run's tokens are bare ids: train with a tokenizer of text")
    return {
        "bytes": arrays.put(np.frombuffer(b"".join(tokens), np.uint8)),
        "ends": arrays.put(np.cumsum([len(token) for token in tokens], dtype=np.int32)),
        "alphabet": arrays.put(alphabet),
        # \s of JavaScript has U+FEFF and lacks U+0085.
        "pattern": pattern and pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}"),
        "merges": arrays.put(np.array(triples, np.int32).reshape(-1, 3)),
        "whole_words": whole_words,
    }
