"""The X-ray page: the data that `xray.js` draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.tools.html_page import Arrays, render_html, round_numbers
from jaxgpt.tools.xray.activations import Activations, Guess, Norm

UNITS = 8  # most active units that are listed of each token
NUMBERS = 8  # of a token's vector that are shown on their way through a norm
LABELS = 400  # tokens on the map of embeddings, at most
NAMED = 200  # most likely next tokens that are named
NEIGHBOURS = 5


class AttentionMap(NamedTuple):
    """The weights of one layer's attention."""

    name: str
    queries: str  # "text" or "source": which of them the rows are tokens of
    keys: str
    weights_NTS: np.ndarray


class TopExamples(NamedTuple):
    """The result of `top_activating_examples`, and the windows in which they were looked for."""

    windows_NT: np.ndarray  # token ids
    values: list[np.ndarray]
    positions: list[np.ndarray]


class Subject(NamedTuple):
    """What an X-ray page shows."""

    title: str
    facts: list[tuple[str, str]]
    texts: dict[str, list[int]]  # token ids by name; "text" is the one that the model writes on
    spell: Callable[[int], str]  # a token as it is shown
    activations: Activations
    maps: list[AttentionMap]
    activation: str
    embedding_VD: np.ndarray
    examples: TopExamples | None
    why_no_corpus: str  # if examples is None
    temperature: float


def render_page(subject: Subject) -> str:
    """Return one self-contained HTML file."""
    arrays, words = Arrays(), Vocabulary(subject.spell)
    activations = subject.activations
    data: dict[str, Any] = {
        "title": subject.title,
        "facts": subject.facts,
        "texts": {name: arrays.put(words.ids(ids)) for name, ids in subject.texts.items()},
        "bits": round_numbers([None, *(activations.guess.logprob_T[:-1] / -math.log(2)).tolist()]),
        "guess": _guess(activations.guess, arrays, words),
        "lens": [_guess(guess, arrays, words) for guess in activations.lens],
        "attention": [_map(m, arrays) for m in subject.maps],
        "start": round_numbers(activations.start_T),
        "branches": [
            {"name": b.name, "added": round_numbers(b.added_T), "stream": round_numbers(b.stream_T)}
            for b in activations.branches
        ],
        "norms": [_norm(norm) for norm in activations.norms],
        "mlp": [
            _units(i, hidden_TF, subject.activation, subject.examples, arrays)
            for i, hidden_TF in enumerate(activations.hidden_LTF)
        ],
        "corpus": None
        if subject.examples is None
        else {
            "ids": arrays.put(words.ids(subject.examples.windows_NT.ravel())),
            "window": subject.examples.windows_NT.shape[1],
        },
        "why_no_corpus": subject.why_no_corpus,
        "embedding": _embedding(subject, arrays, words),
        "sampling": _last(activations.logits_V, arrays, words) | {"temperature": subject.temperature},
    }
    data["words"] = words.spelt
    return render_html("xray/xray", subject.title, data, arrays)


class Vocabulary:
    """The tokens that a page names, each once."""

    def __init__(self, spell: Callable[[int], str]):
        self._spell = spell
        self._indices: dict[int, int] = {}  # by token id, in the order of `spelt`

    @property
    def spelt(self) -> list[str]:
        return [self._spell(token) for token in self._indices]

    def ids(self, tokens: Any) -> np.ndarray:
        """Return token ids as indices into `spelt`."""
        tokens = np.asarray(tokens)
        known, inverse = np.unique(tokens, return_inverse=True)
        indices = [self._indices.setdefault(int(token), len(self._indices)) for token in known]
        return np.array(indices, np.int32)[inverse].reshape(tokens.shape)


def attention_shares(weights_NTS: np.ndarray) -> list[list[float] | None]:
    """Return the share of each head's attention on the previous token, on the first, and on the token itself.

    They are means over queries from the third token on, since the second's previous token is the first; None: no such.
    """
    N, T, _ = weights_NTS.shape
    if T < 3:
        return [None] * N
    t = np.arange(2, T)
    each = (weights_NTS[:, t, t - 1], weights_NTS[:, t, 0], weights_NTS[:, t, t])
    return np.stack([x.mean(axis=1) for x in each], axis=1).tolist()


