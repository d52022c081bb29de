"""Make the X-ray page of a run: capture what the model computes on one text, for `xray.js` to draw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxgpt.config.validate import check_value
from jaxgpt.data.corpus import find_user_files
from jaxgpt.data.dataset import encode_whole
from jaxgpt.data.pipeline import Tokens
from jaxgpt.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.interventions.model import ACTIVATIONS, EditedGPT, forward, place_shapes, stream_names, unroll
from jaxgpt.layers.block import Block, Compute
from jaxgpt.layers.norm import LayerNorm, RMSNorm
from jaxgpt.model import GPT, GPTConfig
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.run import Run
from jaxgpt.runs.resume import reopen_dataset
from jaxgpt.sample.programs import check_ids
from jaxgpt.sample.quantize import DECODE_MATRIX
from jaxgpt.tools.html_page import Arrays, render_html, round_numbers
from jaxgpt.train import Params

PREDICTIONS = 5  # most probable tokens that are kept at each position
LENS_PREDICTIONS = 3  # predictions that are kept at each position and layer
EXAMPLES = 4  # top activating positions that are kept for each MLP unit
WINDOWS_AT_ONCE = 8  # windows of a corpus per batch
CORPUS_TOKENS = 2**15  # tokens searched for top activating examples. It takes seconds for a small model
MOST_WEIGHTS = 2**25  # attention weights on a page, one byte each before compression
PROGRAMS = ("xray/sections", "xray/xray")  # of the page
UNITS = 8  # most active units that are listed for each position
DRAWN = ("attention", "pattern", "middle", "units", "mlp")  # the places in a block that the page draws
ELEMENTS = 8  # elements of a token's vector that are shown before and after a norm
LABELS = 400  # most tokens on the map of embeddings
NAMED = 200  # most probable next tokens with text on the page
NEIGHBOURS = 5  # nearest tokens that are listed for each token


class Guess(NamedTuple):
    """The most probable next tokens at each position, and the log-probability of the actual one."""

    tokens_TK: np.ndarray  # int32, the most probable first
    probabilities_TK: np.ndarray
    logprob_T: np.ndarray  # nats, for the next token of the text, nan at the last position


class Branch(NamedTuple):
    """The norms of what attention or an MLP adds to the residual stream."""

    name: str  # "h_0/attn", "h_0/mlp"
    added_T: np.ndarray  # Euclidean norm at each position
    stream_T: np.ndarray  # norm of the stream after the addition (for post-norm, after the norm)


class Norm(NamedTuple):
    """One normalisation layer: the vector at each position before and after it."""

    name: str  # "h_0/ln_1"
    before_TD: np.ndarray
    after_TD: np.ndarray
    scale_D: np.ndarray  # gamma, including an offset of 1 if there is one
    bias_D: np.ndarray | None  # beta. None means no bias


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
        tokens: at most block_size token ids.
        vocab_size: the number of token ids that are not padding. None means all.
    """
    model, params = unroll(model, params)
    c, layers, streams = model.config, range(model.config.n_layer), stream_names(model)
    tokens_T = jnp.asarray(tokens, jnp.int32)
    check_places(c)
    names = (*streams, *(f"h_{layer}/{place}" for layer in layers for place in DRAWN))
    logits_TV, read, normed = _read(model.clone(read=names), params, tokens_T)
    streams_LTD = jnp.stack([read[name] for name in streams])
    guesses = jax.device_get(_guess(model, params, streams_LTD, tokens_T, vocab_size))
    read, normed = jax.tree.map(lambda x: np.asarray(x, np.float32), (read, normed))
    branches = []
    for layer in layers:
        for part, norm, added, after in (("attn", "ln_1", "attention", "middle"), ("mlp", "ln_2", "mlp", "stream")):
            added_TD = read[f"h_{layer}/{added}"]
            if c.norm_position in ("output", "sandwich"):  # what is added has been normed
                added_TD = normed[f"h_{layer}/{norm}{'_out' if c.norm_position == 'sandwich' else ''}"][1]
            lengths = [np.linalg.norm(x_TD, axis=-1) for x_TD in (added_TD, read[f"h_{layer}/{after}"])]
            branches.append(Branch(f"h_{layer}/{part}", *lengths))
    in_order = [f"h_{layer}/{norm}" for layer in layers for norm in ("ln_1", "ln_1_out", "ln_2", "ln_2_out")]
    K = LENS_PREDICTIONS
    lens = [Guess(ids[:, :K], p[:, :K], actual) for ids, p, actual in zip(*guesses, strict=True)]
    return Activations(
        guess=Guess(*(x[-1] for x in guesses)),
        logits_V=np.asarray(logits_TV[-1, :vocab_size]),
        lens=lens,
        weights_LNTS=[read[f"h_{layer}/pattern"].swapaxes(0, 1) for layer in layers],
        hidden_LTF=[read[f"h_{layer}/units"] for layer in layers],
        start_T=np.linalg.norm(read[streams[0]], axis=-1),
        branches=branches,
        norms=[Norm(name, *normed[name]) for name in (*in_order, "ln_f") if name in normed],
    )


