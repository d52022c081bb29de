"""A run directory: what is written there, and what is read back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt.cluster.multihost import one_copy, whole_everywhere
from jaxgpt.config import Experiment, Precision
from jaxgpt.config.validate import check_count, short, to_python
from jaxgpt.data.chat.encode import end_of_turn, prompt_ids
from jaxgpt.data.chat.template import ChatTemplate, find_template
from jaxgpt.data.chat.template import fingerprint as template_fingerprint
from jaxgpt.data.pairs import END, pair_prompt
from jaxgpt.data.tokenizer import Tokenizer, fingerprint, start_token
from jaxgpt.errors import UserError
from jaxgpt.hf.source import end_tokens
from jaxgpt.model import GPT
from jaxgpt.parallel.device import compute_options
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.runs.checkpoint import open_checkpoints
from jaxgpt.runs.find import find_run
from jaxgpt.runs.manifest import Removed
from jaxgpt.runs.metadata import RunMetadata, load_run_tokenizer, read_metadata
from jaxgpt.runs.pretrained import restored_params
from jaxgpt.sample.beam import beam_search
from jaxgpt.sample.detokenize import TextStream, pieces
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import stream
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.sample.score import Likelihood, likelihoods, score
from jaxgpt.sample.speculative import speculate

STOP_STRINGS_EVERY = 32  # tokens between looks for stop strings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model and all that is needed to use it."""

    directory: Path
    metadata: RunMetadata
    experiment: Experiment
    model: GPT
    params: dict
    tokenizer: Tokenizer
    step: int  # optimiser steps that made these parameters
    val_loss: float | None  # nats per token at that step, if it was measured

    def sample(self, prompt: str | list[str], *, max_new_tokens: int = 200, **options: Any) -> str | list[str]:
        """What the model writes after `prompt` (without it); a list of prompts gives a list of texts.

        An empty prompt starts from the end-of-text token, a newline, or token 0, whichever the tokenizer has. A text
        ends after max_new_tokens, at the end-of-text token, at an eos_token_id of an imported model, or before a stop
        string, and past the context it goes on as `generate` says. The same seed gives a prompt the same text, on every
        call and in every batch.

        chat: each prompt is what a user says, and the text is the assistant's answer, by `template`.
        seed: 0. stop: strings. cache_dtype: see `generate`.
        temperature (None: the experiment's `train.sample_temperature`), top_k, top_p, min_p, repetition_penalty,
            greedy: see `Sampling`.
        draft: a Run with the same tokenizer, smaller and faster, that guesses ahead: see `speculate`. With it, a seed
            gives another text of the same distribution.
        beams: instead of drawing, the likeliest text that a search with so many beams finds: see `beam_search`.

        Of a run that was trained on pairs a prompt is a source, and the text is its target. A prompt with a tab in it
        has after that how the target begins, which the text goes on with.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise UserError("no prompts: give a text, or a list of at least one")
        if options.get("beams") is not None:
            texts = self._searched(prompts, max_new_tokens, **options)
            return texts[0] if isinstance(prompt, str) else texts
        how, stop = self._how(max_new_tokens=max_new_tokens, **options), options.get("stop", ())
        if options.get("draft") is not None:
            before = [prompts[:n].count(p) for n, p in enumerate(prompts)]  # equal ones draw by keys of their own
            keys = [jax.random.fold_in(how["key"], n) if n else how["key"] for n in before]
            texts = ["".join(self._pieces(p, how | {"key": k}, options)) for p, k in zip(prompts, keys, strict=True)]
            return texts[0] if isinstance(prompt, str) else texts
        del how["draft"]
        streams, texts = [TextStream(self.tokenizer, stop) for _ in prompts], [""] * len(prompts)
        # Stop strings are looked for every so often; without any the program need not come back before the end.
        every = STOP_STRINGS_EVERY if stop else max(how["max_new_tokens"] - 1, 1)
        rows, sources = self._ids(prompts, options.get("chat", False))
        for news in stream(*self.decoder, rows, **how, every=every, sources=sources):
            texts = [text + s.push(new) for text, s, new in zip(texts, streams, news, strict=True)]
            if all(s.stopped for s in streams):
                break
        texts = [text + s.rest() for text, s in zip(texts, streams, strict=True)]
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, *, max_new_tokens: int = 200, every: int = 8, **options: Any) -> Iterator[str]:
        """The text that `sample` returns, in pieces as it is written: the first token at once, then some at a time.

        every: tokens between looks. The other options are those of `sample`.
        """
        yield from self._pieces(prompt, self._how(max_new_tokens=max_new_tokens, **options), options, every)

    def _pieces(self, prompt: str, how: dict[str, Any], options: dict[str, Any], every: int = 8) -> Iterator[str]:
        """See `stream`. how: the options as `_how` has them."""
        draft, (rows, sources) = how.pop("draft"), self._ids([prompt], options.get("chat", False))
        if draft is None:
            news = (rows[0] for rows in stream(*self.decoder, rows, **how, every=every, sources=sources))
        else:
            (model, params), (small, small_params) = self.decoder, draft.decoder
            news = speculate(model, params, small, small_params, rows[0], **how, every=every)
        yield from pieces(self.tokenizer, news, options.get("stop", ()))

    def score(self, texts: list[str]) -> list[Score]:
        """How well the model foresees each text, after the tokens that its tokenizer begins texts with."""
        if isinstance(texts, str):
            raise UserError(f"texts={short(texts)}: needs a list of texts")
        prefix = self.tokenizer.prefix
        ids = [self.tokenizer.encode(text).tolist() for text in texts]
        found = [all_of[len(prefix) :] for all_of in score(*self.decoder, [[*prefix, *row] for row in ids])]
        unseen = 0 if prefix else 1  # tokens that nothing is before
        return [
            Score(
                logprobs=logprobs.tolist(),
                bits=-float(np.sum(logprobs[unseen:], dtype=np.float64)) / math.log(2),
                tokens=max(len(row) - unseen, 0),
                characters=max(len(text) - len(self.tokenizer.decode(row[:unseen])), 0),
            )
            for text, row, logprobs in zip(texts, ids, found, strict=True)
        ]

    def likelihoods(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, batch_size: int | None = None
    ) -> list[Likelihood]:
        """How likely the model finds the second list of ids of each pair, given the first: see `sample.score`.

        `pair_ids` there makes them of texts. batch_size: pairs that are read together; None: as many as in training.
        """
        together = self.experiment.train.batch_size if batch_size is None else batch_size
        return likelihoods(*self.decoder, pairs, batch_size=together)

    def packed(self, weights: Precision | None = None) -> Run:
        """The same run with parameters as decoding reads them, in "float32", "bfloat16" or "int8".

        For sampling and evaluation in less memory: see `for_decoding`. Without it `sample` keeps a copy of its own.
        """
        model, params = for_decoding(self.model, self.params, weights)
        return dataclasses.replace(self, model=model, params=params)

    @functools.cached_property
    def decoder(self) -> tuple[GPT, dict]:
        """(model, parameters) as decoding reads them."""
        return for_decoding(self.model, self.params)

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """How it was taught to read conversations: the tokenizer's own template, or one of `data.template`."""
        template = find_template(self.tokenizer, self.directory, prefixed=self.metadata.prefixed)
        known = self.metadata.data.get("template_sha256")
        if known is not None and known != template_fingerprint(template):
            raise UserError(
                f"the chat template in {self.directory / 'tokenizer_config.json'} is not the one that the run was trained "
                "with: put back the file that experiment.json names by its SHA-256"
            )
        return template

    def _ids(self, prompts: Sequence[str], chat: bool) -> tuple[list[list[int]], list[list[int]] | None]:
        """What the model is to continue, and what its encoder, if it has one, is to read."""
        if chat:
            return [prompt_ids(self.template, self.tokenizer, prompt) for prompt in prompts], None
        if not self.experiment.data.is_pairs:
            ids = [[*self.tokenizer.prefix, *self.tokenizer.encode(prompt).tolist()] for prompt in prompts]
            return [row or [start_token(self.tokenizer)[0]] for row in ids], None
        prefixed = not self.tokenizer.prefix or self.metadata.prefixed
        pairs = [pair_prompt(prompt, self.tokenizer, prefixed=prefixed) for prompt in prompts]
        if self.model.config.n_encoder_layer:
            return [target for _, target in pairs], [source for source, _ in pairs]
        return [[*source, *target] for source, target in pairs], None

    def _searched(
        self, prompts: list[str], max_new_tokens: int, *, beams: int, chat: bool = False, **options: Any
    ) -> list[str]:
        if other := [name for name, value in options.items() if value and name != "seed"]:
            raise UserError(f"beams={beams} draws nothing, so leave out {', '.join(other)}")
        rows, sources = self._ids(prompts, chat)
        found = beam_search(
            *self.decoder,
            rows,
            beams=beams,
            max_new_tokens=max_new_tokens,
            stop_tokens=self._stops(chat),
            vocab_size=self.tokenizer.vocab_size,
            sources=sources,
        )
        return [self.tokenizer.decode(texts[0]) for texts in found.tokens]

    def _stops(self, chat: bool) -> list[int]:
        """Tokens that end a text."""
        ends = [self.tokenizer.end_of_text, end_of_turn(self.template, self.tokenizer) if chat else None]
        if self.experiment.data.is_pairs:
            ends.append(int(self.tokenizer.encode(END)[0]))
        if self.experiment.train.init_from is None:  # else it has learnt from other texts, perhaps by other tokens
            ends += [end for end in end_tokens(self.directory) if 0 <= end < self.tokenizer.vocab_size]
        return list(dict.fromkeys(end for end in ends if end is not None))

    def _how(
        self,
        *,
        max_new_tokens: int,
        seed: int = 0,
        stop: Sequence[str] = (),
        cache_dtype: Precision | None = None,
        draft: Run | None = None,
        temperature: float | None = None,
        chat: bool = False,
        **filters: Any,
    ) -> dict[str, Any]:
        """Options of `sample` as those of `generate`, checked."""
        TextStream(self.tokenizer, stop)
        if draft is not None and fingerprint(draft.tokenizer) != fingerprint(self.tokenizer):
            raise UserError(
                f"the tokenizer of the draft {draft.directory} is not that of {self.directory}: train both on the same data"
            )
        if temperature is None:
            temperature = self.experiment.train.sample_temperature
        max_new_tokens, seed = check_count("max_new_tokens", max_new_tokens), check_count("seed", seed, 0, 2**32 - 1)
        if self.model.config.n_encoder_layer:
            if draft is not None:
                raise UserError("a draft guesses for a model without an encoder: leave it out")
            max_new_tokens = min(max_new_tokens, self.model.config.block_size)
        return {
            "key": jax.random.key(seed),
            "max_new_tokens": max_new_tokens,
            "sampling": Sampling(temperature=temperature, **filters),
            "stop_tokens": self._stops(chat),
            "vocab_size": self.tokenizer.vocab_size,
            "cache_dtype": cache_dtype,
            "draft": draft,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What a text costs. A first token that nothing is before is not counted."""

    logprobs: list[float]  # nats, one for each token; nan for such a first one
    bits: float  # of all other tokens together
    tokens: int  # that many
    characters: int  # that they make

    @property
    def bits_per_token(self) -> float:
        return self.bits / self.tokens if self.tokens else math.nan

    @property
    def bits_per_character(self) -> float:
        return self.bits / self.characters if self.characters else math.nan


def load(run: str | Path | None = None, *, which: str | int = "best", average: int | None = None) -> Run:
    """The run in a directory (None: the newest under `runs/`), ready to sample on this machine.

    which: "best", the checkpoint with the lowest validation loss, "last", or the step of one that is kept.
    average: instead of one, the mean of the parameters of so many checkpoints, the last ones, which is less noisy where
        the learning rate has not come down (Vaswani et al. 2017 take 5). `train.keep_last` has to keep as many. The
        best so far count too: for even spacing make `train.eval_every` a multiple of `train.checkpoint_every`.
    Raises `UserError` if there is no run or no checkpoint.
    """
    return load_run(read_metadata(find_run(run)), which=which, average=average)


def load_run(metadata: RunMetadata, *, which: str | int = "best", average: int | None = None) -> Run:
    """Load a run whose metadata are read: see `load`."""
    for _ in range(4):
        with contextlib.suppress(Removed):  # the next one may last until it is read
            return _load(metadata, which, average)
    return _load(metadata, which, average)


def _load(metadata: RunMetadata, which: str | int, average: int | None) -> Run:
    which = to_python(which)
    if which not in ("best", "last") and (isinstance(which, bool) or not isinstance(which, int)):
        raise UserError(f"which={short(which)}: needs best, last or a step")
    average = None if average is None else check_count("average", average)
    directory, experiment, config = metadata.directory, metadata.experiment, metadata.model
    tokenizer = load_run_tokenizer(metadata)
    options = compute_options(config, experiment.train, packed=experiment.data.is_packed, required=False)
    model = GPT(config, **options.for_model())
    checkpoints = open_checkpoints(directory)
    try:
        if isinstance(which, int):
            step = checkpoints.good(before=which + 1)
            if step != which:
                raise UserError(
                    f"which={which}: {directory} needs a good checkpoint of that step, and has {checkpoints.steps()}"
                )
        else:
            step = checkpoints.good(which if average is None else "last")
        if step is None:
            raise Removed(f"the checkpoints of {directory} were removed while they were read")
        like = with_shardings(model.shapes(), whole_everywhere())
        params, earlier = restored_params(metadata, checkpoints, step, like), step
        for number in range(1, average or 1):
            earlier = checkpoints.good(before=earlier)
            if earlier is None:
                raise UserError(
                    f"average={average}: {directory} has {number} checkpoints, the last up to step {step}. Give {number} or "
                    "fewer; --train.keep-last keeps more"
                )
            more = restored_params(metadata, checkpoints, earlier, like)
            params = jax.tree.map(lambda mean, x, n=number: mean + (x - mean) / (n + 1), params, more)
        params = one_copy(params)
        val_loss = checkpoints.val_loss(step) if average in (None, 1) else None
    finally:
        checkpoints.close()
    return Run(
        directory=directory,
        metadata=metadata,
        experiment=experiment,
        model=model,
        params=params,
        tokenizer=tokenizer,
        step=step,
        val_loss=val_loss,
    )
