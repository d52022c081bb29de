"""The form of parameters that decodes fastest: unstacked layers, one matrix for q, k and v, in 32, 16 or 8 bits."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from jaxgpt.config.validate import check_value
from jaxgpt.errors import UserError
from jaxgpt.layers.attention import Attention
from jaxgpt.layers.kernels.native.build import why_not_native
from jaxgpt.layers.linear import Dense, Embedding, Head, to_int8
from jaxgpt.model import GPT
from jaxgpt.sample import Precision

F = TypeVar("F", bound=Callable[..., Any])
DECODE_MATRIX = "decode_matrix"  # name of a `DecodeMatrix` in the parameters, in place of a kernel or an embedding
QKV = "qkv"  # name of one projection in the parameters of self-attention, in place of q, k and v


def check_model_type(model: Any) -> None:
    """Raise `UserError` unless a model is a `GPT`, for what needs its methods."""
    if not isinstance(model, GPT):
        needed = "a GPT, such as GPTConfig(...).make_model() returns"
        other = "jaxgpt.plain_generate.generate samples from any module tokens_BT -> logits_BTV"
        raise UserError(f"model={type(model).__name__}: needs {needed}; {other}")


def for_decoding(
    model: GPT, params: dict, weights: Precision | None = None, *, donate: bool = False
) -> tuple[GPT, dict]:
    """Return (model, params) in the form that decodes fastest, for `generate` and `score`, not for training.

    `weights` is "float32", "bfloat16", half the memory, or "int8", a quarter, with one scale per output and inputs rounded
    to 8 bits too. None means the model's dtype. Norms, biases and learned positions stay in float32. The result is a
    copy. With `donate` the given `params` are emptied on the way: memory holds one matrix twice, not the whole model.
    """
    check_model_type(model)
    check_value("weights", weights, Precision | None)
    if (table := params.get("wte", {}).get(DECODE_MATRIX)) is not None:
        if weights not in (None, held := table.values_FD.dtype.name):
            raise UserError(f"weights={weights!r}: these are {held} already; start from the trained ones")
        return model, params
    params = params if donate else jax.tree.map(lambda x: x, params)  # dictionaries of its own, which are emptied
    model, params = unstack_layers(model, params, donate=True)
    own = find_own_modules(model) if model.config.is_foreign else None
    return model, _lay_out((), params, weights or jnp.dtype(model.dtype).name, own)


_LAID_OUT: list[tuple] = []  # the last result of `lay_out_once`, and weak references to its arguments


def lay_out_once(model: GPT, params: dict) -> tuple[GPT, dict]:
    """Return `for_decoding(model, params)`, and the same again as long as `params` has the same arrays.

    The result is kept until one of the arrays is freed, or until other parameters are laid out.
    """
    leaves, tree = jax.tree.flatten(params)
    for about, refs, found in _LAID_OUT:
        if about == (model, tree) and all(r() is x and not x.is_deleted() for r, x in zip(refs, leaves, strict=True)):
            return found
    _LAID_OUT.clear()  # before memory has to hold another
    found = for_decoding(model, params)
    if found[1] is not params and all(isinstance(x, jax.Array) for x in leaves):  # NumPy's arrays may change
        refs = [weakref.ref(x, lambda _: _LAID_OUT.clear()) for x in leaves]
        _LAID_OUT.append(((model, tree), refs, found))
    return found


def find_own_modules(model: GPT) -> frozenset[tuple[str, ...]]:
    """Return the paths of jaxgpt's own dense layers, embeddings and heads, and of attention with its own projections."""
    found = set()

    def note(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
        kind, module = type(context.module), context.module
        is_plain = isinstance(module, Attention) and all(
            getattr(kind, name) is getattr(Attention, name) for name in ("__call__", "project", "qkv")
        )
        if is_plain or kind in (Dense, Embedding, Head):
            found.add(module.path)
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))
    return frozenset(found)


def unstack_layers(model: GPT, params: dict, *, donate: bool = False) -> tuple[GPT, dict]:
    """Return the model without `scan_layers`, and its parameters with one tree per layer.

    donate: empty stacked `params`, so that memory holds one stack twice and not all.
    """
    if not model.config.scan_layers:
        return model, params
    stacks, tree = jax.tree.flatten(params["h"]["block"])
    rest = {name: value for name, value in params.items() if name != "h"}
    if donate:
        params.clear()
    slices = [list(stacks.pop(0)) for _ in range(len(stacks))]
    each = {f"h_{i}": tree.unflatten(layer) for i, layer in enumerate(zip(*slices, strict=True))}
    return model.clone(config=dataclasses.replace(model.config, scan_layers=False)), rest | each


