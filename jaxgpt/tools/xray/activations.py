"""Capture the activations of every layer on one text, with linen's `capture_intermediates` and `sow`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.layers.attention import WEIGHTS
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.model import GPT
from jaxgpt.sample.quantize import unstack_layers, with_decode_matrices
from jaxgpt.train import Params

PREDICTIONS = 5  # most probable tokens that are kept at each position
LENS_PREDICTIONS = 3  # most probable tokens that are kept at each position and layer
EXAMPLES = 4  # top activating positions that are kept for each MLP unit
WINDOWS_AT_ONCE = 8  # windows of a corpus per batch


class Guess(NamedTuple):
    """The most probable next tokens at each position, and the log-probability of the actual one."""

    tokens_TK: jax.Array | np.ndarray  # int32, the most probable first
    probabilities_TK: jax.Array | np.ndarray
    logprob_T: jax.Array | np.ndarray  # nats, of the next token of the text; nan at the last position


class Branch(NamedTuple):
    """The norms of what attention or an MLP adds to the residual stream."""

    name: str  # "h_0/attn", "h_0/cross", "h_0/mlp"
    added_T: np.ndarray  # Euclidean norm at each position
    stream_T: np.ndarray  # norm of the stream after the addition (for post-norm, after the norm)


class Norm(NamedTuple):
    """One normalisation layer: the vector at each position before and after it."""

    name: str  # "h_0/ln_1"
    before_TD: np.ndarray
    after_TD: np.ndarray
    scale_D: np.ndarray  # gamma, including an offset of 1 if there is one
    bias_D: np.ndarray | None  # beta; None: no bias


class Activations(NamedTuple):
    """Activations of a model on one text of T tokens, as NumPy arrays in float32."""

    guess: Guess
    logits_V: np.ndarray  # at the last position
    lens: list[Guess]  # the logit lens after the embedding and after each of the L blocks
    weights_LNTS: list[np.ndarray]  # attention weights of query T on key S
    hidden_LTF: list[np.ndarray]  # hidden units of the MLPs, after the activation
    start_T: np.ndarray  # Euclidean norm of the stream that enters the first block
    branches: list[Branch]  # in the order of computation
    norms: list[Norm]  # in the order of computation


def capture_activations(model: GPT, params: Params, tokens: list[int], vocab_size: int | None = None) -> Activations:
    """Return all activations on one text.

    Args:
        model: the model.
        params: its parameters.
        tokens: at most block_size token ids.
        vocab_size: the number of token ids that are not padding. None means all.
    """
    model, params = _unroll(model, params)
    seen = _forward(model, params, jnp.asarray(tokens, jnp.int32), vocab_size)
    guess, logits_V, lens, inner, weights = jax.device_get(seen)
    c = model.config
    blocks = {f"h_{i}/": inner[f"h_{i}"] for i in range(c.n_layer)}
    start_TD = inner["drop"]["__call__"][-1][0].astype(np.float32)
    branches, norms, stream_TD = [], [], start_TD
    for path, block in blocks.items():
        for branch, norm in (("attn", "ln_1"), ("mlp", "ln_2")):
            if branch in block:
                added = {"output": norm, "sandwich": f"{norm}_out"}.get(c.norm_position, branch)
                added_TD = _output(block[added])
                stream_TD = _output(block[norm]) if c.norm_position == "post" else stream_TD + added_TD
                lengths = (np.linalg.norm(x_TD, axis=-1) for x_TD in (added_TD, stream_TD))
                branches.append(Branch(path + branch, *lengths))
    for path, modules in {**blocks, "": inner}.items():
        for name in (name for name in modules if name.startswith("ln_")):
            learned = (params[path[:-1]] if path else params)[name]
            before_TD = modules[name]["input"][0][0].astype(np.float32)
            scale_D = np.asarray(learned["scale"], np.float32) + (1.0 if c.norm_offset else 0.0)
            bias_D = np.asarray(learned["bias"], np.float32) if "bias" in learned else None
            norms.append(Norm(path + name, before_TD, _output(modules[name]), scale_D, bias_D))

    return Activations(
        guess=guess,
        logits_V=logits_V,
        lens=[Guess(*(x[layer] for x in lens)) for layer in range(c.n_layer + 1)],
        weights_LNTS=[weights[f"h_{i}"]["attn"]["weights_BTNS"][0][0].swapaxes(0, 1) for i in range(c.n_layer)],
        hidden_LTF=[block["mlp"]["hidden_BTF"][0][0].astype(np.float32) for block in blocks.values()],
        start_T=np.linalg.norm(start_TD, axis=-1),
        branches=branches,
        norms=norms,
    )


class TopExamples(NamedTuple):
    """The positions of a corpus at which each hidden unit of the MLPs is most active, at most one per window."""

    windows_NT: np.ndarray  # token ids; each window is a sequence of its own
    values: list[np.ndarray]  # activations, [F, EXAMPLES] for each layer
    positions: list[np.ndarray]  # indices into windows_NT.ravel(); -1 if there are fewer windows than EXAMPLES


def top_activating_examples(model: GPT, params: Params, windows_NT: np.ndarray) -> TopExamples:
    """Return the positions of `windows_NT` (token ids) at which each hidden unit of the MLPs is most active."""
    model, params = _unroll(model, params)
    count, T = windows_NT.shape
    shape: Any = (model.config.explicit().mlp_dim, EXAMPLES)
    best: Any = [(np.full(shape, -np.inf, np.float32), np.full(shape, -1)) for _ in range(model.config.n_layer)]
    for first in range(0, count, WINDOWS_AT_ONCE):
        numbers_B = np.arange(first, min(first + WINDOWS_AT_ONCE, count))
        windows_BT = windows_NT[np.resize(numbers_B, WINDOWS_AT_ONCE)]  # one shape, hence one compilation
        peaks = jax.device_get(_find_peaks(model, params, windows_BT.astype(np.int32)))
        for layer, (values_BF, where_BF) in enumerate(peaks):
            found = values_BF, where_BF + (T * numbers_B[0] + T * np.arange(WINDOWS_AT_ONCE))[:, None]
            both = [
                np.concatenate([old, new[: len(numbers_B)].T], axis=1)
                for old, new in zip(best[layer], found, strict=True)
            ]
            order_FK = np.argsort(-both[0], axis=1, kind="stable")[:, :EXAMPLES]
            best[layer] = tuple(np.take_along_axis(x, order_FK, axis=1) for x in both)
    return TopExamples(windows_NT, [values for values, _ in best], [positions for _, positions in best])


@functools.partial(jax.jit, static_argnums=0)
def _find_peaks(model: GPT, params: Params, windows_BT: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return the largest activation of each unit in each window, and its position there, for each layer."""
    _, kept = model.apply({"params": params}, windows_BT, mutable=["intermediates"])
    inner: Any = kept["intermediates"]
    hidden = [inner[f"h_{i}"]["mlp"]["hidden_BTF"][0].astype(jnp.float32) for i in range(model.config.n_layer)]
    return [(hidden_BTF.max(axis=1), jnp.argmax(hidden_BTF, axis=1)) for hidden_BTF in hidden]


