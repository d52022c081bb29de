"""Render the X-ray page: prepare the data that `xray.js` draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import GPTConfig
from jaxgpt.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer
from jaxgpt.layers.linear import DECODE_MATRIX
from jaxgpt.parallel.device import count_parameters
from jaxgpt.run import Run
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers
from jaxgpt.tools.xray.activations import Activations, Guess, Norm, TopExamples
from jaxgpt.train import Params

PROGRAMS = ("xray/sections", "xray/xray")  # of the page
UNITS = 8  # most active units that are listed for each position
ELEMENTS = 8  # of a token's vector that are shown before and after a norm
LABELS = 400  # most tokens on the map of embeddings
NAMED = 200  # most probable next tokens whose text the page has
NEIGHBOURS = 5  # nearest tokens that are listed for each token


def render_page(
    run: Run,
    texts: dict[str, list[int]],
    activations: Activations,
    examples: TopExamples | None,
    *,
    why_no_corpus: str,
) -> str:
    """Return one self-contained HTML file.

    Args:
        run: the run.
        texts: token ids by name: "text", which the model continues, and "source", the encoder's input, if there is one.
        activations: those of `texts`.
        examples: the top activating examples of a corpus. None means that no corpus was searched.
        why_no_corpus: the reason if `examples` is None.
    """
    arrays = TokenArrays()
    data: dict[str, Any] = {
        "title": f"X-ray of {run.experiment.name}",
        "facts": describe_run(run),
        "texts": {name: arrays.put_tokens(ids) for name, ids in texts.items()},
        "bits": round_numbers([None, *(activations.guess.logprob_T[:-1] / -math.log(2)).tolist()]),
        "guess": _guess(activations.guess, arrays),
        "lens": [_guess(guess, arrays) for guess in activations.lens],
        "attention": _attention_maps(activations, arrays),
        "start": round_numbers(activations.start_T),
        "branches": [
            {"name": b.name, "added": round_numbers(b.added_T), "stream": round_numbers(b.stream_T)}
            for b in activations.branches
        ],
        "norms": [_norm(norm, run.model.config) for norm in activations.norms],
        "mlp": [
            _units(i, hidden_TF, run.model.config.activation, examples, arrays)
            for i, hidden_TF in enumerate(activations.hidden_LTF)
        ],
        "corpus": None
        if examples is None
        else {"ids": arrays.put_tokens(examples.windows_NT.ravel()), "window": examples.windows_NT.shape[1]},
        "why_no_corpus": why_no_corpus,
        "embedding": map_embedding(run, texts, examples, arrays),
        "sampling": _last(activations.logits_V, arrays) | {"temperature": run.experiment.train.sample_temperature},
    }
    data["words"] = [spell(run.tokenizer, token) for token in arrays.words]
    return render_html(PROGRAMS, data["title"], data, arrays)


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Return the facts at the head of a page: (name, value)."""
    config = run.model.config
    layers = f"{config.n_encoder_layer} + {config.n_layer}" if config.n_encoder_layer else str(config.n_layer)
    return [
        ("run", str(run.directory)),
        ("step", f"{run.step:,}"),
        ("validation loss", "not measured" if run.val_loss is None else f"{run.val_loss:.4f} nats per token"),
        ("parameters", f"{count_parameters(run.model.shapes()):,}"),
        ("layers, heads, width", f"{layers}, {config.n_head}, {config.n_embd}"),
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


def _guess(guess: Guess, arrays: TokenArrays) -> dict[str, Any]:
    return {
        "ids": arrays.put_tokens(guess.tokens_TK),
        "p": arrays.put(np.asarray(guess.probabilities_TK, np.float32)),
        "actual": round_numbers(np.exp(guess.logprob_T)),
    }


def _attention_maps(activations: Activations, arrays: Arrays) -> list[dict[str, Any]]:
    """Return the maps of each decoder layer, self-attention then cross-attention, and those of the encoder."""

    def draw(name: str, queries: str, keys: str, weights_NTS: np.ndarray) -> dict[str, Any]:
        return {
            "name": name,
            "queries": queries,  # name of the text whose tokens are the rows
            "keys": keys,
            # The page shades square roots, in 256 levels, because most weights are small.
            "roots": arrays.put(np.round(255 * np.sqrt(np.clip(weights_NTS, 0, 1))).astype(np.uint8)),
            "shares": round_numbers(attention_shares(weights_NTS), 3) if queries == keys else None,
        }

    maps = []
    for i, weights_NTS in enumerate(activations.weights_LNTS):
        maps.append(draw(f"layer {i + 1}", "text", "text", weights_NTS))
        if activations.cross_LNTS:
            maps.append(draw(f"layer {i + 1}, cross-attention", "text", "source", activations.cross_LNTS[i]))
    encoder = enumerate(activations.encoder_LNSS)
    return maps + [draw(f"encoder, layer {i + 1}", "source", "source", weights_NSS) for i, weights_NSS in encoder]


def _norm(norm: Norm, config: GPTConfig) -> dict[str, Any]:
    def moments(x_TD: np.ndarray) -> dict[str, Any]:
        return {"mean": round_numbers(x_TD.mean(axis=1)), "variance": round_numbers(x_TD.var(axis=1))}

    def spread(x_D: np.ndarray | None) -> Any:
        return None if x_D is None else round_numbers([x_D.mean(), x_D.min(), x_D.max()])

    bias_D = None if norm.bias_D is None else round_numbers(norm.bias_D[:ELEMENTS])
    return {
        "name": norm.name,
        "eps": config.norm_eps,
        "centred": config.norm == "layernorm",  # LayerNorm subtracts the mean
        "before": moments(norm.before_TD),
        "after": moments(norm.after_TD),
        "scale": round_numbers(norm.scale_D[:ELEMENTS]),
        "bias": bias_D,
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
        "examples": None if examples is None else arrays.put(examples.positions[layer].astype(np.int32)),
        "example_values": None
        if examples is None
        else arrays.put(np.nan_to_num(examples.values[layer], nan=0, posinf=0, neginf=0).astype(np.float32)),
    }


def map_embedding(
    run: Run, texts: dict[str, list[int]], examples: TopExamples | None, arrays: TokenArrays
) -> dict[str, Any]:
    """Return the token vectors on a plane, and the nearest tokens of each."""
    vectors_VD = read_embedding(run.params)[: run.tokenizer.vocab_size]
    shown = _most_used(texts, examples, len(vectors_VD))
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


def _most_used(texts: dict[str, list[int]], examples: TopExamples | None, V: int) -> np.ndarray:
    """Return the tokens to show: all, or those of the texts and the most frequent ones of the corpus."""
    if V <= LABELS:
        return np.arange(V)
    own = np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in texts.values()]))
    rest = np.arange(V)
    if examples is not None:
        rest = np.argsort(-np.bincount(examples.windows_NT.ravel(), minlength=V), kind="stable")
    return np.concatenate([own, rest[~np.isin(rest, own)]])[: max(LABELS, len(own))]


def _last(logits_V: np.ndarray, arrays: TokenArrays) -> dict[str, Any]:
    """Return the logits at the last position, sorted; sampling options do not change their order."""
    order_V = np.argsort(-logits_V, kind="stable")
    return {
        "ids": arrays.put_tokens(order_V[:NAMED]),
        "logits": arrays.put(logits_V[order_V].astype(np.float32)),
    }