@functools.partial(jax.jit, static_argnums=0)
def _read(model: EditedGPT, params: Params, tokens_T: jax.Array) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    """Return the logits, what the model reads, and the fields of `Norm` for each norm, by its name."""
    normed = {}

    def watch(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, LayerNorm | RMSNorm) and context.method_name == "__call__":
            learned = context.module.variables["params"]
            scale_D = learned["scale"] + 1.0 * model.config.norm_offset
            normed["/".join(context.module.path)] = (args[0][0], out[0], scale_D, learned.get("bias"))
        return out

    with nn.intercept_methods(watch):
        result: Any = model.apply({"params": params}, tokens_T[None], mutable=[ACTIVATIONS])
    logits_BTV, read = result
    return logits_BTV[0], {name: x[0] for name, x in read[ACTIVATIONS].items()}, normed


def check_places(config: GPTConfig) -> None:
    """Raise `UserError` for a configuration of a user's own with a module that the page would draw as another."""
    has = {name.split("/")[-1] for name in place_shapes(config)}
    lacks = [place for place in DRAWN if place not in has]
    if type(config.make_block(0, Compute())) is not Block or not isinstance(config.make_norm(), LayerNorm | RMSNorm):
        lacks.append("jaxgpt's blocks and norms")
    if lacks and config.is_foreign:
        said = f"{type(config).__name__} has no {', '.join(lacks)}, which the page draws"
        raise UserError(f"{said}: jaxgpt.interventions reads what it has, {', '.join(sorted(has))}")


@functools.partial(jax.jit, static_argnums=(0, 4))
def _guess(
    model: EditedGPT, params: Params, streams_LTD: jax.Array, tokens_T: jax.Array, vocab_size: int | None
) -> tuple[jax.Array, ...]:
    """Return the fields of `Guess` for each stream, one by one, so that the logits of only one layer are in memory."""

    def guess(x_TD: jax.Array) -> tuple[jax.Array, ...]:
        logits_BTV: Any = model.apply({"params": params}, x_TD[None], method="predict")
        logprobs_TV = jax.nn.log_softmax(logits_BTV[0, :, :vocab_size])
        top_TK, ids_TK = jax.lax.top_k(logprobs_TV, min(PREDICTIONS, logprobs_TV.shape[1]))
        actual_T = jnp.take_along_axis(logprobs_TV[:-1], tokens_T[1:, None], axis=1)[:, 0]
        return ids_TK, jnp.exp(top_TK), jnp.append(actual_T, jnp.nan)

    return jax.lax.map(guess, streams_LTD)