def _unroll(model: GPT, params: Params) -> tuple[GPT, Params]:
    """Return the model without scan and remat, under which sown values would be lost."""
    model, params = unstack_layers(model, params)
    return model.clone(config=dataclasses.replace(model.config, remat="none")), params


@functools.partial(jax.jit, static_argnums=(0, 3))
@with_decode_matrices
def _forward(model: GPT, params: Params, tokens_T: jax.Array, vocab_size: int | None) -> Any:
    """Return (guess, logits_V at the last position, lens, intermediates, attention weights)."""

    def sow_inputs(call, args, kwargs, context):
        if isinstance(context.module, LayerNorm | RMSNorm) and context.method_name == "__call__":
            context.module.sow("intermediates", "input", args[0])
        return call(*args, **kwargs)

    with nn.intercept_methods(sow_inputs):
        logits_BTV, kept = model.apply(
            {"params": params},
            tokens_T[None],
            capture_intermediates=True,
            mutable=["intermediates", WEIGHTS],
        )
    inner: Any = kept["intermediates"]

    def guess(logits_BTV: Any, most: int) -> Guess:
        logprobs_TV = jax.nn.log_softmax(logits_BTV[0, :, :vocab_size])
        top_TK, ids_TK = jax.lax.top_k(logprobs_TV, min(most, logprobs_TV.shape[1]))
        actual_T = jnp.take_along_axis(logprobs_TV[:-1], tokens_T[1:, None], axis=1)[:, 0]
        return Guess(ids_TK, jnp.exp(top_TK), jnp.append(actual_T, jnp.nan))

    def unembed(module: GPT, x_BTD: jax.Array) -> jax.Array:
        return module.unembed(x_BTD if model.config.norm_position == "post" else module.ln_f(x_BTD))

    streams = [inner["drop"]["__call__"][-1], *(inner[f"h_{i}"]["__call__"][0] for i in range(model.config.n_layer))]
    lens = jax.lax.map(  # sequential, so that the logits of only one layer are in memory
        lambda x_BTD: guess(model.apply({"params": params}, x_BTD, method=unembed), LENS_PREDICTIONS),
        jnp.stack(streams),
    )
    return guess(logits_BTV, PREDICTIONS), logits_BTV[0, -1, :vocab_size], lens, inner, kept[WEIGHTS]


def _output(values: Any) -> Any:
    """Return the output of a captured module, x_TD, in float32."""
    return values["__call__"][0][0].astype(np.float32)
