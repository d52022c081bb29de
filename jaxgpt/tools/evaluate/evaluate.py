"""Evaluate a run: its loss on held-out text, and the share of pairs that it translates exactly."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.batch import Batch
from jaxgpt.config import DataConfig
from jaxgpt.config.validate import check_count, check_whole
from jaxgpt.data.conversations import Conversations, encode_all
from jaxgpt.data.corpus import find_user_files
from jaxgpt.data.dataset import encode_whole
from jaxgpt.data.pairs import Pairs, collect_documents, encode_pairs
from jaxgpt.data.pipeline import Split, Tokens, validation_batches
from jaxgpt.errors import UserError
from jaxgpt.loss import make_loss
from jaxgpt.model import GPT
from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.run import Run
from jaxgpt.runs.training import reopen_dataset
from jaxgpt.sample import Decoding, Sampling
from jaxgpt.sample.engine import stream
from jaxgpt.sample.quantize import with_decode_matrices
from jaxgpt.sample.search import beam_search
from jaxgpt.train import Params, eval_step

PAIRS_AT_ONCE = 256  # pairs that are decoded together
LARGEST_EXPONENT = math.log(sys.float_info.max)  # largest loss whose perplexity a float can hold


@functools.partial(jax.jit, static_argnames="model")
@with_decode_matrices
def _eval_step(params: Params, batch: Batch, model: GPT) -> tuple[jax.Array, jax.Array]:
    return eval_step(params, batch, loss_fn=make_loss(model))


class HeldOut(NamedTuple):
    """Data that a run is evaluated on."""

    split: Split
    is_pairs: bool = False
    characters: int | None = None  # None: only token ids are known
    utf8: int | None = None  # bytes
    prefix: int = 0  # leading tokens that are only context


def evaluate_run(
    run: Run,
    path: str | None = None,
    *,
    stride: int | None = None,
    batch_size: int | None = None,
    beams: int | None = None,
) -> dict[str, Any]:
    """Return the loss of a run on its validation split or on a file, with every target scored once.

    Args:
        run: the run to evaluate.
        path: conversations (.jsonl), pairs (.tsv) or a text, after its tokenizer's prefix. None: the validation split.
        stride: tokens from the start of one window to the start of the next: a target has more than block_size - stride
            tokens of context, except in the first window. None means block_size, windows without overlap.
        batch_size: windows per batch. None means the batch size of the run's training.
        beams: see `count_exact_matches`.

    Returns:
        loss (nats per token), perplexity, tokens, stride, bits_per_byte (UTF-8) and bits_per_character, the last two
        None if only token ids are known. Conversations and pairs add left_out, the number that do not fit into the
        context and are not scored. Conversations add shortened, the number that are cut after the last answer that
        fits. Pairs add the results of `count_exact_matches` for those that fit.

    Raises:
        UserError: if an option does not suit the model or the data, or the file cannot be read or has nothing to score.
    """
    config = run.model.config
    stride = config.block_size if stride is None else check_whole("stride", stride)
    if not 1 <= stride <= config.block_size:
        raise UserError(f"stride={stride}: needs at least 1 and at most block_size={config.block_size}")
    held_out = _held_out(run, path)
    split = held_out.split
    batch_size = run.experiment.train.batch_size if batch_size is None else check_count("batch_size", batch_size)
    if not isinstance(split, Tokens) and stride != config.block_size:
        raise UserError(f"stride={stride} is for texts: conversations are never split into windows, so leave it out")
    if beams is not None and not held_out.is_pairs:
        raise UserError(f"beams={beams} is for pairs of texts: leave it out")
    if config.n_encoder_layer and not held_out.is_pairs:
        raise UserError(f"{path} has no pairs, which a model with an encoder needs: give a .tsv file with --data FILE")
    windows = validation_batches(
        split, block_size=config.block_size, batch_size=batch_size, stride=stride, prefix_length=held_out.prefix
    )
    loss, count = mean_loss(functools.partial(_eval_step, model=run.model), run.params, windows)
    if not math.isfinite(loss):
        warnings.warn(f"the loss is {loss}: the model's logits are not finite", UserWarning, stacklevel=2)
    # The first token of a text is not scored, but its characters are counted: scale the mean to all tokens.
    bits = loss / math.log(2) * (len(split) - held_out.prefix)
    found = {
        "loss": loss,
        "perplexity": math.inf if loss > LARGEST_EXPONENT else math.exp(loss),
        "tokens": count,
        "stride": stride,
        "bits_per_byte": None if held_out.utf8 is None else bits / held_out.utf8,
        "bits_per_character": None if held_out.characters is None else bits / held_out.characters,
    }
    if isinstance(split, Conversations):
        found["left_out"] = split.left_out
        found |= count_exact_matches(run, split, beams=beams) if held_out.is_pairs else {"shortened": split.shortened}
    return found


def _held_out(run: Run, path: str | None) -> HeldOut:
    if path is None:
        if run.metadata.imported is not None:
            raise UserError(f"{run.directory} is an imported model, with no text of its own: name one with --data FILE")
        remedy = "to evaluate its validation split, put that text back; to evaluate another, name it with --data FILE"
        dataset = reopen_dataset(run.metadata, run.experiment.data, remedy=remedy)
        return HeldOut(dataset.val, run.experiment.data.is_pairs, dataset.val_characters, dataset.val_bytes)
    data, block_size, tokenizer = DataConfig(path=path), run.model.config.block_size, run.tokenizer
    if data.is_packed:
        what = "conversation" if data.is_chat else "pair"
        if data.is_chat:
            documents = list(encode_all(path, tokenizer, run.prompt_format.template))
        else:
            documents = list(encode_pairs(path, tokenizer))
        if not documents:
            raise UserError(f"{path} is empty: needs a {what} on each line")
        split = collect_documents(documents, block_size, encoder=run.model.config.n_encoder_layer > 0)
        if not len(split):
            answer = " with an answer" if data.is_chat else ""
            raise UserError(f"{path} has no {what}{answer} that ends within {block_size} tokens")
        return HeldOut(split, data.is_pairs)
    (ids, text), prefix = encode_whole(find_user_files(path), tokenizer), tokenizer.prefix
    if len(ids) < (needed := 1 if prefix else 2):
        raise UserError(f"{path} has {len(ids)} tokens, needed at least {needed}")
    split = Tokens([np.array(prefix, np.int32), ids])
    return HeldOut(split, False, len(text), len(text.encode()), len(prefix))


def count_exact_matches(run: Run, pairs: Conversations, *, beams: int | None = None) -> dict[str, Any]:
    """Count the pairs for which the run generates exactly the target, token for token.

    Args:
        run: the run to evaluate.
        pairs: the pairs, each of which fits into the context.
        beams: the width of a beam search. None means greedy decoding.

    Returns:
        exact (a fraction), exact_error (its standard error), pairs (the number of pairs), and missed: (source, target,
        completion) of up to five pairs that are not exact.
    """
    tokenizer, right, missed = run.tokenizer, 0, []
    order = np.argsort(pairs.lengths, kind="stable")  # by length, so that the pairs of a batch finish together
    for first in range(0, len(order), PAIRS_AT_ONCE):
        parts = [_split_pair(pairs, int(n)) for n in order[first : first + PAIRS_AT_ONCE]]
        sources, prompts, targets = zip(*parts, strict=True)
        # Greedy decoding needs no more tokens than the longest target with its end token. A beam search gets all that
        # fit, because its result may depend on the limit.
        decoding = Decoding(
            max_new_tokens=max(map(len, targets)) if beams is None else run.model.config.block_size,
            sampling=Sampling(greedy=True),
            stop_tokens=[int(targets[0][-1])],
            vocab_size=tokenizer.vocab_size,
        )
        inputs = sources if isinstance(pairs, Pairs) else None
        if beams is None:
            key = jax.random.key(0)
            (completions,) = stream(*run.decode_params, prompts, decoding, key=key, every=None, sources=inputs)
        else:
            found = beam_search(*run.decode_params, prompts, decoding, beams=beams, sources=inputs)
            completions = [best for best, *_ in found.tokens]
        for source, target, completion in zip(sources, targets, completions, strict=True):
            is_exact = completion == target[:-1]
            right += is_exact
            if not is_exact and len(missed) < 5:
                source, *others = (tokenizer.decode(ids) for ids in (source, target[:-1], completion))
                missed.append([source.removeprefix(tokenizer.decode(tokenizer.prefix)), *others])
    share = right / len(order)
    error = (share * (1 - share) / len(order)) ** 0.5
    return {"exact": share, "exact_error": error, "pairs": len(order), "missed": missed}


def _split_pair(pairs: Conversations, number: int) -> tuple[list[int], list[int], list[int]]:
    """Return the token ids (source, prompt, target with its end token)."""
    ids, answers = pairs.read(number)
    start = int(np.argmax(answers))
    prompt = ids[start - 1 if isinstance(pairs, Pairs) else 0 : start]
    return ids[: start - 1].tolist(), prompt.tolist(), ids[start:].tolist()


def format_evaluation(found: dict[str, Any]) -> str:
    """Return the results of `evaluate_run` as text."""
    text = f"{found['tokens']:,} tokens: loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.3f}"
    if "exact" in found:
        missed = "".join(f"\n  {source} -> {written}, not {target}" for source, target, written in found["missed"])
        text += f"\n{found['exact']:.2%} of {found['pairs']:,} pairs exact (standard error {found['exact_error']:.2%})"
        text += f"; {found['left_out']:,} more do not fit in the context" if found["left_out"] else ""
        return text + (f"\nnot exact, for example:{missed}" if missed else "")
    if found.get("left_out") or found.get("shortened"):
        text += (
            f"\nlonger than the context: {found['left_out']:,} conversations are left out, and "
            f"{found['shortened']:,} are cut after the last answer that fits"
        )
    units = {"byte": found["bits_per_byte"], "character": found["bits_per_character"]}
    bits = ", ".join(f"{value:.4f} bits per {unit}" for unit, value in units.items() if value is not None)
    return f"{text}\n{bits}" if bits else text
