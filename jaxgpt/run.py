"""Use a trained run: load, sample, stream, score."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import jax

from jaxgpt.config.serialize import suggest
from jaxgpt.config.validate import PositiveInt, check_count, check_value
from jaxgpt.data.conversations import encode_messages, find_end_of_turn
from jaxgpt.data.template import ChatTemplate, find_template
from jaxgpt.data.template import fingerprint as template_fingerprint
from jaxgpt.data.tokenizer import Tokenizer, find_start_token
from jaxgpt.data.tools import Message, Tool
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.hf.source import end_tokens
from jaxgpt.layers.block import Compute
from jaxgpt.model import GPT
from jaxgpt.parallel.device import compute_options
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.parallel.limits import count_parameters
from jaxgpt.parallel.multihost import one_copy, whole_everywhere
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.runs.bucket import name_of
from jaxgpt.runs.checkpoint import Checkpoints, open_checkpoints
from jaxgpt.runs.directory import RunMetadata, find_run, load_run_tokenizer, read_metadata
from jaxgpt.runs.pretrained import restore_merged_params
from jaxgpt.sample import MAX_NEW_TOKENS, Decoding, Precision, Sampling
from jaxgpt.sample.engine import iter_text, join_texts, stream
from jaxgpt.sample.grammar import compile_grammar
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.sample.score import LogLikelihood, Score, loglikelihood, score_texts
from jaxgpt.train import Params

STOP_STRINGS_EVERY = 32  # tokens between searches for stop strings


class SampleOptions(TypedDict, total=False):
    """Options of `Run.sample` and `Run.stream`, each of which may be left out."""

    max_new_tokens: int  # most tokens of a completion. 400 unless given
    seed: int  # the same seed gives the same text. 0 unless given
    # divisor of the logits. None means the experiment's `train.sample_temperature`
    temperature: float | None
    top_k: int | None  # see `Sampling`
    top_p: float | None  # see `Sampling`
    min_p: float | None  # see `Sampling`
    repetition_penalty: float | None  # see `Sampling`
    frequency_penalty: float | None  # see `Sampling`
    presence_penalty: float | None  # see `Sampling`
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]  # see `Sampling`
    greedy: bool  # see `Sampling`
    stop: Sequence[str]  # texts. A completion ends before the first of them
    chat: bool  # each prompt is the turn of a user, and the completion an answer
    cache_dtype: Precision | None  # see `Decoding`
    slots: int | None  # see `Decoding`
    schema: dict[str, Any] | None  # JSON Schema that the completion matches: see `compile_grammar`
    regex: str | None  # expression, in Rust's syntax, that the whole completion matches
    choices: Sequence[str] | None  # texts, of which the completion is one


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Encode prompts as plain text, or as the user's turn of a conversation."""

    metadata: RunMetadata
    tokenizer: Tokenizer

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """Return the chat template of training, which is the tokenizer's own or the default of `data.template`."""
        known = self.metadata.data.get("template_sha256")
        template = find_template(self.tokenizer, self.metadata.directory, is_own=known is not None)
        if known is not None and known != template_fingerprint(template):
            directory = self.metadata.directory
            raise UserError(f"the chat template in {directory} is not training's: put back its tokenizer_config.json")
        return template

    def encode(self, prompts: Sequence[str], chat: bool) -> list[list[int]]:
        """Return the ids of each prompt. With `chat` each prompt is a user's turn."""
        if chat:
            return [self.encode_messages([{"role": "user", "content": prompt}]) for prompt in prompts]
        ids = [[*self.tokenizer.prefix, *self.tokenizer.encode(prompt).tolist()] for prompt in prompts]
        return [row or [find_start_token(self.tokenizer)[0]] for row in ids]

    def encode_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = (), begin: str = "") -> list[int]:
        """Return the ids of a conversation, of the header of the assistant's turn, and of the beginning of its answer."""
        return encode_messages(self.template, self.tokenizer, messages, tools, begin)

    def stop_tokens(self, chat: bool) -> list[int]:
        """Return the ids that end a completion. chat: also the end of the assistant's turn."""
        ends = [self.tokenizer.end_of_text, find_end_of_turn(self.template, self.tokenizer) if chat else None]
        # A run with init_from was trained on other data, perhaps with other stop tokens.
        if self.metadata.experiment.train.init_from is None:
            ends += [end for end in end_tokens(self.metadata.directory) if 0 <= end < self.tokenizer.vocab_size]
        return list(dict.fromkeys(end for end in ends if end is not None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A trained model with all that is needed to use it."""

    directory: Path  # the run directory
    metadata: RunMetadata  # what `experiment.json` says
    experiment: Experiment  # what was trained, and how
    model: GPT  # the model, for this machine
    params: Params  # its parameters
    tokenizer: Tokenizer  # the tokenizer that it was trained with
    step: int  # optimiser steps that produced these parameters
    val_loss: float | None  # validation loss at that step, in nats per token. None means that it was not measured

    def __repr__(self) -> str:
        size = f"{count_parameters(self.model.shapes()):,} parameters"
        loss = "not measured" if self.val_loss is None else f"{self.val_loss:.4f} {self.experiment.objective.unit}"
        return f"Run({self.experiment.name}, {size}, step {self.step:,}, validation loss {loss}, in {name_of(self.directory)})"

    def sample(self, prompt: str | list[str], **options: Unpack[SampleOptions]) -> str | list[str]:
        """Return the completion of a prompt, without the prompt, or a list of completions of a list of prompts.

        It ends after `max_new_tokens`, at the end-of-text token, at an eos_token_id of an imported model, or before one of
        the strings in `stop`. It depends on the prompt and the seed, and not on the other prompts. An empty prompt means
        the end-of-text token, a newline, or token 0, the first of them that exists. `options` are `SampleOptions`.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not prompts:
            raise UserError("no prompts: give a text, or a list of at least one")
        stop = options.get("stop", ())
        contexts, batches = self._generate(prompts, STOP_STRINGS_EVERY if stop else None, options)
        texts = join_texts(self.tokenizer, batches, contexts, stop)
        return texts[0] if isinstance(prompt, str) else texts

    def stream(self, prompt: str, *, every: int | None = 8, **options: Unpack[SampleOptions]) -> Iterator[str]:
        """Yield the completion that `sample` returns, in pieces as they are generated.

        Args:
            prompt: a text.
            every: tokens in each piece but the first, which has one. None means one piece.
            options: see `SampleOptions`.
        """
        (context,), batches = self._generate([prompt], every, options)
        new_ids = (batch[0] for batch in batches)
        yield from iter_text(self.tokenizer, new_ids, options.get("stop", ()), context)

    def _generate(
        self, prompts: Sequence[str], every: int | None, options: SampleOptions
    ) -> tuple[list[list[int]], Iterator[list[list[int]]]]:
        """Return the ids before each completion, and an iterator of the new ones of all."""
        known = SampleOptions.__optional_keys__
        for name in options:
            if name not in known:
                raise UserError(f"unknown option {name}{suggest(name, known)}")

        defaults = {"max_new_tokens": MAX_NEW_TOKENS, "seed": 0, "chat": False}
        given: dict[str, Any] = defaults | {**options}
        given["logit_bias"] = tuple(dict(given.get("logit_bias", ())).items())
        if given.get("temperature") is None:
            given["temperature"] = self.experiment.train.sample_temperature

        def pick(*names: str) -> dict[str, Any]:
            return {name: given[name] for name in names if name in given}

        chat = given["chat"]
        key = jax.random.key(check_count("seed", given["seed"], 0, 2**32 - 1))
        decoding = Decoding(
            sampling=Sampling(**pick(*Sampling.__dataclass_fields__)),
            stop_tokens=self.prompt_format.stop_tokens(chat),
            vocab_size=self.tokenizer.vocab_size,
            grammar=compile_grammar(self.tokenizer, **pick("schema", "regex", "choices")),
            **pick("max_new_tokens", "cache_dtype", "slots"),
        )
        ids = self.prompt_format.encode(prompts, chat)
        contexts = [row if text or chat else [] for text, row in zip(prompts, ids, strict=True)]
        return contexts, stream(*self.decode_params, ids, decoding, key=key, every=every)

    def score(self, texts: list[str]) -> list[Score]:
        """Return how well the model predicts each text: log-probabilities, and bits per character.

        Bits per character compare texts of any length and models with any tokenizer. A text longer than the context is
        read in windows: see `jaxgpt.score`.
        """
        return score_texts(*self.decode_params, self.tokenizer, texts)

    def loglikelihood(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, batch_size: int | None = None
    ) -> list[LogLikelihood]:
        """Return the log-likelihood of each pair's second list of ids given its first: see `sample.score`.

        `pair_ids` there encodes pairs of texts. batch_size: pairs evaluated together. None means as in training.
        """
        batch_size = self.experiment.train.batch_size if batch_size is None else batch_size
        return loglikelihood(*self.decode_params, pairs, batch_size=batch_size)

    def for_decoding(self, weights: Precision | None = None, *, donate: bool = False) -> Run:
        """Return the run with its parameters in the layout that decodes fastest: see `jaxgpt.for_decoding`.

        It samples and scores in less memory: `sample` on the original run keeps a second copy of its parameters.
        weights: "float32", "bfloat16" or "int8". None means the dtype of the model. donate: take the parameters out of
        this run, which cannot be used any more.
        """
        model, params = for_decoding(self.model, self.params, weights, donate=donate)
        return dataclasses.replace(self, model=model, params=params)

    @functools.cached_property
    def decode_params(self) -> tuple[GPT, Params]:
        """Return the model and its parameters in the layout that decodes fastest."""
        return for_decoding(self.model, self.params)

    @functools.cached_property
    def prompt_format(self) -> PromptFormat:
        """Return the format of the run's prompts."""
        return PromptFormat(self.metadata, self.tokenizer)


def load(
    run: str | Path | None = None,
    *,
    which: str | int = "best",
    average: int | None = None,
    trust_code: bool = False,
    setup: bool = True,
) -> Run:
    """Load the run in a directory, ready to sample on this machine. Raises `UserError` if it has no checkpoint.

    Args:
        run: the run directory, or its address in a bucket. None means the newest under `runs/`.
        which: "best" for the checkpoint with the lowest validation loss, "last" for the newest, or a step.
        average: return the mean of the parameters of this many checkpoints, the last ones, which is less noisy while
            the learning rate is still high (Vaswani et al. 2017 average 5). `train.keep_last` must keep as many.
        trust_code: run the code that a run brings for classes of its own, although you have not trained with it here.
        setup: call `configure_jax` first. False leaves the process as it is.
    """
    if setup:
        configure_jax()
    return load_run(read_metadata(find_run(run), trust_code=trust_code), which=which, average=average)


def load_run(metadata: RunMetadata, *, which: str | int = "best", average: int | None = None) -> Run:
    """Load the run with this metadata: see `load`."""
    which = check_value("which", which, Literal["best", "last"] | int)
    average = check_value("average", average, PositiveInt | None)
    experiment, tokenizer = metadata.experiment, load_run_tokenizer(metadata)
    options = compute_options(metadata.model, experiment.train, is_packed=experiment.data.is_packed, required=False)
    model = metadata.model.make_model(Compute(options.dtype, options.attention_fn))
    like = with_shardings(model.shapes(), whole_everywhere())
    while True:
        params = None
        checkpoints = open_checkpoints(metadata.directory)
        steps = _choose_steps(checkpoints, metadata.directory, which, average)
        val_loss = checkpoints.val_loss(steps[0]) if len(steps) == 1 else None
        try:
            for count, step in enumerate(steps, start=1):
                more = restore_merged_params(metadata, checkpoints, step, like)
                params = more if params is None else jax.tree.map(lambda m, x, n=count: m + (x - m) / n, params, more)
            break
        except Exception:
            if set(steps) <= set(checkpoints.steps()):
                raise  # otherwise a process that trains has removed one: choose again
    return Run(
        directory=metadata.directory,
        metadata=metadata,
        experiment=experiment,
        model=model,
        params=one_copy(params),
        tokenizer=tokenizer,
        step=steps[0],
        val_loss=val_loss,
    )


def _choose_steps(checkpoints: Checkpoints, directory: Path, which: str | int, average: int | None) -> list[int]:
    """Return the steps of the checkpoints to restore, newest first."""
    if isinstance(which, int):
        step = checkpoints.latest_valid(before=which + 1)
        if step != which:
            has = checkpoints.steps()
            raise UserError(f"which={which}: {directory} has no good checkpoint of that step, but {has}")
    else:
        step = checkpoints.latest_valid(which if average is None else "last")
    steps = []
    while step is not None:
        steps.append(step)
        if len(steps) == (average or 1):
            return steps
        step = checkpoints.latest_valid(before=step)
    has = f"{len(steps)} good checkpoints. Give fewer; --train.keep-last keeps more"
    raise UserError(f"average={average}: {directory} has {has}")
