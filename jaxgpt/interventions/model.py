"""Edit the activations of a GPT, and run it: the edits are arrays among its parameters.

An edit makes keep * x + add of an activation x. Zeroing, replacing by a mean or by another text's activations (patching),
scaling and adding a direction (steering) are all of this form. Different edits are thus different arrays for one program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.tree_util import Partial
from numpy.typing import ArrayLike

from jaxgpt.config.validate import short_repr
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block
from jaxgpt.layers.mlp import MLP
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.sample.programs import check_ids
from jaxgpt.sample.quantize import multiply_by_decode_matrix, unstack_layers
from jaxgpt.train import Params

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


@dataclasses.dataclass(frozen=True)
class Edit:
    """`x = keep * x + add` at one place. Make it by `zero`, `replace`, `scale` or `add`."""

    place: str  # one of PLACES
    layer: int | None = None  # number of the layer, from 0. None means the embedding, which has none
    index: Indices = None  # heads, units or elements of the vector, from 0. None means all
    positions: Indices = None  # positions of tokens, in generated text too. None means all
    keep: float = 1.0  # factor of x
    add: ArrayLike = 0.0  # what is added to x, broadcast to [positions, selected, ...]
    __repr__ = short_repr


def zero(place: str, layer: int | None = None, *, index: Indices = None, positions: Indices = None) -> Edit:
    """Set activations to zero."""
    return Edit(place, layer, index, positions, keep=0.0)


def replace(
    place: str, layer: int | None = None, *, by: ArrayLike, index: Indices = None, positions: Indices = None
) -> Edit:
    """Replace activations by their mean over a corpus, or by another text's activations (activation patching).

    by: broadcast to [selected, ...], e.g. [H] or [N, H] for heads. With an axis for positions in front, it is for the
    positions 0, 1, 2 ..., or for `positions`.
    """
    return Edit(place, layer, index, positions, keep=0.0, add=by)


def scale(place: str, layer: int | None = None, *, by: float, index: Indices = None, positions: Indices = None) -> Edit:
    """Multiply activations."""
    return Edit(place, layer, index, positions, keep=by)


def add(
    place: str, layer: int | None = None, *, vector: ArrayLike, index: Indices = None, positions: Indices = None
) -> Edit:
    """Add a direction to activations (steering: Turner et al. 2023, arXiv:2308.10248). vector: as `by` of `replace`."""
    return Edit(place, layer, index, positions, add=vector)


@functools.cache
def place_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of the activations of one token at each place, by name. A pattern has [N, 1] for any keys.

    A configuration of a user's own has the places that its modules pass through.
    """
    names = (EMBEDDING, *(f"h_{i}/{place}" for place in PLACES[1:] for i in range(config.n_layer)))
    model = EditedGPT(dataclasses.replace(config, remat="none", scan_layers=False), read=names)
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    found: Any = jax.eval_shape(lambda token: model.init(jax.random.key(0), token)[ACTIVATIONS], token)
    return {name: found[name].shape[2:] for name in names if name in found}


def check_place(config: GPTConfig, name: str) -> None:
    """Raise `UserError` for the name of a place that the model does not have."""
    known = place_shapes(config)
    if name not in known:
        places = dict.fromkeys(known_name.rpartition("/")[2] for known_name in known)
        raise UserError(f"{name!r}: give h_0/PLACE, to h_{config.n_layer - 1}, with one of {', '.join(places)}")


def edit_arrays(config: GPTConfig, *sets: Sequence[Edit]) -> EditArrays:
    """Return the factors and terms of sets of edits, stacked. The edits of a set are applied in their order.

    The axis after the axis of the sets is the position. The last of its P + 1 rows is for position P and all later ones.
    Raises `UserError` for what the model does not have.
    """
    sizes, checked = {}, []
    numbered = [(number, edit) for number, edits in enumerate(sets) for edit in edits]
    for number, edit in numbered:
        term = np.asarray(edit.add, np.float32)
        name = edit.place if edit.layer is None else f"h_{edit.layer}/{edit.place}"
        check_place(config, name)
        if not np.isfinite(edit.keep) or not np.isfinite(term).all():
            raise UserError(f"{name}: give finite numbers")
        shape = place_shapes(config)[name]
        if edit.place == "pattern" and term.ndim > 1:
            shape = (shape[0], term.shape[-1])
        index = _integers(edit.index, shape[0], f"{name}, index")
        positions = _integers(edit.positions, config.block_size, f"{name}, positions")
        if positions is None and term.ndim > len(shape):
            positions = np.arange(len(term))
        rows = 1 if positions is None else positions.max() + 2
        sizes[name] = np.maximum(sizes.get(name, 0), (rows, *shape))
        checked.append((number, edit, name, term, positions, np.arange(shape[0]) if index is None else index))
    found = {}
    for name, size in sizes.items():
        shape = (len(sets), *size)
        found[name] = {"keep": np.ones(shape, np.float32), "add": np.zeros(shape, np.float32)}
    for number, edit, name, term, positions, index in checked:
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


