"""Evaluate a run: its loss on held-out text."""

from __future__ import annotations

import functools
import math
import sys
import warnings

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config.validate import check_count, check_value
from jaxgpt.data.conversations import Conversations, encode_all
from jaxgpt.data.corpus import find_user_files
from jaxgpt.data.dataset import DataConfig, encode_whole
from jaxgpt.data.mixture import Mixture, parts_of
from jaxgpt.data.pipeline import Tokens, validation_batches
from jaxgpt.errors import UserError
from jaxgpt.files import Json
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.model import GPT
from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.run import Run
from jaxgpt.runs.resume import reopen_dataset
from jaxgpt.sample.quantize import with_decode_matrices
from jaxgpt.train import Params, eval_step

NATS = ObjectiveConfig.unit
LARGEST_EXPONENT = math.log(sys.float_info.max)  # largest loss with a perplexity that a float can hold


@functools.partial(jax.jit, static_argnames=("model", "objective"))
@with_decode_matrices
def _eval_step(params: Params, batch: Batch, model: GPT, objective: ObjectiveConfig) -> tuple[jax.Array, jax.Array]:
    return eval_step(params, batch, loss_fn=objective.make_loss(model))


def evaluate_run(
    run: Run, path: str | None = None, *, stride: int | None = None, batch_size: int | None = None
) -> Json:
    """Return the loss of a run on its validation split or on a file, with every target scored once.

    Args:
        path: conversations (.jsonl) or a text, after its tokenizer's prefix: the loss of their next tokens, whatever the
            run's objective is. None means the validation split, by the objective.
        stride: tokens from the start of one window to the start of the next: a target has more than block_size - stride
            tokens of context, except in the first window. None means block_size, windows without overlap.
        batch_size: windows per batch. None means the batch size of the run's training.

    Returns:
        loss, its unit, perplexity, tokens, stride, bits_per_byte (UTF-8) and bits_per_character. The last two are None
        if only token ids are known. Like perplexity, they are None if the unit is not nats per token. A mixture adds
        losses, one for each source, and its loss is their mean, by their weights. Conversations add left_out and
        shortened: how many do not fit into the context and are not scored, and how many are cut after the last answer
        that fits.

    Raises:
        UserError: if an option does not suit the model or the data, or the file cannot be read or has nothing to score.
    """
    block_size, tokenizer, prefix = run.model.config.block_size, run.tokenizer, []
    stride = block_size if stride is None else check_value("stride", stride, int)
    if not 1 <= stride <= block_size:
        raise UserError(f"stride={stride}: needs at least 1 and at most block_size={block_size}")
    characters = utf8 = None  # only token ids are known
    if path is None:
        if run.metadata.imported is not None:
            raise UserError(f"{run.directory} is an imported model, with no text of its own: name one with --data FILE")
        remedy = "to evaluate its validation split, put that text back; to evaluate another, name it with --data FILE"
        dataset = reopen_dataset(run.metadata, run.experiment.data, remedy=remedy)
        split, characters, utf8 = dataset.val, dataset.val_characters, dataset.val_bytes
    elif DataConfig(path=path).is_chat:
        encoded = list(encode_all(path, tokenizer, run.prompt_format.template))
        if not encoded:
            raise UserError(f"{path} is empty: give a conversation on each line")
        ids, answers = (np.concatenate(parts) for parts in zip(*encoded, strict=True))
        lengths = [len(one) for one, _ in encoded]
        if stride == block_size:  # which may be 131,072: logits of as many tokens fit no memory
            block_size = stride = min(block_size, max(lengths))
        split = Conversations(ids, answers, np.cumsum(lengths), block_size)
        if not len(split):
            raise UserError(f"{path} has no conversation with an answer that ends within {block_size} tokens")
    else:
        (ids, text), prefix = encode_whole(find_user_files(path), tokenizer), tokenizer.prefix
        if len(ids) < (needed := 1 if prefix else 2):
            raise UserError(f"{path} has {len(ids)} tokens, needed at least {needed}")
        split, characters, utf8 = Tokens([np.array(prefix, np.int32), ids]), len(text), len(text.encode())
    batch_size = run.experiment.train.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if not isinstance(split, Tokens | Mixture) and stride != block_size:
        raise UserError(f"stride={stride} is for texts: conversations are never split into windows, so leave it out")
    objective = run.experiment.objective if path is None else ObjectiveConfig()
    step, in_nats = functools.partial(_eval_step, model=run.model, objective=objective), objective.unit == NATS
    how = {"block_size": block_size, "batch_size": batch_size, "stride": stride, "prefix_length": len(prefix)}
    parts = parts_of(split)
    measured = {name: mean_loss(step, run.params, validation_batches(part, **how)) for name, (_, part) in parts.items()}
    loss = sum(parts[name][0] * mean for name, (mean, _) in measured.items())
    count = sum(number for _, number in measured.values())
    if not math.isfinite(loss):
        warnings.warn(f"the loss is {loss}: the model's logits are not finite", UserWarning, stacklevel=2)
    # The first token of a text is not scored, but its characters are counted: scale the mean to all tokens.
    bits = loss / math.log(2) * (len(split) - len(prefix))
    found: Json = {
        "loss": loss,
        "unit": objective.unit,
        "perplexity": (math.inf if loss > LARGEST_EXPONENT else math.exp(loss)) if in_nats else None,
        "tokens": count,
        "stride": stride,
        "bits_per_byte": bits / utf8 if utf8 and in_nats else None,
        "bits_per_character": bits / characters if characters and in_nats else None,
    }
    if isinstance(split, Mixture):
        found["losses"] = {name: mean for name, (mean, _) in measured.items()}
    if isinstance(split, Conversations):
        found |= {"left_out": split.left_out, "shortened": split.shortened}
    return found


def format_evaluation(found: Json) -> str:
    """Return the results of `evaluate_run` as text."""
    lines = [f"{found['tokens']:,} scored: loss {found['loss']:.4f} {found['unit']}"]
    if found["perplexity"] is not None:
        lines[0] += f", perplexity {found['perplexity']:.3f}"
    if found.get("left_out") or found.get("shortened"):
        cut = f"{found['shortened']:,} are cut after the last answer that fits"
        lines.append(f"longer than the context: {found['left_out']:,} conversations are left out, and {cut}")
    lines += [f"{name}: loss {loss:.4f}" for name, loss in found.get("losses", {}).items()]
    units = {"byte": found["bits_per_byte"], "character": found["bits_per_character"]}
    lines.append(", ".join(f"{value:.4f} bits per {unit}" for unit, value in units.items() if value is not None))
    return "\n".join(line for line in lines if line)
