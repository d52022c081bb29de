"""Edits of activations: x becomes keep * x + add at a place of the model.

Zeroing, replacing by a mean or by another text's activations (patching), scaling and adding a direction (steering) are
all of this form, so that different edits are different arrays for one program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError

EMBEDDING = "embedding"  # the one place that has no layer
PLACES = (
    EMBEDDING,  # the stream that enters the first block, [D]
    "queries",  # after norm and rope, [N, H]
    "keys",  # after norm and rope, [K, H]
    "values",  # [K, H]
    "pattern",  # the attention weights of a query on S keys, [N, S]
    "heads",  # what each head reads from the values, before the output projection, [N, H]
    "attention",  # the output of the attention module, before a norm of the output, [D]
    "middle",  # the stream between attention and MLP, [D]
    "units",  # the hidden units of the MLP, after the activation, [F]
    "mlp",  # the output of the MLP, before a norm of the output, [D]
    "stream",  # the stream that leaves the block, [D]
)
Indices = int | Sequence[int] | None  # None means all
EditArrays = dict[str, dict[str, np.ndarray]]  # {"h_0/heads": {"keep": [P + 1, N, H], "add": [P + 1, N, H]}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """`x = keep * x + add` at one place. Make it by `zero`, `replace`, `scale` or `add`."""

    place: str  # one of PLACES
    layer: int | None = None  # from 0; None for the embedding
    index: Indices = None  # heads, units or elements of the vector, from 0
    positions: Indices = None  # of tokens, in generated text too
    keep: float = 1.0
    add: ArrayLike = 0.0  # broadcast to [positions, selected, ...]


def zero(place: str, layer: int | None = None, *, index: Indices = None, positions: Indices = None) -> Edit:
    """Set activations to zero."""
    return Edit(place=place, layer=layer, index=index, positions=positions, keep=0.0)


def replace(
    place: str, layer: int | None = None, *, by: ArrayLike, index: Indices = None, positions: Indices = None
) -> Edit:
    """Replace activations: by their mean over a corpus, or by those of another text (activation patching).

    by: broadcast to [selected, ...], e.g. [H] or [N, H] for heads. With an axis for positions in front, it is for the
    positions 0, 1, 2 ..., or for `positions`.
    """
    return Edit(place=place, layer=layer, index=index, positions=positions, keep=0.0, add=by)


def scale(place: str, layer: int | None = None, *, by: float, index: Indices = None, positions: Indices = None) -> Edit:
    """Multiply activations."""
    return Edit(place=place, layer=layer, index=index, positions=positions, keep=by)


def add(
    place: str, layer: int | None = None, *, vector: ArrayLike, index: Indices = None, positions: Indices = None
) -> Edit:
    """Add a direction to activations (steering: Turner et al. 2023, arXiv:2308.10248). vector: as `by` of `replace`."""
    return Edit(place=place, layer=layer, index=index, positions=positions, add=vector)


def place_name(config: GPTConfig, place: str, layer: int | None = None) -> str:
    """Return the name of a place, "embedding" or "h_LAYER/PLACE". Raises `UserError` if the model does not have it."""
    if place not in PLACES:
        raise UserError(f"place={place!r}: needs one of {', '.join(PLACES)}")
    if place == EMBEDDING:
        if layer is not None:
            raise UserError(f"layer={layer}: the embedding has no layer")
        return place
    if isinstance(layer, bool) or not isinstance(layer, int | np.integer) or not 0 <= layer < config.n_layer:
        raise UserError(f"{place}, layer={layer!r}: needs a layer from 0 to {config.n_layer - 1}")
    return f"h_{layer}/{place}"


def place_names(config: GPTConfig) -> list[str]:
    """Return the names of all places, in the order of `PLACES`."""
    return [EMBEDDING, *(f"h_{layer}/{place}" for place in PLACES[1:] for layer in range(config.n_layer))]


def place_shape(config: GPTConfig, place: str) -> tuple[int, ...]:
    """Return the shape of the activations at a place, for one token; of a pattern [N, 1], for any number of keys."""
    c = config.explicit()
    assert c.n_kv_head and c.head_dim and c.mlp_dim
    if place in ("keys", "values"):
        return (c.n_kv_head, c.head_dim)
    if place in ("queries", "heads"):
        return (c.n_head, c.head_dim)
    return {"pattern": (c.n_head, 1), "units": (c.mlp_dim,)}.get(place, (c.n_embd,))


def edit_arrays(config: GPTConfig, *sets: Sequence[Edit]) -> EditArrays:
    """Return the factors and terms of sets of edits, stacked. Those of a set are applied in their order.

    The axis after that of the sets is the position; the last of its P + 1 rows is for position P and all later ones.

    Raises:
        UserError: for a place, layer, index, position or shape that the model does not have.
    """
    checked = [(number, edit, *_check(config, edit)) for number, edits in enumerate(sets) for edit in edits]
    shapes: dict[str, Any] = {}
    for _, _, name, _, positions, _, shape in checked:
        rows = 1 if positions is None else positions.max() + 2
        shapes[name] = np.maximum(shapes.get(name, 0), (rows, *shape))
    found: EditArrays = {
        name: {"keep": np.ones((len(sets), *shape), np.float32), "add": np.zeros((len(sets), *shape), np.float32)}
        for name, shape in shapes.items()
    }
    for number, edit, name, term, positions, index, _ in checked:
        keep, added = found[name]["keep"], found[name]["add"]
        at = np.ix_([number], np.arange(keep.shape[1]) if positions is None else positions, index)
        _, *selected = added[at].shape
        if isinstance(edit.index, int | np.integer) and term.ndim == len(selected) - 1 and positions is not None:
            term = term[:, None]  # [positions, H] of one head
        try:
            added[at] = edit.keep * added[at] + np.broadcast_to(term, selected)
        except ValueError:
            raise UserError(f"{name}: got an array of shape {list(term.shape)}, needs {selected}") from None
        keep[at] *= edit.keep
    return found


def _check(config: GPTConfig, edit: Edit) -> tuple[str, np.ndarray, np.ndarray | None, np.ndarray, tuple[int, ...]]:
    """Return the name of the place, the term, the positions (None means all), the index, and the shape of a token."""
    name, term = place_name(config, edit.place, edit.layer), np.asarray(edit.add, np.float32)
    shape = place_shape(config, edit.place)
    if not np.isfinite(edit.keep) or not np.isfinite(term).all():
        raise UserError(f"{name}: needs finite numbers")
    if edit.place == "pattern" and term.ndim > 1:
        shape = (shape[0], term.shape[-1])
    index = _integers(edit.index, shape[0], f"{name}, index")
    positions = _integers(edit.positions, config.block_size, f"{name}, positions")
    if positions is None and term.ndim > len(shape):
        positions = np.arange(len(term))
    return name, term, positions, np.arange(shape[0]) if index is None else index, shape


def _integers(values: Any, below: int, what: str) -> np.ndarray | None:
    if values is None:
        return None
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= below:
        raise UserError(f"{what}={values!r}: needs integers from 0 to {below - 1}")
    return array
