"""Which of our parameters is which of their tensors: rules that are applied in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

# How the elements lie. same: alike. transposed: [out, in] there, [in, out] here. columns: q, k and v side by side along
# the last axis, as GPT-2's Conv1D has them. heads: q, k and v of the first head, then of the second, ..., as GPT-NeoX.
Layout = Literal["same", "transposed", "columns", "heads"]


class WeightRule(NamedTuple):
    """One of their tensors, and the one or several parameters of ours that it holds. "{}" is the layer's number."""

    ours: tuple[str, ...]  # "h_{}/attn/q/kernel"
    theirs: str  # "model.layers.{}.self_attn.q_proj.weight"
    layout: Layout = "same"


def linear(ours: str, theirs: str) -> list[WeightRule]:
    return [
        WeightRule((f"{ours}/kernel",), f"{theirs}.weight", "transposed"),
        WeightRule((f"{ours}/bias",), f"{theirs}.bias"),
    ]


def conv1d(ours: str, theirs: str) -> list[WeightRule]:
    return [WeightRule((f"{ours}/kernel",), f"{theirs}.weight"), WeightRule((f"{ours}/bias",), f"{theirs}.bias")]


def qkv(theirs: str, layout: Layout) -> list[WeightRule]:
    """Return the rules of queries, keys and values in one tensor."""
    parts = {"kernel": "weight", "bias": "bias"}
    return [WeightRule(tuple(f"h_{{}}/attn/{x}/{p}" for x in "qkv"), f"{theirs}.{t}", layout) for p, t in parts.items()]


def norm(ours: str, theirs: str) -> list[WeightRule]:
    return [WeightRule((f"{ours}/scale",), f"{theirs}.weight"), WeightRule((f"{ours}/bias",), f"{theirs}.bias")]


# Names of the norms of a layer, ours -> those of families with Llama's names.
PRE = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
OUTPUT = {"ln_1": "post_attention_layernorm", "ln_2": "post_feedforward_layernorm"}
SANDWICH = {
    "ln_1": "input_layernorm",
    "ln_1_out": "post_attention_layernorm",
    "ln_2": "pre_feedforward_layernorm",
    "ln_2_out": "post_feedforward_layernorm",
}


def llama_weights(norms: dict[str, str]) -> tuple[WeightRule, ...]:
    """Return the rules of Llama's tensors, and those of all families that took its names. norms: of a layer."""
    layer = "model.layers.{}"
    rules = [
        WeightRule(("wte/embedding",), "model.embed_tokens.weight"),
        WeightRule(("lm_head",), "lm_head.weight", "transposed"),
        *norm("ln_f", "model.norm"),
    ]
    for ours, name in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "c_proj": "o_proj"}.items():
        rules += linear(f"h_{{}}/attn/{ours}", f"{layer}.self_attn.{name}")
    for name in ("q_norm", "k_norm"):
        rules += norm(f"h_{{}}/attn/{name}", f"{layer}.self_attn.{name}")
    for ours, name in {"c_gate": "gate_proj", "c_fc": "up_proj", "c_proj": "down_proj"}.items():
        rules += linear(f"h_{{}}/mlp/{ours}", f"{layer}.mlp.{name}")
    for ours, name in norms.items():
        rules += norm(f"h_{{}}/{ours}", f"{layer}.{name}")
    return tuple(rules)


def split(theirs: np.ndarray, layout: Layout, head_size: int) -> list[np.ndarray]:
    """Return our arrays of their tensor; views where possible."""
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
    """Return their tensor of our arrays: the inverse of `split`."""
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
    """Return the shape of their tensor, from the shapes of ours."""
    first = ours[0]
    if layout == "transposed":
        return first[::-1]
    if layout == "columns":
        return (*first[:-1], sum(shape[-1] for shape in ours))
    if layout == "heads":
        return (sum(shape[-1] for shape in ours), *first[:-1])
    return first
