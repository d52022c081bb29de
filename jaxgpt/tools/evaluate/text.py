"""The loss on held-out text, in windows."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
import numpy as np

from jaxgpt.config import DataConfig
from jaxgpt.config.validate import check_count, check_whole
from jaxgpt.data.chat.conversations import Conversations, encode_all
from jaxgpt.data.corpus import user_files
from jaxgpt.data.dataset import encode_whole
from jaxgpt.data.pairs import encode_pairs, in_memory
from jaxgpt.data.pipeline import validation_batches
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.runs.reopen import reopen_dataset
from jaxgpt.tools.evaluate.pairs import exact_matches
from jaxgpt.train import eval_step, mean_loss

_eval_step = jax.jit(eval_step, static_argnames="model")


def evaluate_run(
    run: Run,
    path: str | None = None,
    *,
    stride: int | None = None,
    batch_size: int | None = None,
    beams: int | None = None,
) -> dict[str, Any]:
    """Loss of a run on its validation split, or on the whole of a text or of conversations: every target once.

    stride: see `validation_batches`. The loss depends on it: a token that begins a window has nothing before it.
    A text of the user's stands after the tokens that its tokenizer begins texts with, if it does, as when sampling.
    batch_size: windows that are read together; None: the run's, in training.
    Returns loss (nats per token), perplexity, tokens, stride, and bits_per_byte (of UTF-8) and bits_per_character,
    None where only token ids are known. For conversations and pairs also left_out, the number that do not fit into the
    context and are not scored; for conversations shortened, the number cut after the last answer that fits. For pairs
    also the results of `exact_matches` for those that fit. beams: see `exact_matches`.
    """
    config, data = run.model.config, run.experiment.data
    stride = config.block_size if stride is None else check_whole("stride", stride)
    if not 1 <= stride <= config.block_size:
        raise UserError(f"stride={stride}: needs at least 1 and at most block_size={config.block_size}")
    utf8: int | None
    characters: int | None
    prefix: tuple[int, ...] = ()
    if path is None:
        if run.metadata.imported is not None:
            raise UserError(f"{run.directory} is an imported model, with no text of its own: name one with --data FILE")
        remedy = "to evaluate its validation split, put that text back; to evaluate another, name it with --data FILE"
        dataset = reopen_dataset(run.metadata, data, remedy=remedy)
        held, characters, utf8 = dataset.val, dataset.val_characters, dataset.val_bytes
    elif DataConfig(path=path).is_packed:
        chat = DataConfig(path=path).is_chat
        encoded = (
            encode_all(path, run.tokenizer, run.template)
            if chat
            else encode_pairs(path, run.tokenizer, prefixed=run.metadata.prefixed)
        )
        what, documents = "conversation" if chat else "pair", list(encoded)
        if not documents:
            raise UserError(f"{path} is empty: needs a {what} on each line")
        held, characters, utf8 = in_memory(documents, config.block_size, encoder=config.n_encoder_layer > 0), None, None
        if not len(held):
            answer = " with an answer" if chat else ""
            raise UserError(f"{path} has no {what}{answer} that ends within {config.block_size} tokens")
    else:
        (ids, text), prefix = encode_whole(user_files(path), run.tokenizer), run.tokenizer.prefix
        needed = 1 if prefix else 2
        if len(ids) < needed:
            raise UserError(f"{path} has {len(ids)} tokens, needed at least {needed}")
        held, characters, utf8 = Tokens([np.array(prefix, np.int32), ids]), len(text), len(text.encode())
    batch_size = run.experiment.train.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if not isinstance(held, Tokens) and stride != config.block_size:
        raise UserError(f"stride={stride} is for texts: conversations are read whole, so leave it out")
    pairs = data.is_pairs if path is None else DataConfig(path=path).is_pairs
    if beams is not None and not pairs:
        raise UserError(f"beams={beams} is for pairs of texts: leave it out")
    if config.n_encoder_layer and not pairs:
        raise UserError(f"{path} has no pairs, which a model with an encoder needs: give a .tsv file with --data FILE")
    windows = validation_batches(
        held, block_size=config.block_size, batch_size=batch_size, stride=stride, prefix_length=len(prefix)
    )
    loss, count = mean_loss(functools.partial(_eval_step, model=run.model), run.params, windows)
    if not math.isfinite(loss):
        warnings.warn(f"the loss is {loss}: the model's logits are not finite", UserWarning, stacklevel=2)
    # A first token that nothing is before is not counted, nor is what it spells: a ratio of the whole.
    bits = loss / math.log(2) * (len(held) - len(prefix))
    of_documents: dict[str, Any] = {}
    if isinstance(held, Conversations):
        of_documents = {"left_out": held.left_out} | ({} if pairs else {"shortened": held.shortened})
        of_documents |= exact_matches(run, held, beams=beams) if pairs else {}
    return {
        "loss": loss,
        "perplexity": _exp(loss),
        "tokens": count,
        "stride": stride,
        "bits_per_byte": None if utf8 is None else bits / utf8,
        "bits_per_character": None if characters is None else bits / characters,
        **of_documents,
    }


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def text_table(found: dict[str, Any]) -> str:
    """What `evaluate_run` found, for a reader."""
    text = f"{found['tokens']:,} tokens: loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.3f}"
    if "exact" in found:
        missed = "".join(f"\n  {source} -> {written}, not {target}" for source, target, written in found["missed"])
        fit = f" that fit in the context, which {found['left_out']:,} do not," if found["left_out"] else ""
        text += (
            f"\n{found['exact']:.2%} of {found['pairs']:,} pairs{fit} exact (standard error {found['exact_error']:.2%})"
        )
        return text + (f"; of the others:{missed}" if missed else "")
    if found.get("left_out") or found.get("shortened"):
        text += (
            f"\nlonger than the context: {found['left_out']:,} conversations, which are left out, and "
            f"{found['shortened']:,}, which end after the last answer that fits"
        )
    units = {"byte": found["bits_per_byte"], "character": found["bits_per_character"]}
    bits = ", ".join(f"{value:.4f} bits per {unit}" for unit, value in units.items() if value is not None)
    return f"{text}\n{bits}" if bits else text