def _integers(values: Any, below: int, what: str) -> np.ndarray | None:
    if values is None:
        return None
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= below:
        raise UserError(f"{what}={values!r}: needs integers from 0 to {below - 1}")
    return array


EDITS, ACTIVATIONS = "edits", "activations"  # a part of the parameters, and the collection of what is read
AT_ONCE = 16  # sets of edits in one batch

# The places of what is called: a block's `attn` and `mlp`, whatever they are, and (module, method).
BRANCHES = {("attn",): "attention", ("mlp",): "mlp"}
RESULTS = {
    (GPT, "embed"): EMBEDDING,
    (MLP, "units"): "units",
    (Block, "middle"): "middle",
    (Block, "__call__"): "stream",
}


def edit(model: GPT, params: Params, edits: Sequence[Edit]) -> tuple[EditedGPT, Params]:
    """Return the model under edits, with its parameters: it is trained, sampled and scored as any other.

    They replace earlier edits of the model. Raises `UserError` for a place, index, position or shape that it does not have.
    """
    model, params = unroll(model, params)
    return model, params | {EDITS: jax.tree.map(lambda x: jnp.asarray(x[0]), edit_arrays(model.config, edits))}


def unroll(model: GPT, params: Params) -> tuple[EditedGPT, Params]:
    """Return the model as an `EditedGPT`, with its edits, and without scan and remat, in which nothing can be edited."""
    if type(model) not in (GPT, EditedGPT):
        raise UserError(f"{type(model).__name__}: activations are read and edited in a GPT only")
    model, params = unstack_layers(model, params)
    return EditedGPT(dataclasses.replace(model.config, remat="none"), model.dtype, model.attention_fn), params


def stream_names(model: GPT) -> list[str]:
    """Return the names of the residual streams, from the embedding to the last block's."""
    return [EMBEDDING, *(f"h_{layer}/stream" for layer in range(model.config.n_layer))]


