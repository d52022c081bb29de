"""Which of our parameters is which of their tensors: rows of a table that is read in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

# How the numbers lie. same: alike. transposed: [out, in] there, [in, out] here. columns: q, k and v side by side along
# the last axis, as GPT-2's Conv1D has them. heads: q, k and v of the first head, then of the second, ..., as GPT-NeoX.
Layout = Literal["same", "transposed", "columns", "heads"]


class Row(NamedTuple):
    """One of their tensors, and the one or several parameters of ours that it holds. "{}" is the layer's number."""

    ours: tuple[str, ...]  # "h_{}/attn/q/kernel"
    theirs: str  # "model.layers.{}.self_attn.q_proj.weight"
    layout: Layout = "same"


def linear(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}/kernel",), f"{theirs}.weight", "transposed"), Row((f"{ours}/bias",), f"{theirs}.bias")]


def conv1d(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}/kernel",), f"{theirs}.weight"), Row((f"{ours}/bias",), f"{theirs}.bias")]


def fused(theirs: str, layout: Layout) -> list[Row]:
    """q, k and v in one tensor."""
    parts = {"kernel": "weight", "bias": "bias"}
    return [Row(tuple(f"h_{{}}/attn/{x}/{p}" for x in "qkv"), f"{theirs}.{t}", layout) for p, t in parts.items()]


def norm(ours: str, theirs: str) -> list[Row]:
    return [Row((f"{ours}/scale",), f"{theirs}.weight"), Row((f"{ours}/bias",), f"{theirs}.bias")]


def split(theirs: np.ndarray, layout: Layout, head_size: int) -> list[np.ndarray]:
    """Our arrays from their tensor; views where that can be."""
    if layout == "transposed":
        return [theirs.T]
    if layout == "columns":
        return np.split(theirs, 3, axis=-1)
    if layout == "heads":
        x_N3HD = theirs.reshape(-1, 3, head_size, *theirs.shape[1:])
        parts = [x_N3HD[:, i].reshape(-1, *theirs.shape[1:]) for i in range(3)]
        return [x.T for x in parts] if theirs.ndim == 2 else parts
    return [theirs]


def join(ours: Sequence[np.ndarray], layout: Layout, head_size: int) -> np.ndarray:
    """The inverse of `split`."""
    if layout == "transposed":
        return ours[0].T
    if layout == "columns":
        return np.concatenate(ours, axis=-1)
    if layout == "heads":
        parts = [(x.T if x.ndim == 2 else x) for x in ours]
        parts = [x.reshape(-1, head_size, *x.shape[1:]) for x in parts]
        x_N3HD = np.stack(parts, axis=1)
        return x_N3HD.reshape(-1, *x_N3HD.shape[3:])
    return ours[0]


def their_shape(ours: Sequence[tuple[int, ...]], layout: Layout) -> tuple[int, ...]:
    """Of their tensor, from the shapes of ours."""
    first = ours[0]
    if layout == "transposed":
        return first[::-1]
    if layout == "columns":
        return (*first[:-1], sum(shape[-1] for shape in ours))
    if layout == "heads":
        return (sum(shape[-1] for shape in ours), *first[:-1])
    return first
