"""Make the X-ray page of a run: what the model computes on one text, prepared for `xray.js` to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import GPTConfig
from jaxgpt.config.validate import check_count
from jaxgpt.data.corpus import find_user_files
from jaxgpt.data.dataset import encode_whole
from jaxgpt.data.pipeline import Tokens
from jaxgpt.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.parallel.device import count_parameters
from jaxgpt.run import Run
from jaxgpt.runs.training import reopen_dataset
from jaxgpt.sample.quantize import DECODE_MATRIX
from jaxgpt.sample.state import check_ids
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers
from jaxgpt.tools.xray.activations import (
    Activations,
    Guess,
    Norm,
    TopExamples,
    capture_activations,
    top_activating_examples,
)
from jaxgpt.train import Params

CORPUS_TOKENS = 2**15  # searched for top activating examples; takes seconds for a small model
MOST_WEIGHTS = 2**25  # attention weights on a page, one byte each before compression
PROGRAMS = ("xray/sections", "xray/xray")  # of the page
UNITS = 8  # most active units that are listed for each position
ELEMENTS = 8  # of a token's vector that are shown before and after a norm
LABELS = 400  # most tokens on the map of embeddings
NAMED = 200  # most probable next tokens whose text the page has
NEIGHBOURS = 5  # nearest tokens that are listed for each token


def xray(run: Run, prompt: str | Sequence[int], *, data: str | None = None, corpus_tokens: int = CORPUS_TOKENS) -> str:
    """Return a self-contained HTML page that shows what the model computes on a text.

    It shows surprise, attention, norms, the residual stream, MLP units, the logit lens, embeddings and sampling.

    Args:
        run: the run.
        prompt: the text, or its token ids.
        data: a UTF-8 file to search for the top activating examples of each MLP unit. None: the run's training text.
        corpus_tokens: tokens of that text to read, spread evenly over it. 0 means none.

    Raises:
        UserError: if the prompt is empty, longer than block_size or too long for a page, or the file cannot be used.
    """
    config, corpus_tokens = run.model.config, check_count("corpus_tokens", corpus_tokens, 0)
    if isinstance(prompt, str):
        ids = [*run.tokenizer.prefix, *run.tokenizer.encode(prompt).tolist()] if prompt else []
    else:
        ids = check_ids(run.model, prompt, "prompt").tolist()
    if not ids:
        raise UserError("the prompt is empty: give a text with --prompt TEXT")
    if len(ids) > config.block_size:
        raise UserError(
            f"the prompt has {len(ids)} tokens, and the context of {run.directory} is {config.block_size}: "
            f"give at most {config.block_size}"
        )
    fits = int((MOST_WEIGHTS / config.n_layer / config.n_head) ** 0.5)
    if len(ids) > fits:
        raise UserError(f"{len(ids)} tokens have too many attention weights for a page: give at most {fits} tokens")
    activations = capture_activations(run.model, run.params, ids, run.tokenizer.vocab_size)
    if np.isnan(activations.logits_V).any():
        raise UserError(
            f"{run.directory} gives logits that are not finite, so there is nothing to draw: use another run"
        )
    windows_NT, why = _windows(run, data, corpus_tokens)
    examples = None if windows_NT is None else top_activating_examples(run.model, run.params, windows_NT)
    arrays = TokenArrays()

    def put_guess(guess: Guess) -> dict[str, Any]:
        return {
            "ids": arrays.put_tokens(guess.tokens_TK),
            "p": arrays.put(np.asarray(guess.probabilities_TK, np.float32)),
            "actual": round_numbers(np.exp(guess.logprob_T)),
        }

    order_V = np.argsort(-activations.logits_V, kind="stable")  # sampling options do not change it
    content: dict[str, Any] = {
        "title": f"X-ray of {run.experiment.name}",
        "facts": describe_run(run),
        "texts": {"text": arrays.put_tokens(ids)},
        "bits": round_numbers([None, *(activations.guess.logprob_T[:-1] / -math.log(2)).tolist()]),
        "guess": put_guess(activations.guess),
        "lens": [put_guess(guess) for guess in activations.lens],
        "attention": _attention_maps(activations, arrays),
        "start": round_numbers(activations.start_T),
        "branches": [
            {"name": b.name, "added": round_numbers(b.added_T), "stream": round_numbers(b.stream_T)}
            for b in activations.branches
        ],
        "norms": [_norm(norm, config) for norm in activations.norms],
        "mlp": [
            _units(i, hidden_TF, config.activation, examples, arrays)
            for i, hidden_TF in enumerate(activations.hidden_LTF)
        ],
        "corpus": None
        if examples is None
        else {"ids": arrays.put_tokens(examples.windows_NT.ravel()), "window": examples.windows_NT.shape[1]},
        "why_no_corpus": why,
        "embedding": map_embedding(run, {"text": ids}, examples, arrays),
        "sampling": {
            "ids": arrays.put_tokens(order_V[:NAMED]),
            "logits": arrays.put(activations.logits_V[order_V].astype(np.float32)),
            "temperature": run.experiment.train.sample_temperature,
        },
    }
    content["words"] = [spell(run.tokenizer, token) for token in arrays.words]
    return render_html(PROGRAMS, content["title"], content, arrays)


def _windows(run: Run, data: str | None, tokens: int) -> tuple[np.ndarray | None, str]:
    """Return windows spread evenly over the run's training text, or over the file `data`; or None and the reason."""
    T = run.model.config.block_size
    if not tokens:
        return None, "The search is switched off (--corpus-tokens 0)."
    if data is not None:
        text: Any = Tokens([encode_whole(find_user_files(data), run.tokenizer)[0]])
        if len(text) < T:
            raise UserError(f"{data} has {len(text)} tokens, needed {T} for one window")
    else:
        if run.metadata.imported is not None:
            return None, "The model was imported without its training text: name a text with --data FILE."
        try:
            dataset = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back")
        except UserError as e:  # a run that was copied to another machine
            return None, f"The training text could not be read ({e}): name a text with --data FILE."
        text = dataset.train
        if not isinstance(text, Tokens):
            return None, "The run was trained on conversations: name a text with --data FILE."
    count = min(max(tokens // T, 1), len(text) // T)
    starts = np.linspace(0, len(text) - T, count).astype(np.int64)
    return np.stack([text.read(int(start), T) for start in starts]), ""


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Return the facts at the head of a page: (name, value)."""
    config = run.model.config
    return [
        ("run", str(run.directory)),
        ("step", f"{run.step:,}"),
        ("validation loss", "not measured" if run.val_loss is None else f"{run.val_loss:.4f} nats per token"),
        ("parameters", f"{count_parameters(run.model.shapes()):,}"),
        ("layers, heads, width", f"{config.n_layer}, {config.n_head}, {config.n_embd}"),
        ("norm", f"{config.norm}, {config.norm_position}"),
        ("MLP", f"{config.explicit().mlp_dim} units, {config.activation}"),
        ("positions", config.position),
    ]


def spell(tokenizer: Tokenizer, token: int) -> str:
    """Return the text that stands for a token on the page: part of a character is hexadecimal (bytes) or U+FFFD."""
    if token >= tokenizer.vocab_size:  # padding of the vocabulary
        return f"<{token}>"
    if isinstance(tokenizer, ByteTokenizer) and token >= 0x80:
        return f"\\x{token:02x}"
    return tokenizer.decode([token]) + " " * isinstance(tokenizer, IdTokenizer)


def read_embedding(params: Params) -> np.ndarray:
    """Return the token embedding in float32, [V, D], dequantised if the run has quantised weights."""
    quantized = params["wte"].get(DECODE_MATRIX)
    rows_VD = params["wte"]["embedding"] if quantized is None else quantized.take(np.arange(len(quantized.scale_F)))
    return np.asarray(rows_VD, np.float32)


class TokenArrays(Arrays):
    """The arrays of a page, and the distinct tokens that it shows."""

    def __init__(self) -> None:
        """Start without arrays and tokens."""
        super().__init__()
        self.words: dict[int, int] = {}  # index by token id, in order of insertion

    def put_tokens(self, tokens: ArrayLike) -> dict[str, Any]:
        """Add token ids as indices into `words`; return the reference."""
        tokens = np.asarray(tokens)
        known, inverse = np.unique(tokens, return_inverse=True)
        indices = [self.words.setdefault(int(token), len(self.words)) for token in known]
        return self.put(np.array(indices, np.int32)[inverse].reshape(tokens.shape))


def attention_shares(weights_NTS: np.ndarray) -> list[list[float]] | None:
    """Return, for each head, the mean attention weight on the previous token, the first token and the token itself.

    The means are over queries from the third token on, because the token before the second is the first. Returns None
    for fewer than three tokens.
    """
    t = np.arange(2, weights_NTS.shape[1])
    if not len(t):
        return None
    each = (weights_NTS[:, t, t - 1], weights_NTS[:, t, 0], weights_NTS[:, t, t])
    return np.stack([x.mean(axis=1) for x in each], axis=1).tolist()


def project_to_plane(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (vectors projected on two principal components, [N, 2] in [-1, 1]; the components' shares of variance)."""
    vectors_ND = vectors_ND / max(np.abs(vectors_ND).max(), 1e-30)  # so that the squares are finite in float32
    centred_ND = vectors_ND - vectors_ND.mean(axis=0)
    variance_D, axes_DD = np.linalg.eigh(centred_ND.T @ centred_ND)
    xy_N2 = centred_ND @ axes_DD[:, [-1, -2]] if vectors_ND.shape[1] > 1 else np.repeat(centred_ND, 2, axis=1)
    share = variance_D[::-1][:2] / max(variance_D.sum(), 1e-30)
    return xy_N2 / max(np.abs(xy_N2).max(), 1e-30), share


def _attention_maps(activations: Activations, arrays: Arrays) -> list[dict[str, Any]]:
    """Return the map of each layer."""
    return [
        {
            "name": f"layer {i + 1}",
            # The page shades square roots, in 256 levels, because most weights are small.
            "roots": arrays.put(np.round(255 * np.sqrt(np.clip(weights_NTS, 0, 1))).astype(np.uint8)),
            "shares": round_numbers(attention_shares(weights_NTS), 3),
        }
        for i, weights_NTS in enumerate(activations.weights_LNTS)
    ]


def _norm(norm: Norm, config: GPTConfig) -> dict[str, Any]:
    def moments(x_TD: np.ndarray) -> dict[str, Any]:
        return {"mean": round_numbers(x_TD.mean(axis=1)), "variance": round_numbers(x_TD.var(axis=1))}

    def spread(x_D: np.ndarray | None) -> Any:
        return None if x_D is None else round_numbers([x_D.mean(), x_D.min(), x_D.max()])

    return {
        "name": norm.name,
        "eps": config.norm_eps,
        "centred": config.norm == "layernorm",  # LayerNorm subtracts the mean
        "before": moments(norm.before_TD),
        "after": moments(norm.after_TD),
        "scale": round_numbers(norm.scale_D[:ELEMENTS]),
        "bias": None if norm.bias_D is None else round_numbers(norm.bias_D[:ELEMENTS]),
        "scales": spread(norm.scale_D),
        "biases": spread(norm.bias_D),
        "x": round_numbers(norm.before_TD[:, :ELEMENTS]),
    }


def _units(
    layer: int, hidden_TF: np.ndarray, activation: str, examples: TopExamples | None, arrays: Arrays
) -> dict[str, Any]:
    order_TK = np.argsort(-hidden_TF, axis=1, kind="stable")[:, :UNITS]
    peak_F = np.maximum(hidden_TF.max(axis=0), 0.0)
    # Sixteen levels relative to each unit's peak are enough for colours, and compress well.
    levels_TF = np.round(15 * np.clip(hidden_TF, 0, None) / np.where(peak_F, peak_F, 1)).astype(np.uint8)
    zero_TF = hidden_TF == 0
    return {
        "units": hidden_TF.shape[1],
        "top": arrays.put(order_TK.astype(np.int32)),
        "values": arrays.put(np.take_along_axis(hidden_TF, order_TK, axis=1).astype(np.float32)),
        "levels": arrays.put(levels_TF.T),
        "peaks": arrays.put(peak_F.astype(np.float32)),
        # Only ReLU and its square give exact zeros.
        "zeros": round_numbers(zero_TF.mean(axis=1)) if activation.startswith("relu") else None,
        "silent": int(zero_TF.all(axis=0).sum()),
        "examples": examples and arrays.put(examples.positions[layer].astype(np.int32)),
        "example_values": examples and arrays.put(np.nan_to_num(examples.values[layer], posinf=0, neginf=0)),
    }


def map_embedding(
    run: Run, texts: dict[str, list[int]], examples: TopExamples | None, arrays: TokenArrays
) -> dict[str, Any]:
    """Return the token vectors on a plane, and the nearest tokens of each."""
    vectors_VD = read_embedding(run.params)[: run.tokenizer.vocab_size]
    shown = rest = np.arange(len(vectors_VD))
    if len(rest) > LABELS:  # the tokens of the texts, and the most frequent ones of the corpus
        own = np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in texts.values()]))
        if examples is not None:
            rest = np.argsort(-np.bincount(examples.windows_NT.ravel(), minlength=len(rest)), kind="stable")
        shown = np.concatenate([own, rest[~np.isin(rest, own)]])[: max(LABELS, len(own))]
    vectors_ND = vectors_VD[shown]
    xy_N2, share = project_to_plane(vectors_ND)
    unit_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-30)
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    near_NK = np.argsort(-cosine_NN, axis=1, kind="stable")[:, : min(NEIGHBOURS, len(shown) - 1)]
    return {
        "ids": arrays.put_tokens(shown),
        "xy": arrays.put(xy_N2.astype(np.float32)),
        "share": round_numbers(share, 3),
        "near": arrays.put(near_NK.astype(np.int32)),
        "cosine": arrays.put(np.take_along_axis(cosine_NN, near_NK, axis=1).astype(np.float32)),
        "of": len(vectors_VD),
    }