class EditedGPT(GPT):
    """A GPT that applies the edits among its parameters, and keeps the activations named in `read`."""

    read: tuple[str, ...] = ()  # names of places, kept in the collection "activations"

    def hidden_states(
        self, tokens_BT: jax.Array, *, positions_BT: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """Return the edited model's hidden states. Arguments: see `GPT.hidden_states`."""
        patterns = [name for name in self.edit_arrays() if name.endswith("/pattern")]
        if positions_BT is not None and patterns:  # keys and values of earlier tokens are in a cache
            raise UserError(f"{patterns[0]}: a pattern cannot be edited while text is generated; edit heads or values")
        with nn.intercept_methods(multiply_by_decode_matrix), nn.intercept_methods(self.editor()):
            return super().hidden_states(tokens_BT, positions_BT=positions_BT, **options)

    def unembed(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits_BTV of hidden states."""
        with nn.intercept_methods(multiply_by_decode_matrix):
            return super().unembed(x_BTD)

    def wrap_block(self, run_block: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Return the function as it is, since each block has edits of its own."""
        return run_block

    def predict(self, x_BTD: jax.Array) -> jax.Array:
        """Return logits_BTV of a residual stream, the last block's or another: the logit lens."""
        return self.unembed(self.norm_output(x_BTD))

    def run_block(self, layer: int, x_BTD: jax.Array) -> jax.Array:
        """Return the stream after a block, under the edits of that block."""
        with nn.intercept_methods(multiply_by_decode_matrix), nn.intercept_methods(self.editor()):
            return self.h[layer](x_BTD, jnp.arange(x_BTD.shape[1])[None])

    def edit_arrays(self) -> EditArrays:
        """Return the edits among the parameters."""
        return self.get_variable("params", EDITS) or {}

    @nn.nowrap
    def editor(self) -> Callable:
        """Return the interceptor of linen's methods that applies the edits."""
        arrays = self.edit_arrays()
        positions_BT: Any = None  # the tokens' positions, from the last module that was given them
        wanted = {*arrays, *self.read}

        def has_pattern(module: Any) -> bool:
            return type(module).attend is Attention.attend and module.attention_fn == self.attention_fn

        def touch(name: str, x: Any) -> jax.Array:
            if (edits := arrays.get(name)) is not None:
                keep, added = (edits[part][jnp.minimum(positions_BT, len(edits[part]) - 1)] for part in ("keep", "add"))
                x = (keep * x.astype(jnp.float32) + added).astype(x.dtype)
            if name in self.read:
                self.sow(ACTIVATIONS, name, x, reduce_fn=lambda _, new: new, init_fn=lambda: None)
            return x

        def intercept(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
            nonlocal positions_BT
            module, method = context.module, context.method_name
            if (isinstance(module, GPT) and method == "embed") or (isinstance(module, Block) and method == "__call__"):
                positions_BT = args[1]
            layer = f"{module.path[0]}/" if module.path else ""
            if method == "attend" and has_pattern(module) and f"{layer}pattern" in wanted:
                q_BTNH, k_BSKH, v_BSKH = args
                kwargs.pop("positions_BT", None)
                weights_BTNS = touch(f"{layer}pattern", module.weights(q_BTNH, k_BSKH, **kwargs))
                v_BSNH = jnp.repeat(v_BSKH, q_BTNH.shape[2] // v_BSKH.shape[2], axis=2)
                return jnp.einsum("btns,bsnh->btnh", weights_BTNS.astype(v_BSNH.dtype), v_BSNH)
            if isinstance(module, Attention) and method == "merge_heads":
                args = (touch(f"{layer}heads", args[0]), *args[1:])
            out = call(*args, **kwargs)
            if isinstance(module, Attention) and method == "project":
                q_BTNH, k_BSKH, v_BSKH = out
                return touch(f"{layer}queries", q_BTNH), touch(f"{layer}keys", k_BSKH), touch(f"{layer}values", v_BSKH)
            if method == "__call__" and module.path[1:] in BRANCHES:
                out = touch(layer + BRANCHES[module.path[1:]], out)
            for (kind, of), place in RESULTS.items():
                if isinstance(module, kind) and method == of:
                    out = touch(layer + place, out)
            return out

        return intercept


class Forward(NamedTuple):
    """What one forward pass returns: logits, and the activations that were to be read."""

    logits_BTV: jax.Array  # float32: the logits of each next token
    activations: dict[str, jax.Array]  # what was read, by name, such as "h_0/heads": [B, T, ...]
    __repr__ = short_repr


def run(model: GPT, params: Params, tokens_BT: Any, edits: Sequence[Edit] = (), *, read: Sequence[str] = ()) -> Forward:
    """Return logits and activations of a model under edits. Raises `UserError` for what the model does not have.

    Args:
        model, params: a GPT and its parameters, which no edit changes.
        tokens_BT: token ids, at most block_size per row.
        edits: applied in their order.
        read: names of the activations to return, after the edits: "embedding", "h_0/heads" ... (see `PLACES`).
    """
    model, params = unroll(model, params)
    for name in read:
        check_place(model.config, name)
    tokens_BT = check_tokens(model, tokens_BT)
    arrays = jax.tree.map(lambda x: x[0], edit_arrays(model.config, edits))
    return forward(model.clone(read=tuple(read)), params | {EDITS: arrays}, tokens_BT)


@functools.partial(jax.jit, static_argnums=0)
def forward(model: EditedGPT, params: Params, tokens_BT: jax.Array) -> Forward:
    """Return logits and what the model reads, under the edits among its parameters."""
    result: Any = model.apply({"params": params}, tokens_BT, mutable=[ACTIVATIONS])
    return Forward(result[0], dict(result[1].get(ACTIVATIONS, {})))


def run_each(
    model: GPT,
    params: Params,
    tokens_BT: Any,
    edits: Sequence[Sequence[Edit]],
    summarize: Callable[[jax.Array], Any],
    *,
    at_once: int = AT_ONCE,
) -> Any:
    """Return `summarize(logits_BTV)` for each set of edits, stacked: one program, `at_once` sets in a batch.

    Activations that come before all edits are computed once. Give the same function `summarize` again to use the
    compiled program again. A `jax.tree_util.Partial` may have other arrays.
    """
    if not any(edits):
        raise UserError(f"edits={list(edits)}: needs at least one set of edits that is not empty")
    model, params = unroll(model, params)
    tokens_BT, stacked = check_tokens(model, tokens_BT), edit_arrays(model.config, *edits)
    summary = summarize if isinstance(summarize, Partial) else Partial(summarize)
    return _run_each(model, params, tokens_BT, stacked, summary, min(at_once, len(edits)))


def token_losses(logits_BTV: jax.Array, tokens_BT: Any) -> jax.Array:
    """Return the loss of each next token, [B, T - 1] in nats."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(logprobs_BTV, jnp.asarray(tokens_BT)[:, 1:, None], axis=-1)[..., 0]


def check_tokens(model: GPT, tokens_BT: Any) -> jax.Array:
    """Return token ids as int32. Raises `UserError` for what the model cannot read."""
    tokens_BT = np.asarray(tokens_BT)
    if tokens_BT.ndim != 2 or not tokens_BT.size:
        raise UserError(f"tokens of shape {list(tokens_BT.shape)}: give [B, T]")
    tokens = jnp.asarray(check_ids(model, tokens_BT.ravel(), "tokens_BT").reshape(tokens_BT.shape))
    model.check_length(tokens)
    return tokens


@functools.partial(jax.jit, static_argnums=(0, 5))
def _run_each(
    model: EditedGPT, params: Params, tokens_BT: jax.Array, stacked: EditArrays, summarize: Partial, at_once: int
) -> Any:
    def one(arrays: EditArrays) -> Any:
        return summarize(model.apply({"params": params | {EDITS: arrays}}, tokens_BT))

    return jax.lax.map(one, stacked, batch_size=at_once)