def _lay_out(path: tuple[str, ...], value: Any, dtype: str, own: frozenset[tuple[str, ...]] | None) -> Any:
    """Return parameters with decode matrices, and empty the dictionaries that they come from.

    own: the only modules to have them. None means all that have the names.
    """
    if not isinstance(value, dict):
        return jnp.copy(value)  # a step of training may delete the given one
    new, is_own = {}, own is None or path in own
    if is_own and "kernel" in value:
        return _join([value], dtype)
    if is_own and path[-1:] == ("attn",) and "kernel" in value["q"]:
        new[QKV] = _join([value.pop(part) for part in "qkv"], dtype)
    elif is_own and path == ("wte",) and "embedding" in value:
        quantize = jax.jit(DecodeMatrix.quantize, static_argnums=1)
        new[DECODE_MATRIX] = quantize(value.pop("embedding"), dtype)
    # The last ones are the largest: what is converted later fits into the memory that they leave.
    return new | {k: _lay_out((*path, k), value.pop(k), dtype, own) for k in list(value)[::-1]}


def _join(layers: list[dict], dtype: str) -> dict:
    """Return the parameters of one dense layer in place of several with the same inputs, and take their kernels."""
    kernels_DF = [layer.pop("kernel") for layer in layers]
    rest = {name: jnp.concatenate([layer[name] for layer in layers]) for name in layers[0]}
    return rest | {DECODE_MATRIX: _quantize(kernels_DF, dtype)}


@functools.partial(jax.jit, static_argnums=1)
def _quantize(parts_DF: list[jax.Array], dtype: str) -> DecodeMatrix:
    matrix_FD = jnp.concatenate([part_DF.T for part_DF in parts_DF])
    return DecodeMatrix.quantize(matrix_FD, dtype)  # compiled for a shape, not for each layer


def multiply_by_decode_matrix(call: Callable, args: tuple[Any, ...], kwargs: dict, context: Any) -> Any:
    """Replace the products of dense layers, embeddings and q, k, v: an interceptor of linen's methods."""
    module, method = context.module, context.method_name
    if isinstance(module, Attention) and method == "qkv" and module.has_variable("params", QKV):
        n, k = module.q.features, module.k.features
        return jnp.split(_project(module.get_variable("params", QKV), args[0], module.dtype), [n, n + k], axis=-1)
    params = module.variables.get("params", {}) if isinstance(module, Dense | Embedding | Head) else {}
    if (matrix := params.get(DECODE_MATRIX)) is None:
        return call(*args, **kwargs)
    if isinstance(module, Dense):
        return _project(params, args[0], module.dtype)
    return matrix.take(args[0]) if isinstance(module, Embedding) and method == "__call__" else matrix.matmul(args[0])


def with_decode_matrices(function: F) -> F:
    """Return the function, in which `model.apply` takes parameters as `for_decoding` made them, or as they were trained.

    Jit it after this.
    """
    return nn.intercept_methods(multiply_by_decode_matrix)(function)


@with_decode_matrices
def apply_model(model: GPT, params: dict, *args: Any, **kwargs: Any) -> Any:
    """Return `model.apply` of parameters as they were trained, or as `for_decoding` made them."""
    return model.apply({"params": params}, *args, **kwargs)


@with_decode_matrices
def decode_module(
    module: nn.Module, params: dict, cache: dict[str, Any], *args: Any, **kwargs: Any
) -> tuple[jax.Array, Any]:
    """Return (`module.apply`, its collection "cache" after the call). An empty one is made: see `Attention`."""
    x_BTD, found = module.apply({"params": params, "cache": cache}, *args, **kwargs, mutable=["cache"])
    return x_BTD, found["cache"]


def _project(params: Any, x_BTD: jax.Array, dtype: DTypeLike) -> jax.Array:
    y_UF = params[DECODE_MATRIX].matmul(x_BTD.reshape(-1, x_BTD.shape[-1]))
    if "bias" in params:
        y_UF = y_UF + params["bias"][None]
    return y_UF.astype(dtype).reshape(*x_BTD.shape[:-1], -1)


class DecodeMatrix(flax.struct.PyTreeNode):
    """A matrix in which the weights of one output are adjacent: `y_UF = x_UD @ (values_FD * scale_F).T`.

    Decoding reads every weight for a handful of tokens, so memory bandwidth limits its speed.
    """

    values_FD: jax.Array  # float32, bfloat16, or int8. An odd number of outputs has a row of zeros at the end
    scale_F: jax.Array  # float32: for int8 each row's largest magnitude / 127, else ones

    @staticmethod
    def quantize(matrix_FD: jax.Array, dtype: DTypeLike) -> DecodeMatrix:
        """Convert a matrix to float32, bfloat16 or int8."""
        values_FD, scale_F = matrix_FD.astype(jnp.float32), jnp.ones(matrix_FD.shape[0])
        if jnp.dtype(dtype) == jnp.int8:
            values_FD, scale_F = to_int8(values_FD)
        return DecodeMatrix(jnp.pad(values_FD.astype(dtype), ((0, len(scale_F) % 2), (0, 0))), scale_F)

    def take(self, index: jax.Array) -> jax.Array:
        """Return rows of the matrix in float32: index.shape + (D,)."""
        return self.values_FD[index].astype(jnp.float32) * self.scale_F[index][..., None]

    def matmul(self, x_UD: jax.Array) -> jax.Array:
        """Compute x_UD @ matrix.T in float32, [U, F].

        Inputs are rounded to the type of the weights. For int8 each row is scaled by its largest magnitude (Dettmers et al.
        2022, arXiv:2208.07339, but outliers are rounded too), since on CPU only integer products are faster than float32. On
        an Nvidia GPU int8 weights leave inputs as they are. Elsewhere the bits of a row do not depend on the other rows.
        """
        return jax.lax.platform_dependent(self, x_UD, cuda=_matmul_on_gpu, default=_matmul)