def top_activating_examples(model: GPT, params: Params, windows_NT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each hidden unit of the MLPs is most active in a corpus, at most once per window.

    windows_NT: token ids. Each window is a sequence of its own.

    Returns:
        The largest activations, float32 [L, F, K], and their indices into windows_NT.ravel(), int32. K is EXAMPLES, or
        the number of windows if that is less.
    """
    model, params = unroll(model, params)
    reader = model.clone(read=tuple(f"h_{layer}/units" for layer in range(model.config.n_layer)))

    def find(window_T: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        read = forward(reader, params, window_T[None]).activations
        hidden = [x_1TF[0].astype(jnp.float32) for x_1TF in read.values()]
        return [(x_TF.max(axis=0), jnp.argmax(x_TF, axis=0)) for x_TF in hidden]

    N, T = windows_NT.shape
    found = jax.lax.map(find, jnp.asarray(windows_NT, jnp.int32), batch_size=min(WINDOWS_AT_ONCE, N))
    peaks_LFN, at_LFN = (jnp.stack([x_NF.T for x_NF in each]) for each in zip(*found, strict=True))
    best_LFK, window_LFK = jax.lax.top_k(peaks_LFN, min(EXAMPLES, N))
    return jax.device_get((best_LFK, T * window_LFK + jnp.take_along_axis(at_LFN, window_LFK, axis=-1)))


def xray(run: Run, prompt: str | Sequence[int], *, data: str | None = None) -> str:
    """Return a self-contained HTML page that shows what the model computes on a text.

    It shows surprise, attention, norms, the residual stream, MLP units, the logit lens, embeddings and sampling.

    Args:
        run: a trained run, as `fit` and `load` return it.
        prompt: the text, or its token ids.
        data: a UTF-8 file to search for the top activating examples of each MLP unit. None means the run's training text.

    Raises:
        UserError: if the prompt is empty, longer than block_size or too long for a page, or the file cannot be used.
    """
    check_value("run", run, Run)
    config = run.model.config
    ids = _encode_prompt(run, prompt)
    seen = capture_activations(run.model, run.params, ids, run.tokenizer.vocab_size)
    if np.isnan(seen.logits_V).any():
        raise UserError(f"{run.directory} gives logits that are not finite: use another run")
    arrays, windows_NT, corpus, why = Arrays(), None, None, ""
    examples = [(None, None)] * config.n_layer
    try:
        windows_NT = _read_windows(run, data)
        corpus = {"ids": arrays.put_tokens(windows_NT.ravel()), "window": windows_NT.shape[1]}
        examples = list(zip(*top_activating_examples(run.model, run.params, windows_NT), strict=True))
    except UserError as e:
        if data is not None:
            raise
        why = f"{e}: name a text with --data FILE"
    order_V = np.argsort(-seen.logits_V, kind="stable")  # sampling options do not change it
    # The page shades square roots, in 256 levels, because most weights are small.
    roots = [np.round(255 * np.sqrt(np.clip(x_NTS, 0, 1))).astype(np.uint8) for x_NTS in seen.weights_LNTS]
    content: Json = {
        "title": f"X-ray of {run.experiment.name}",
        "facts": describe_run(run),
        "texts": {"text": arrays.put_tokens(ids)},
        "bits": round_numbers(np.append(np.nan, seen.guess.logprob_T[:-1] / -np.log(2))),
        "guess": _put_guess(arrays, seen.guess),
        "lens": [_put_guess(arrays, guess) for guess in seen.lens],
        "attention": [{"name": f"layer {layer}", "roots": arrays.put(x)} for layer, x in enumerate(roots)],
        "start": round_numbers(seen.start_T),
        "branches": [
            {"name": x.name, "added": round_numbers(x.added_T), "stream": round_numbers(x.stream_T)}
            for x in seen.branches
        ],
        "norms": [_describe_norm(norm, config) for norm in seen.norms],
        "mlp": [_put_units(arrays, config, x, *found) for x, found in zip(seen.hidden_LTF, examples, strict=True)],
        "corpus": corpus,
        "why_no_corpus": why,
        "embedding": map_embedding(run, ids, windows_NT, arrays),
        "sampling": {
            "ids": arrays.put_tokens(order_V[:NAMED]),
            "logits": arrays.put(seen.logits_V[order_V]),
            "temperature": run.experiment.train.sample_temperature,
        },
    }
    content["words"] = [spell(run.tokenizer, token) for token in arrays.words]
    return render_html(PROGRAMS, content, arrays)


def _encode_prompt(run: Run, prompt: str | Sequence[int]) -> list[int]:
    """Return the tokens of a prompt, which must not be empty or too long for the model or for a page."""
    config = run.model.config
    if isinstance(prompt, str):
        ids = run.prompt_format.encode([prompt], chat=False)[0] if prompt else []
    else:
        ids = check_ids(run.model, prompt, "prompt").tolist()
    if not ids:
        raise UserError("the prompt is empty: give a text with --prompt TEXT")
    if len(ids) > (most := most_tokens(config, MOST_WEIGHTS)):
        raise UserError(f"the prompt has {len(ids)} tokens: give at most {most}, as many as the model or a page holds")
    return ids


def most_tokens(config: GPTConfig, weights: int) -> int:
    """Return the context, or fewer tokens if all heads would have more attention weights than a page holds."""
    return min(config.block_size, int((weights / config.n_layer / config.n_head) ** 0.5))


def _put_guess(arrays: Arrays, guess: Guess) -> Json:
    return {
        "ids": arrays.put_tokens(guess.tokens_TK),
        "p": arrays.put(guess.probabilities_TK),
        "actual": round_numbers(np.exp(guess.logprob_T)),
    }


def _describe_norm(norm: Norm, config: GPTConfig) -> Json:
    return {
        "name": norm.name,
        "eps": config.norm_eps,
        "centred": config.norm == "layernorm",  # LayerNorm subtracts the mean
        "before": _measure(norm.before_TD),
        "after": _measure(norm.after_TD),
        "scale": round_numbers(norm.scale_D),
        "bias": round_numbers(norm.bias_D),
        "x": round_numbers(norm.before_TD[:, :ELEMENTS]),
    }


def _measure(x_TD: np.ndarray) -> Json:
    return {"mean": round_numbers(x_TD.mean(axis=1)), "variance": round_numbers(x_TD.var(axis=1))}


def _put_units(arrays: Arrays, config: GPTConfig, hidden_TF: np.ndarray, values: Any, places: Any) -> Json:
    """Add the hidden units of an MLP. values, places: of the top activating examples, or None."""
    order_TK = np.argsort(-hidden_TF, axis=1, kind="stable")[:, :UNITS]
    peak_F = np.maximum(hidden_TF.max(axis=0), 0.0)
    # Sixteen levels relative to each unit's peak are enough for colours, and compress well.
    levels_TF = np.round(15 * np.clip(hidden_TF, 0, None) / np.where(peak_F, peak_F, 1)).astype(np.uint8)
    zero_TF = hidden_TF == 0
    return {
        "units": hidden_TF.shape[1],
        "top": arrays.put(order_TK.astype(np.int32)),
        "values": arrays.put(np.take_along_axis(hidden_TF, order_TK, axis=1)),
        "levels": arrays.put(levels_TF.T),
        "peaks": arrays.put(peak_F),
        # Only ReLU and its square give exact zeros.
        "zeros": round_numbers(zero_TF.mean(axis=1)) if config.activation.startswith("relu") else None,
        "silent": int(zero_TF.all(axis=0).sum()),
        "examples": arrays.put(places),
        "example_values": arrays.put(values),
    }


def _read_windows(run: Run, data: str | None) -> np.ndarray:
    """Return windows spread evenly over the run's training text, or over the file `data`."""
    T = run.model.config.block_size
    if data is not None:
        text: Any = Tokens([encode_whole(find_user_files(data), run.tokenizer)[0]])
    elif run.metadata.imported is not None:
        raise UserError("the model was imported without its training text")
    else:  # which a run that was copied to another machine lacks
        text = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back").train
    if not isinstance(text, Tokens):
        raise UserError("the run was trained on conversations or a mixture")
    if len(text) < T:
        raise UserError(f"{data or 'the training text'} has {len(text)} tokens, needed {T} for one window")
    count = min(max(CORPUS_TOKENS // T, 1), len(text) // T)
    starts = np.linspace(0, len(text) - T, count).astype(np.int64)
    return np.stack([text.read(int(start), T) for start in starts])


def describe_run(run: Run) -> list[tuple[str, str]]:
    """Return the facts at the head of a page: (name, value)."""
    config, loss = run.model.config, run.val_loss
    return [
        ("run", str(run.directory)),
        ("step", f"{run.step:,}"),
        ("validation loss", "not measured" if loss is None else f"{loss:.4f} {run.experiment.objective.unit}"),
        ("parameters", f"{count_parameters(run.model.shapes()):,}"),
        ("layers, heads, width", f"{config.n_layer}, {config.n_head}, {config.n_embd}"),
        ("norm", f"{config.norm}, {config.norm_position}"),
        ("MLP", f"{config.shape.mlp_dim} units, {config.activation}"),
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


def project_to_plane(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (vectors projected on two principal components, [N, 2] in [-1, 1], and the components' variance shares)."""
    vectors_ND = vectors_ND / max(np.abs(vectors_ND).max(), 1e-30)  # so that the squares are finite in float32
    centred_ND = vectors_ND - vectors_ND.mean(axis=0)
    variance_D, axes_DD = np.linalg.eigh(centred_ND.T @ centred_ND)
    xy_N2 = centred_ND @ axes_DD[:, [-1, -2]] if vectors_ND.shape[1] > 1 else np.repeat(centred_ND, 2, axis=1)
    share = variance_D[::-1][:2] / max(variance_D.sum(), 1e-30)
    return xy_N2 / max(np.abs(xy_N2).max(), 1e-30), share


def map_embedding(run: Run, ids: list[int], windows_NT: np.ndarray | None, arrays: Arrays) -> Json:
    """Return the token vectors on a plane, and the nearest tokens of each. ids: tokens that are shown in any case."""
    vectors_VD = read_embedding(run.params)[: run.tokenizer.vocab_size]
    shown = rest = np.arange(len(vectors_VD))
    if len(rest) > LABELS:  # the text's tokens, and the most frequent ones of the corpus
        own = np.unique(ids)
        if windows_NT is not None:
            rest = np.argsort(-np.bincount(windows_NT.ravel(), minlength=len(rest)), kind="stable")
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
