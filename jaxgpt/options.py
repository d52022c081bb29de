"""The options of each verb of the command line, by tyro: a comment behind a field is its help text."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from jaxgpt.config import Experiment, Precision, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train an experiment, or go on with a run."""

    run_dir: str | None = None  # where the run goes, or goes on; None: runs/NAME
    fresh: bool = False  # start over: an old run in that place is moved aside, never deleted
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]  # whose fields are options too


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Continue a prompt from a trained run."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    prompt: str = ""  # what to continue; empty: from the end-of-text token, or a newline
    max_new_tokens: int = 400  # tokens to write
    num_samples: int = 1  # texts to write
    temperature: float | None = None  # below 1 safer, above 1 bolder, 0 greedy; None: the experiment's
    top_k: int | None = None  # draw from the k likeliest tokens
    top_p: float | None = None  # draw from the fewest tokens that hold this much probability
    min_p: float | None = None  # draw from tokens at least this likely relative to the likeliest
    repetition_penalty: float | None = None  # above 1, what the text has already becomes less likely
    greedy: bool = False  # always the likeliest token
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()  # end before this text; may be given several times
    seed: int = 0  # the same seed, the same text
    draft: str | None = None  # run directory of a smaller model with the same tokenizer, to guess ahead
    # of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
    weights: Precision | None = None
    cache_dtype: Precision | None = None  # of keys and values; None: the model's
    stream: bool = True  # on a terminal, show the text as it is written
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Loss, perplexity and bits per byte of a run, on its validation split or any text; or the questions it answers."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    data: str | None = None  # a UTF-8 text file, or with --task its questions; None: the run's validation split
    # what --data has, a JSON object in each line: hellaswag (ctx, endings, label) and arc (question, choices, answerKey),
    # endings to choose from; lambada (text), whose last word is to be guessed; None: a text
    task: Task | None = None
    # tokens that each window moves on, and block_size less as many are what each token is given at least: the smaller,
    # the better the loss and the longer it takes; None: block_size, windows that touch
    stride: int | None = None
    batch_size: int | None = None  # windows or endings that are read together; None: the run's, in training
    # of the matrices, to see what fewer bits cost; None: as trained
    weights: Precision | None = None
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Compile a training step, without running it: memory, exchanges, and how fast it could be."""

    topology: str | None = None  # a TPU slice such as v5e:4x4, v6e:16x16, v5p:8x8x8; None: this machine
    json: bool = False  # print JSON instead of a table
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]  # whose fields are options too


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Take one step of a run again, from the state that entered it, writing nothing: its loss, and what went wrong."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    step: int  # the step to see again; all since the newest checkpoint before it are taken again
    json: bool = False  # print JSON instead of text