def _matmul_on_gpu(matrix: DecodeMatrix, x_UD: jax.Array) -> jax.Array:
    """Convert int8 weights as they are read, and no input: a GPU waits for memory, and for each kernel."""
    is_int8 = matrix.values_FD.dtype == jnp.int8
    dtype = x_UD.dtype if is_int8 else matrix.values_FD.dtype
    y_UF = jnp.dot(x_UD.astype(dtype), matrix.values_FD.T.astype(dtype), preferred_element_type=jnp.float32)
    y_UF = y_UF[:, : len(matrix.scale_F)]
    return y_UF * matrix.scale_F[None] if is_int8 else y_UF


def _matmul(matrix: DecodeMatrix, x_UD: jax.Array) -> jax.Array:
    values_FD, scale_F = matrix.values_FD, matrix.scale_F
    if values_FD.dtype == jnp.int8:
        x_UD, x_scale_U = to_int8(x_UD)
    else:
        x_UD, x_scale_U = x_UD.astype(values_FD.dtype), jnp.ones(x_UD.shape[0])
    y_FU = jax.lax.platform_dependent(values_FD, x_UD, cpu=_multiply_on_cpu, default=lambda w, x: _dot(x, w).T)
    # The scale also keeps XLA from turning the float32 product into the slow x @ matrix.T.
    return (y_FU[: len(scale_F)].astype(jnp.float32) * (scale_F[:, None] * x_scale_U[None])).T


def _multiply_on_cpu(values_FD: jax.Array, x_UD: jax.Array) -> jax.Array:
    """Compute values_FD @ x_UD.T, in int32 if they are integers, in the form that XLA on CPU runs fastest.

    x @ values.T reorders the whole matrix first, which costs more than a few rows' product does. With the matrix on
    the left XLA reorders x. With two halves of it as a batch it also uses all cores for one row (27 GB/s of weights
    instead of 21). It then never falls back to float32 for bfloat16 (42 GB/s instead of 30, in units of 4 bytes).
    """
    U, (F, D), is_float32 = x_UD.shape[0], values_FD.shape, values_FD.dtype == jnp.float32
    most = 4 if is_float32 else 16  # rows that halves are faster for
    # Integers have the same sums in every order: the bits do not depend on whether there is a compiler. JAX also traces this
    # function where the platform is another.
    is_exact = values_FD.dtype == jnp.int8 and jax.default_backend() == "cpu"
    if is_exact and most >= U and why_not_native() is None:
        return native_product(values_FD, x_UD)
    if most < U:
        return _dot(values_FD, x_UD) if is_float32 else _dot(x_UD, values_FD).T
    if U == 1 and not is_float32:  # one row takes XLA's plain loop, ten times slower than the product for two
        x_UD = jnp.concatenate([x_UD, x_UD])
    halves = values_FD.reshape(2, F // 2, D)
    y_2FU = _dot(halves, jnp.broadcast_to(x_UD, (2, *x_UD.shape)), batch=(0,))
    return y_2FU.reshape(F, -1)[:, :U]


def native_product(values_FD: jax.Array, x_UD: jax.Array) -> jax.Array:
    """Compute `values_FD @ x_UD.T` of int8 arrays in int32 by C++: -> y_FU. `why_not_native` must be None.

    XLA's products of a few rows reach a quarter of the memory's bandwidth.
    """
    shape = jax.ShapeDtypeStruct((values_FD.shape[0], x_UD.shape[0]), jnp.int32)
    return jax.ffi.ffi_call("jaxgpt_product", shape, vmap_method="sequential")(values_FD, x_UD)


def _dot(left: jax.Array, right: jax.Array, batch: tuple[int, ...] = ()) -> jax.Array:
    """Contract the last axes of two arrays, in int32 if they are integers, else in float32."""
    last = left.ndim - 1
    out = jnp.int32 if left.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(left, right, (((last,), (last,)), (batch, batch)), preferred_element_type=out)
