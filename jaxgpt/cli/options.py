"""The options of each verb of the command line, by tyro: a comment behind a field is its help text."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from typing import Annotated, Literal, TypeVar

import tyro

from jaxgpt.config import Experiment, Precision
from jaxgpt.errors import UserError

T = TypeVar("T")

WeightsDtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train an experiment, or go on with a run."""

    run_dir: str | None = None  # where the run goes, or goes on; None: runs/NAME
    fresh: bool = False  # start over: an old run in that place is moved aside, never deleted
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]  # whose fields are options too


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Continue a prompt from a trained run; from one with an encoder, write what it makes of the prompt."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    # parameters are the mean of so many checkpoints, the last ones, of those that train.keep_last keeps; None: the best one
    average: int | None = None
    prompt: str = ""  # what to continue; empty: from the end-of-text token, or a newline
    chat: bool = False  # the prompt is what a user says; written is the assistant's answer alone
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
    beams: int | None = None  # write the likeliest text that a search with so many beams finds, instead of drawing
    draft: str | None = None  # run directory of a smaller model with the same tokenizer, to guess ahead
    # of the matrices; bfloat16 and int8 take a half and a quarter of float32's memory; None: the model's
    weights: Precision | None = None
    cache_dtype: Precision | None = None  # of keys and values; None: the model's
    stream: bool = True  # on a terminal, show the text as it is written
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Loss, perplexity and bits per byte of a run, on its validation split or any text."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    # parameters are the mean of so many checkpoints, the last ones, of those that train.keep_last keeps; None: the best one
    average: int | None = None
    # a UTF-8 text file, conversations (.jsonl) or pairs (.tsv); None: the run's validation split
    data: str | None = None
    # tokens that each window moves on, and block_size less as many are what each token is given at least: the smaller,
    # the better the loss and the longer it takes; None: block_size, windows that touch
    stride: int | None = None
    batch_size: int | None = None  # windows that are read together; None: the run's, in training
    beams: int | None = None  # of pairs of texts: the likeliest text by a search with so many beams; None: greedy
    # of the matrices, to see what fewer bits cost; None: as trained
    weights: Precision | None = None
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class XrayOptions:
    """Show what a run's model does with a text, piece by piece, on one page for a browser."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    # parameters are the mean of so many checkpoints, the last ones, of those that train.keep_last keeps; None: the best one
    average: int | None = None
    prompt: str  # the text to look at, at most as long as the context
    out: str = "xray.html"  # the page to write
    force: bool = False  # write it over a file that is there
    # a UTF-8 text file in which to look for what excites each unit of the MLPs; None: the run's own training text
    data: str | None = None
    corpus_tokens: int = 32768  # of that text to read, spread evenly over it; 0: none


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What a run learnt, how fast, what it writes, and what of that is word for word from its text: a page, and JSON."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    out: str | None = None  # the directory to write report.html and summary.json in; None: the run's
    force: bool = False  # write them over files that are there
    samples: int = 4  # texts to write and to compare with the training text
    tokens: int = 400  # of each
    json: bool = False  # print the summary as well


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """A model in Hugging Face's format becomes a run, to sample, to evaluate, and to export again."""

    model: tyro.conf.Positional[str]  # its directory, or its id on the Hub, such as openai-community/gpt2
    run_dir: str  # where the run goes
    dtype: WeightsDtype | None = None  # of the parameters; None: as stored
    tokenizer: str | None = None  # another tokenizer.json, or ids for none; None: the directory's
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """A run becomes a directory that transformers, vLLM and llama.cpp's converters open."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    out: str  # the directory to write
    dtype: WeightsDtype | None = None  # of the tensors; None: as in the run
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Train the variants of an experiment file with several seeds each, and tell which differ by more than noise."""

    experiment: tyro.conf.Positional[str]  # a Python file with `variants = {name: Experiment(...), ...}` in it
    seeds: int = 5  # runs of each variant; seeds are 0, 1, ...
    run_dir: str | None = None  # where the runs go, or go on; None: runs/studies/FILE
    json: bool = False  # print JSON instead of tables


def parse(cls: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """tyro's parse, with its framed messages told in one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            options = tyro.cli(cls, args=argv, prog=prog, default=default, description=cls.__doc__)
        for name in ("run", "run_dir", "data", "draft", "topology", "model", "out", "tokenizer"):
            if getattr(options, name, None) == "":
                raise UserError(f"{name} is empty: name one, or leave it out. See {prog} --help")
        return options
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise UserError(_one_line(told.getvalue(), prog)) from None


def count_in_range(name: str, value: int, most: int) -> None:
    if value < 1:
        raise UserError(f"--{name} {value}: needs at least 1")
    if value > most:
        raise UserError(f"--{name} {value}: needs at most {most:,}")


def _one_line(framed: str, prog: str) -> str:
    """The words of one of tyro's boxes, without frame, repeated help or pointer to the help."""
    words = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in framed.splitlines() if not re.match(r"^[╭╰]", line)]
    text = " ".join(w for w in words if w and not set(w) <= set("─"))
    text = re.split(r"For full helptext|Argument helptext:", text)[0].strip()
    text = re.sub(r"Perhaps you meant: (--[\w.-]+).*", r"Did you mean \1?", text)
    text = re.sub(r"^Error parsing (\S+): ", lambda m: "" if not m[1].startswith("-") else f"{m[1]}: ", text)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {prog} --help"