def project_to_plane(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the two principal components of vectors, xy_N2 in [-1, 1]; their shares of the variance)."""
    vectors_ND = vectors_ND / max(np.abs(vectors_ND).max(), 1e-30)  # float32 can hold the squares
    centred_ND = vectors_ND - vectors_ND.mean(axis=0)
    variance_D, axes_DD = np.linalg.eigh(centred_ND.T @ centred_ND)
    xy_N2 = centred_ND @ axes_DD[:, [-1, -2]] if vectors_ND.shape[1] > 1 else np.repeat(centred_ND, 2, axis=1)
    share = variance_D[::-1][:2] / max(variance_D.sum(), 1e-30)
    return xy_N2 / max(np.abs(xy_N2).max(), 1e-30), share


def _guess(guess: Guess, arrays: Arrays, words: Vocabulary) -> dict[str, Any]:
    came_T = np.exp(guess.logprob_T)
    return {
        "ids": arrays.put(words.ids(guess.tokens_TK)),
        "p": arrays.put(np.asarray(guess.probabilities_TK, np.float32)),
        "came": round_numbers(came_T),
    }


def _map(m: AttentionMap, arrays: Arrays) -> dict[str, Any]:
    same = m.queries == m.keys
    return {
        "name": m.name,
        "queries": m.queries,
        "keys": m.keys,
        # Square roots, which the page shades, in 256 levels: most weights are small.
        "roots": arrays.put(np.round(255 * np.sqrt(np.clip(m.weights_NTS, 0, 1))).astype(np.uint8)),
        "shares": round_numbers(attention_shares(m.weights_NTS), 3) if same and m.weights_NTS.shape[1] > 2 else None,
    }


def _norm(norm: Norm) -> dict[str, Any]:
    def moments(x_TD: np.ndarray) -> dict[str, Any]:
        return {"mean": round_numbers(x_TD.mean(axis=1)), "variance": round_numbers(x_TD.var(axis=1))}

    def spread(x_D: np.ndarray | None) -> Any:
        return None if x_D is None else round_numbers([x_D.mean(), x_D.min(), x_D.max()])

    bias_D = None if norm.bias_D is None else round_numbers(norm.bias_D[:NUMBERS])
    return {
        "name": norm.name,
        "eps": norm.eps,
        "centred": norm.centred,
        "before": moments(norm.before_TD),
        "after": moments(norm.after_TD),
        "scale": round_numbers(norm.scale_D[:NUMBERS]),
        "bias": bias_D,
        "scales": spread(norm.scale_D),
        "biases": spread(norm.bias_D),
        "x": round_numbers(norm.before_TD[:, :NUMBERS]),
    }


def _units(
    layer: int, hidden_TF: np.ndarray, activation: str, examples: TopExamples | None, arrays: Arrays
) -> dict[str, Any]:
    order_TK = np.argsort(-hidden_TF, axis=1, kind="stable")[:, :UNITS]
    peak_F = np.maximum(hidden_TF.max(axis=0), 0.0)
    # In sixteen levels of each unit's own peak: enough for colours, and it compresses well.
    levels_TF = np.round(15 * np.clip(hidden_TF, 0, None) / np.where(peak_F, peak_F, 1)).astype(np.uint8)
    zero_TF = hidden_TF == 0
    return {
        "units": hidden_TF.shape[1],
        "top": arrays.put(order_TK.astype(np.int32)),
        "values": arrays.put(np.take_along_axis(hidden_TF, order_TK, axis=1).astype(np.float32)),
        "levels": arrays.put(levels_TF.T),
        "peaks": arrays.put(peak_F.astype(np.float32)),
        # ReLU and its square alone give exact zeros.
        "zeros": round_numbers(zero_TF.mean(axis=1)) if activation.startswith("relu") else None,
        "silent": int(zero_TF.all(axis=0).sum()),
        "places": None if examples is None else arrays.put(examples.positions[layer].astype(np.int32)),
        "excited": None if examples is None else arrays.put(_zero_non_finite(examples.values[layer])),
    }


def _zero_non_finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, 0).astype(np.float32)


def _embedding(subject: Subject, arrays: Arrays, words: Vocabulary) -> dict[str, Any]:
    vectors_VD = np.asarray(subject.embedding_VD, np.float32)
    shown = _most_used(subject, len(vectors_VD))
    vectors_ND = vectors_VD[shown]
    xy_N2, share = project_to_plane(vectors_ND)
    unit_ND = vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-30)
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    near_NK = np.argsort(-cosine_NN, axis=1, kind="stable")[:, : min(NEIGHBOURS, len(shown) - 1)]
    return {
        "ids": arrays.put(words.ids(shown)),
        "xy": arrays.put(xy_N2.astype(np.float32)),
        "share": round_numbers(share, 3),
        "near": arrays.put(near_NK.astype(np.int32)),
        "cosine": arrays.put(np.take_along_axis(cosine_NN, near_NK, axis=1).astype(np.float32)),
        "of": len(vectors_VD),
    }


def _most_used(subject: Subject, V: int) -> np.ndarray:
    """Return the tokens to show: all, or those of the texts and the most frequent of the corpus."""
    if V <= LABELS:
        return np.arange(V)
    texts: list[Sequence[int]] = list(subject.texts.values())
    own = np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in texts]))
    rest = np.arange(V)
    if subject.examples is not None:
        rest = np.argsort(-np.bincount(subject.examples.windows_NT.ravel(), minlength=V), kind="stable")
    return np.concatenate([own, rest[~np.isin(rest, own)]])[: max(LABELS, len(own))]


def _last(logits_V: np.ndarray, arrays: Arrays, words: Vocabulary) -> dict[str, Any]:
    """Return the logits at the last position, sorted: no temperature changes their order."""
    order_V = np.argsort(-logits_V, kind="stable")
    return {
        "ids": arrays.put(words.ids(order_V[:NAMED])),
        "logits": arrays.put(logits_V[order_V].astype(np.float32)),
    }
