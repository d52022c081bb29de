"""Cache what decoding needs of earlier tokens: a value that it takes and returns, mostly keys and values.

Each row of the batch is a ring of S columns: the token at position p lies in column p % S, whatever the other rows hold.
Only a query's position decides what it attends to, so that columns without a token of this sequence need neither zeros
nor a mask of their own.

A module of a user's own that mixes tokens may have a cache of its own, by two methods, which `__call__` must agree with::

    init_cache(batch, columns, dtype) -> a tree of zeros with the leading axis `batch`, from the module's fields only
    decode(x_BTD, positions_BT, cache, *, valid_BT) -> (x_BTD, cache)

They read the next T tokens of each row. valid_BT is False for padding behind a prompt, which must not change a state. A
row at position 0 begins another sequence. Without them, the context is computed again for each token.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config.validate import short_repr
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.kernels.plain import cap_scores
from jaxgpt.layers.linear import to_int8
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import apply_model, unstack_layers

LOG = logging.getLogger(__name__)
# For `can_cache`: rounding differs between the two, a wrong module by more than a tenth.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
LOWEST = jnp.finfo(jnp.float32).min


class LayerCache(flax.struct.PyTreeNode):
    """One layer's keys and values, normed and rotated."""

    k_BKSH: jax.Array  # keys
    v_BKSH: jax.Array  # values
    # int8 caches have one scale per token and head (`quantize.to_int8`). None means the values themselves
    k_scale_BKS: jax.Array | None = None
    v_scale_BKS: jax.Array | None = None
    __repr__ = short_repr

    @property
    def columns(self) -> int:
        """Number of columns, S."""
        return self.k_BKSH.shape[2]

    def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> LayerCache:
        """Return the cache with T new tokens in their columns."""
        new = LayerCache(k_BTKH, v_BTKH)
        if self.k_scale_BKS is not None:
            (k8_BTKH, k_scale_BTK), (v8_BTKH, v_scale_BTK) = to_int8(k_BTKH), to_int8(v_BTKH)
            new = LayerCache(k8_BTKH, v8_BTKH, k_scale_BTK, v_scale_BTK)
        columns_BT = positions_BT % self.columns
        return jax.tree.map(functools.partial(_put, columns_BT=columns_BT), self, new)

    def attend(
        self,
        q_BTNH: jax.Array,
        positions_BT: jax.Array,
        *,
        window: int,
        block: int,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """Compute `plain_attention` over the tokens up to each query's position: out_BTNH.

        Columns are read in blocks with a running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). The
        time thus grows with the tokens in the cache, not with its size, and the bits depend on neither.

        Args:
            q_BTNH: queries.
            positions_BT: their positions, int32, consecutive in each row.
            window: tokens that each query attends to, itself included, at most S.
            block: columns that are read at a time. It divides S.
            scale: factor of the scores. None means 1 / sqrt(H).
            softcap: see `GPTConfig`. None means none.
        """
        B, T, N, H = q_BTNH.shape
        K, S = self.k_BKSH.shape[1:3]
        G = N // K
        # Heads have their own axis: folded into the batch, as in `plain_attention`, a step of GPT-2 at 8 rows takes
        # 86 ms instead of 52.
        q_BKQH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
        scale = H**-0.5 if scale is None else scale
        in_float32 = {"preferred_element_type": jnp.float32}

        def read(number: jax.Array, sums: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            first = number * block
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, block, axis=2), self)
            # int8 keys and values have one scale per token: it is applied to the scores and to the weights.
            k_BKSH = part.k_BKSH if part.k_scale_BKS is None else part.k_BKSH.astype(q_BKQH.dtype)
            scores = jnp.einsum("bkqH,bksH->bkqs", q_BKQH.astype(k_BKSH.dtype), k_BKSH, **in_float32)
            scores = scores if part.k_scale_BKS is None else scores * part.k_scale_BKS[:, :, None]
            scores = cap_scores(scores * scale, softcap)
            columns_11S = (first + jnp.arange(block))[None, None]
            behind_BTS = (positions_BT[:, :, None] - columns_11S) % S
            visible_BTS = (behind_BTS < window) & (behind_BTS <= positions_BT[:, :, None])
            visible = jnp.tile(visible_BTS[:, None], (1, 1, G, 1))
            largest, total, out = sums
            new_largest = jnp.maximum(largest, jnp.where(visible, scores, LOWEST).max(axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0.0)
            shrink = jnp.exp(largest - new_largest)
            total, v_BKSH = total * shrink + weights.sum(axis=-1), part.v_BKSH
            if part.v_scale_BKS is not None:
                v_BKSH, weights = v_BKSH.astype(jnp.float32), weights * part.v_scale_BKS[:, :, None]
            values = jnp.einsum("bkqs,bksH->bkqH", weights.astype(v_BKSH.dtype), v_BKSH, **in_float32)
            return new_largest, total, out * shrink[..., None] + values

        sums = jnp.full(q_BKQH.shape[:-1], LOWEST), jnp.zeros(q_BKQH.shape[:-1]), jnp.zeros(q_BKQH.shape)
        if block == S:
            _, total, out = read(jnp.int32(0), sums)
        else:
            used = jnp.minimum(positions_BT.max() + 1, S)
            _, total, out = jax.lax.fori_loop(0, -(-used // block), read, sums)
        out = out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]  # a query that sees nothing gets zeros
        return out.reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


class KVCache(flax.struct.PyTreeNode):
    """Keys and values of all layers, or what `init_cache` returned, in the order in which tokens are mixed."""

    layers: tuple[Any, ...]  # a `LayerCache` for each layer, or what `init_cache` returned
    block: int = flax.struct.field(pytree_node=False)  # columns that attention reads at a time. It divides S
    __repr__ = short_repr

    @property
    def is_columns(self) -> bool:
        """Return whether all that it has are keys and values, in columns: their order in time can be seen and undone."""
        return all(isinstance(layer, LayerCache) for layer in self.layers)

    @staticmethod
    def empty(
        *,
        batch: int,
        columns: int,
        n_layer: int,
        n_kv_head: int,
        head_dim: int,
        dtype: DTypeLike = jnp.float32,
        block: int | None = None,
    ) -> KVCache:
        """Return a cache with room for `columns` tokens in each of `batch` rows.

        dtype: float32, bfloat16, or int8. block: columns that attention reads at a time. None means all at once.
        """
        shape = (batch, n_kv_head, columns, head_dim)

        def layer() -> LayerCache:
            scales = (jnp.zeros(shape[:-1]), jnp.zeros(shape[:-1])) if jnp.dtype(dtype) == jnp.int8 else ()
            return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales)

        return KVCache(layers=tuple(layer() for _ in range(n_layer)), block=columns if block is None else block)

    def decode(
        self, model: GPT, params: dict, tokens_BT: jax.Array, positions_BT: jax.Array, valid_BT: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Return `GPT.hidden_states` x_BTD of the next T tokens of the sequences in the cache, and the updated cache.

        A token attends to itself and the block_size - 1 before it. Positions are consecutive in each row and below
        block_size, except with rope and none, which have no limit. Needs `scan_layers=False` (see
        `quantize.unstack_layers`): slices of stacked parameters would be copied for each token.

        valid_BT: False for padding. None means none is.
        """
        assert not model.config.scan_layers, "unstack the layers first"
        valid_BT = jnp.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
        model = model.clone(config=dataclasses.replace(model.config, remat="none"))  # the cache would stay in a remat
        context, layers = model.config.block_size, []

        def attend_to_cache(call: Callable, args: tuple[Any, ...], kwargs: dict, method: Any) -> Any:
            module = method.module
            if (kind := _mixer(module, method.method_name, model)) is None:
                return call(*args, **kwargs)
            if kind != "attention":
                x_BTD, layer = module.decode(args[0], positions_BT, self.layers[len(layers)], valid_BT=valid_BT)
                layers.append(layer)
                return x_BTD
            q_BTNH, k_BTKH, v_BTKH = args
            # Without a barrier XLA on CPU writes each cache three times, once for each reader, into copies.
            layer = jax.lax.optimization_barrier(self.layers[len(layers)].write(k_BTKH, v_BTKH, positions_BT))
            layers.append(layer)
            window = context if module.window is None else min(module.window, context)
            how = {"window": window, "block": self.block, "scale": module.scale, "softcap": module.softcap}
            return layer.attend(q_BTNH, positions_BT, **how)

        with nn.intercept_methods(attend_to_cache):
            x_BTD = apply_model(model, params, tokens_BT, positions_BT=positions_BT, method="hidden_states")
        assert len(layers) == len(self.layers), "see `find_mixers`"
        return x_BTD, self.replace(layers=tuple(layers))

    def insert(self, row: KVCache, number: jax.Array, columns: jax.Array) -> KVCache:
        """Return the cache with the first `columns` columns of the one row of another in row `number`, or a few more."""
        if not self.is_columns:  # a state, of all tokens
            put_row = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=number, axis=0)
            return self.replace(layers=jax.tree.map(put_row, self.layers, row.layers))

        def copy(block: jax.Array, cache: KVCache) -> KVCache:
            def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
                part = jax.lax.dynamic_slice_in_dim(new, block * self.block, self.block, axis=2)
                at = (number, 0, block * self.block, *(0 for _ in buffer.shape[3:]))
                return jax.lax.dynamic_update_slice(buffer, part, at)

            return cache.replace(layers=jax.tree.map(put, cache.layers, row.layers))

        return jax.lax.fori_loop(0, -(-columns // self.block), copy, self)


class ContextCache(KVCache):
    """The tokens only, for models with modules that cannot be cached: their context is computed again for each token."""

    def decode(
        self, model: GPT, params: dict, tokens_BT: jax.Array, positions_BT: jax.Array, valid_BT: jax.Array | None = None
    ) -> tuple[jax.Array, KVCache]:
        """Return what `KVCache.decode` does, by a forward pass over the whole context."""
        tokens_B1S = _put(self.layers[0], tokens_BT[..., None], columns_BT=positions_BT)
        context_BS = tokens_B1S[:, 0, : model.config.block_size]
        x_BSD = apply_model(model, params, context_BS, method="hidden_states")
        return jnp.take_along_axis(x_BSD, positions_BT[..., None], axis=1), self.replace(layers=(tokens_B1S,))


def _mixer(module: nn.Module, method: str, model: GPT) -> Literal["attention", "own"] | None:
    """Return how the call of a module's method is cached, if it mixes tokens in a way that can be."""
    if method == "__call__" and hasattr(type(module), "decode") and hasattr(type(module), "init_cache"):
        return "own"
    is_ours = isinstance(module, Attention) and module.causal and attends_as_ours(module, model)
    return "attention" if is_ours and method == "attend" else None


def attends_as_ours(module: Attention, model: GPT) -> bool:
    """Return whether `attend` is jaxgpt's, by the model's kernel: not a subclass's, and not by a kernel of its own."""
    return type(module).attend is Attention.attend and module.attention_fn == model.attention_fn


def find_mixers(model: GPT) -> list[tuple[nn.Module | None, tuple[int, ...]]]:
    """Return (a module with a cache of its own or None, the shape [B, T, K, H] of an `Attention`'s keys), in order."""
    found, inside = [], False

    def note(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
        nonlocal inside
        kind = None if inside else _mixer(context.module, context.method_name, model)
        if kind is None:
            return call(*args, **kwargs)
        found.append((context.module.clone(parent=None), ()) if kind == "own" else (None, args[1].shape))
        inside = True  # what it calls is part of it
        out = call(*args, **kwargs)
        inside = False
        return out

    def read(params: dict, tokens_BT: jax.Array) -> Any:
        return model.apply({"params": params}, tokens_BT, method="hidden_states")

    shapes = model.shapes()
    with nn.intercept_methods(note):
        jax.eval_shape(read, shapes, jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return found


def make_cache(model: GPT, *, batch: int, columns: int, dtype: DTypeLike, block: int | None, cached: bool) -> KVCache:
    """Return an empty cache for a model without scanned layers. cached: see `can_cache`."""
    c, shape = model.config, model.config.shape
    if not cached:
        return ContextCache(layers=(jnp.zeros((batch, 1, columns), jnp.int32),), block=columns)
    heads = {"n_layer": c.n_layer, "n_kv_head": shape.n_kv_head, "head_dim": shape.head_dim}
    if not c.is_foreign:
        return KVCache.empty(batch=batch, columns=columns, **heads, dtype=dtype, block=block)
    layers = []
    for module, written in find_mixers(model):
        if module is not None:
            layers.append(module.init_cache(batch, columns, model.dtype))  # type: ignore[not-callable]
            continue
        heads = {"n_layer": 1, "n_kv_head": written[2], "head_dim": written[3]}
        layers += KVCache.empty(batch=batch, columns=columns, **heads, dtype=dtype).layers
    return KVCache(layers=tuple(layers), block=columns if block is None else block)


_COMPARED: dict[GPT, bool] = {}  # what `can_cache` found


def can_cache(model: GPT, params: dict) -> bool:
    """Return whether cached decoding computes what the whole forward pass does. For `GPTConfig` tests have shown it.

    For a model with modules of a user's own both are computed once. Raises `UserError` if a `decode` of theirs differs.
    """
    if not model.config.is_foreign:
        return True
    if model not in _COMPARED:
        name, (plain, params) = type(model.config).__name__, unstack_layers(model, params)
        mixers = find_mixers(plain)
        difference = float(jit_once(functools.partial(_compare, plain))(params)) if mixers else math.inf
        _COMPARED[model] = difference < TOLERANCE[jnp.dtype(model.dtype).name]
        own = sorted({type(module).__name__ for module, _ in mixers if module is not None})
        if not _COMPARED[model] and own:
            raise UserError(
                f"{name}: cached decoding by {', '.join(own)}.decode differs from the whole forward pass by "
                f"{difference:.2g} of its size: repair `decode`, or leave it out, and the context is computed again"
            )
        if not _COMPARED[model]:
            why = "it mixes tokens outside of jaxgpt's Attention, in modules without `decode`"
            LOG.warning("%s: each token computes its context again, since %s", name, why)
    return _COMPARED[model]


def jit_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that is called once: on CPU without optimisations, which would take longer than they save."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


def _compare(model: GPT, params: dict) -> jax.Array:
    """Return the largest difference between cached decoding and the whole pass, relative to the largest value.

    Noise is added to the parameters: projections that are still zero would hide a difference.
    """
    T, V = min(model.config.block_size, 12), model.config.vocab_size or 1
    noise = 0.05 * jax.random.normal(jax.random.key(0), (max(x.size for x in jax.tree.leaves(params)),))

    def add_noise(x: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x + noise[: x.size].reshape(x.shape).astype(x.dtype) if is_float else x

    params = jax.tree.map(add_noise, params)
    tokens_BT = jax.random.randint(jax.random.key(1), (2, T), 0, V)
    whole_BTD = apply_model(model, params, tokens_BT, method="hidden_states")
    cache = make_cache(model, batch=2, columns=T, dtype=model.dtype, block=None, cached=True)
    ends = [0, *range(max(1, T - 2), T + 1)]  # a prompt, then token by token: each is a pass to compile
    parts = []
    for start, end in itertools.pairwise(ends):
        positions_BT = jnp.broadcast_to(jnp.arange(start, end), (2, end - start))
        x_BTD, cache = cache.decode(model, params, tokens_BT[:, start:end], positions_BT)
        parts.append(x_BTD)
    difference = jnp.abs(jnp.concatenate(parts, axis=1).astype(jnp.float32) - whole_BTD.astype(jnp.float32))
    return difference.max() / jnp.abs(whole_BTD.astype(jnp.float32)).max()


def _put(buffer: jax.Array, new: jax.Array, *, columns_BT: jax.Array) -> jax.Array:
    """Return buffer [B, K, S, ...] with `new` [B, T, K, ...] in the given columns."""
    new = new.astype(buffer.dtype)
    if columns_BT.shape == (1, 1):  # one slice, which XLA writes in place
        return jax.lax.dynamic_update_slice_in_dim(buffer, new.swapaxes(1, 2), columns_BT[0, 0], axis=2)
    rows_B1 = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[rows_B1, :, columns_BT].set(new, unique_indices=True)
