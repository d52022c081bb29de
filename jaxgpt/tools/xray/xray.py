"""Make the X-ray page of a run: what the model computes on one text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxgpt.config.validate import check_count
from jaxgpt.data.corpus import find_user_files
from jaxgpt.data.dataset import encode_whole
from jaxgpt.data.pairs import TARGET_END, TARGET_START
from jaxgpt.data.tokens import Tokens
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.runs.resume import reopen_dataset
from jaxgpt.sample import Decoding, Sampling
from jaxgpt.sample.engine import stream
from jaxgpt.sample.state import check_ids
from jaxgpt.tools.xray.activations import capture_activations, top_activating_examples
from jaxgpt.tools.xray.page import render_page

CORPUS_TOKENS = 2**15  # searched for top activating examples; takes seconds for a small model
MOST_WEIGHTS = 2**25  # attention weights on a page, one byte each before compression


def xray(run: Run, prompt: str | Sequence[int], *, data: str | None = None, corpus_tokens: int = CORPUS_TOKENS) -> str:
    """Return a self-contained HTML page that shows what the model computes on a text.

    It shows surprise, attention, norms, the residual stream, MLP units, the logit lens, embeddings and sampling.

    Args:
        run: the run.
        prompt: the text, or its token ids; for a model with an encoder, the source.
        data: a UTF-8 file to search for the top activating examples of each MLP unit. None: the run's training text.
        corpus_tokens: tokens of that text to read, spread evenly over it. 0 means none.

    Raises:
        UserError: if the prompt is empty, longer than block_size or too long for a page, or the file cannot be used.
    """
    config, corpus_tokens = run.model.config, check_count("corpus_tokens", corpus_tokens, 0)
    if isinstance(prompt, str):
        ids = [*run.tokenizer.prefix, *run.tokenizer.encode(prompt).tolist()] if prompt else []
    else:
        ids = check_ids(run.model, prompt, "prompt").tolist()
    if not ids:
        raise UserError("the prompt is empty: give a text with --prompt TEXT")
    if len(ids) > config.block_size:
        raise UserError(
            f"the prompt has {len(ids)} tokens, and the context of {run.directory} is {config.block_size}: "
            f"give at most {config.block_size}"
        )
    texts = {"text": _generate_target(run, ids), "source": ids} if config.n_encoder_layer else {"text": ids}
    tokens, layers = max(map(len, texts.values())), config.n_layer + config.n_encoder_layer
    if (weights := layers * config.n_head * tokens**2) > MOST_WEIGHTS:
        fits = int((MOST_WEIGHTS / layers / config.n_head) ** 0.5)
        raise UserError(
            f"{tokens} tokens have {weights:,} attention weights in this model, too many for a page: "
            f"give at most {fits} tokens"
        )
    vocab_size, source = run.tokenizer.vocab_size, texts.get("source")
    activations = capture_activations(run.model, run.params, texts["text"], vocab_size, source)
    if np.isnan(activations.logits_V).any():
        raise UserError(
            f"{run.directory} gives logits that are not finite, so there is nothing to draw: use another run"
        )
    windows_NT, why = _windows(run, data, corpus_tokens)
    examples = None if windows_NT is None else top_activating_examples(run.model, run.params, windows_NT)
    return render_page(run, texts, activations, examples, why_no_corpus=why)


def _generate_target(run: Run, source: list[int]) -> list[int]:
    """Translate a source greedily with an encoder-decoder; return the tokens that its decoder reads."""
    start, end = (int(run.tokenizer.encode(text)[0]) for text in (TARGET_START, TARGET_END))
    T, vocab_size = run.model.config.block_size, run.tokenizer.vocab_size
    greedy = Sampling(greedy=True)
    decoding = Decoding(max_new_tokens=max(T - 1, 1), sampling=greedy, stop_tokens=[end], vocab_size=vocab_size)
    key = jax.random.key(0)
    ((target,),) = stream(*run.decode_params, [[start]], decoding, key=key, every=None, sources=[source])
    return [start, *target][:T]


def _windows(run: Run, data: str | None, tokens: int) -> tuple[np.ndarray | None, str]:
    """Return windows spread evenly over the run's training text, or over the file `data`; or None and the reason."""
    T = run.model.config.block_size
    if run.model.config.n_encoder_layer:
        return None, "The run was trained on pairs of texts, not on a text."
    if not tokens:
        return None, "The search is switched off (--corpus-tokens 0)."
    if data is not None:
        text: Any = Tokens([encode_whole(find_user_files(data), run.tokenizer)[0]])
        if len(text) < T:
            raise UserError(f"{data} has {len(text)} tokens, needed {T} for one window")
    else:
        if run.metadata.imported is not None:
            return None, "The model was imported without its training text: name a text with --data FILE."
        try:
            dataset = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back")
        except UserError as e:  # a run that was copied to another machine
            return None, f"The training text could not be read ({e}): name a text with --data FILE."
        text = dataset.train
        if not isinstance(text, Tokens):
            return None, "The run was trained on conversations or pairs: name a text with --data FILE."
    count = min(max(tokens // T, 1), len(text) // T)
    starts = np.linspace(0, len(text) - T, count).astype(np.int64)
    return np.stack([text.read(int(start), T) for start in starts]), ""
