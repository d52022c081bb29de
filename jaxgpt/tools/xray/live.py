"""Make a page that is the model: one HTML file with the weights, in which one types and switches parts off."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import GPTConfig
from jaxgpt.data.tokenizer import find_start_token
from jaxgpt.errors import UserError
from jaxgpt.interventions.model import EDITS
from jaxgpt.layers.linear import to_int8
from jaxgpt.layers.position import sinusoidal
from jaxgpt.run import Run
from jaxgpt.sample.quantize import DECODE_MATRIX, unstack_layers
from jaxgpt.tools.html_page import Arrays, render_html
from jaxgpt.tools.xray.page import TokenArrays, describe_run, map_embedding, spell
from jaxgpt.tools.xray.tokenizer import describe_tokenizer
from jaxgpt.train import Params

Weights = Literal["int8", "float32"]
PROGRAMS = ("xray/sections", "xray/tokenizer", "xray/engine", "xray/live")  # of the page
MOST_PARAMETERS = 2**26  # 85 MB as int8 in base64
MOST_WEIGHTS = 2**22  # attention weights, which are drawn again as the text changes


class Matrix(NamedTuple):
    """A matrix as the page holds it, row-major by output: values * scale."""

    values_FD: np.ndarray  # int8 or float32
    scale_F: np.ndarray | None  # float32; None: 1


def make_page(run: Run, prompt: str | None = None, *, weights: Weights = "int8") -> str:
    """Return one HTML file that is the model: its weights, its tokenizer, and an engine that shows what it computes.

    Args:
        run: the run, as it was trained.
        prompt: the text to begin with. None means the experiment's `train.sample_prompt`.
        weights: of the matrices. "int8" has one scale per output; activations are float32 in both cases.

    Raises:
        UserError: for a model or a tokenizer that the page cannot run.
    """
    model, params, V = run.model, run.params, run.tokenizer.vocab_size
    if weights not in ("int8", "float32"):
        raise UserError(f"weights={weights!r}: needs int8 or float32")
    if model.config.n_encoder_layer:
        raise UserError(f"{run.directory} has an encoder, which the page cannot run: jaxgpt xray shows such models")
    if EDITS in params:
        raise UserError("the model is edited: give the run without edits, and switch parts off on its page")
    if DECODE_MATRIX in params["wte"]:
        raise UserError("the parameters were converted by for_decoding: give the run as jaxgpt.load returns it")
    if (count := sum(x.size for x in jax.tree.leaves(params))) > MOST_PARAMETERS:
        raise UserError(f"{run.directory} has {count:,} parameters, too many for a page: at most {MOST_PARAMETERS:,}")
    if prompt is not None:
        run.tokenizer.encode(prompt)  # raises for characters that it does not know
    model, params = unstack_layers(model, params)
    arrays, held = TokenArrays(), hold(params, weights)
    arrays.words = {token: token for token in range(V)}
    data: dict[str, Any] = {
        "title": f"{run.experiment.name}, live",
        "facts": [*describe_run(run), ("weights", weights)],
        "tokenizer": describe_tokenizer(run.tokenizer, arrays),
        "prefix": list(run.tokenizer.prefix),
        "empty": find_start_token(run.tokenizer)[0],  # the token that stands for an empty text
        "stop": run.prompt_format.stop_tokens(False),
        "prompt": run.experiment.train.sample_prompt if prompt is None else prompt,
        "sampling": {"temperature": run.experiment.train.sample_temperature},
        "corpus": None,
        "why_no_corpus": "The page does not have the training text; jaxgpt xray shows the examples.",
        "embedding": map_embedding(run, {"text": [find_start_token(run.tokenizer)[0]]}, None, arrays),
        "words": [spell(run.tokenizer, token) for token in range(V)],
    }
    data["model"] = _describe_model(model.config, V) | {"params": _put(held, arrays)}
    if model.config.position == "sinusoidal":
        positions_1T = jnp.arange(data["model"]["context"])[None]
        table_TD = np.asarray(sinusoidal(positions_1T, model.config.n_embd)[0])
        data["model"]["params"]["wpe"] = {"embedding": arrays.put(table_TD)}
    return render_html(PROGRAMS, data["title"], data, arrays)


def hold(params: Params, weights: Weights) -> Params:
    """Return parameters as the page holds them: each matrix as a `Matrix`, all others in float32.

    params: of a model without `scan_layers`.
    """

    def convert(path: Any, given: jax.Array) -> Any:
        x = np.asarray(given, np.float32)
        if not np.isfinite(x).all():
            raise UserError(f"{'/'.join(part.key for part in path)} is not finite: use another run")
        if x.ndim < 2 or path[0].key == "wpe":
            return x
        matrix_FD = x if path[-1].key == "embedding" else x.T
        if weights == "float32":
            return Matrix(matrix_FD, None)
        return Matrix(*map(np.asarray, to_int8(jnp.asarray(matrix_FD))))

    return jax.tree.map_with_path(convert, params)


def restore(held: Params) -> Params:
    """Return the parameters, in float32, with which `GPT` computes what the page does. held: of `hold`."""

    def convert(path: Any, x: Any) -> np.ndarray:
        if not isinstance(x, Matrix):
            return x
        matrix_FD = x.values_FD.astype(np.float32) * (1 if x.scale_F is None else x.scale_F[:, None])
        return matrix_FD if path[-1].key == "embedding" else matrix_FD.T

    return jax.tree.map_with_path(convert, held, is_leaf=lambda x: isinstance(x, Matrix))


def _describe_model(config: GPTConfig, V: int) -> dict[str, Any]:
    windows = [config.window(layer) for layer in range(config.n_layer)]
    ropes = [config.make_rope(window) for window in windows]
    fits = int((MOST_WEIGHTS / config.n_layer / config.n_head) ** 0.5)
    return {
        "config": dataclasses.asdict(config.explicit()),
        "context": min(config.block_size, fits),
        "vocab_size": V,
        "windows": windows,
        "frequencies": [None if rope is None else np.asarray(rope.frequencies()).tolist() for rope in ropes],
    }


def _put(held: Params, arrays: Arrays) -> Any:
    def put(x: Any) -> Any:
        if not isinstance(x, Matrix):
            return arrays.put(x)
        return {"values": arrays.put(x.values_FD), "scale": None if x.scale_F is None else arrays.put(x.scale_F)}

    return jax.tree.map(put, held, is_leaf=lambda x: isinstance(x, Matrix))
