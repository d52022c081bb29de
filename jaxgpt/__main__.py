"""The command line: `jaxgpt VERB ...`, equal to `python -m jaxgpt VERB ...`.

Each verb is a function whose options come from a dataclass, by tyro. Importing this module imports no jax, so
that help and mistakes answer at once. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import faulthandler
import importlib.util
import io
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from jaxgpt.config import Experiment, Precision
from jaxgpt.errors import UserError
from jaxgpt.paths import find_run, is_run
from jaxgpt.presets import EXPERIMENTS

T = TypeVar("T")

USAGE = """\
usage: jaxgpt VERB [OPTIONS]

  train [EXPERIMENT]   train an experiment: a Python file with an `experiment` in it, or one of {experiments}
  sample [RUN]         continue a prompt from a trained run
  evaluate [RUN]       loss and bits per character on held-out text
  plan [EXPERIMENT]    memory, exchanges and speed of a training step, here or on a TPU slice, without running it

`jaxgpt VERB --help` lists the options. RUN is a run directory; without one, the newest under runs/.
"""


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
    """Loss, perplexity and bits per character of a run, on its validation split or on any text."""

    run: Annotated[str | None, tyro.conf.Positional] = None  # run directory; None: the newest under runs/
    data: str | None = None  # a UTF-8 text file; None: the run's validation split
    # of the matrices, to see what fewer bits cost; None: as trained
    weights: Precision | None = None
    json: bool = False  # print JSON instead of text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Compile a training step, without running it: memory, exchanges, and how fast it could be."""

    topology: str | None = None  # a TPU slice such as v5e:4x4, v6e:16x16, v5p:8x8x8; None: this machine
    json: bool = False  # print JSON instead of a table
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]  # whose fields are options too


def train(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or _default_experiment(argv)
    options = _parse(TrainOptions, argv, "jaxgpt train [EXPERIMENT]", TrainOptions(experiment=experiment))
    _train(options)


def _train(options: TrainOptions) -> None:
    _prepare_jax()
    from jaxgpt.loop import Diverged, Interrupted, fit
    from jaxgpt.parallel.multihost import ProcessLost, is_leader, joined, leave, status_of
    from jaxgpt.parallel.replicas import ReplicasDiffer

    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # asks a run that hangs where it stands
    began = time.monotonic()
    try:
        run = fit(options.experiment, options.run_dir, fresh=options.fresh)
    except (Interrupted, Diverged, ReplicasDiffer) as e:
        if is_leader():
            _say(str(e))
        raise SystemExit(1) from None
    except BaseException as e:
        if not joined():
            raise
        if isinstance(e, UserError | ProcessLost):
            _say(f"jaxgpt: {e}")
        elif not isinstance(e, KeyboardInterrupt):
            traceback.print_exc()
        leave(status_of(e))
    if not is_leader():
        return
    t = options.experiment.train
    _say(
        f"done in {time.monotonic() - began:.0f} s: {t.steps:,} steps, {t.steps * t.batch_size * run.model.config.block_size:,} tokens"
    )
    if run.val_loss is not None:
        _say(f"best validation loss {run.val_loss:.4f} at step {run.step}")
    prompt = t.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError as e:  # the experiment's prompt, another text than it was written for
        _say(f"sampling from nothing, not from {prompt!r}: {e}")
        prompt = ""
    if t.sample_tokens:
        text = prompt + str(run.sample(prompt, max_new_tokens=t.sample_tokens, seed=t.seed))
        (run.directory / "sample.txt").write_text(text + "\n", encoding="utf-8")
        print(f"\n{text}\n", flush=True)
    print(f"next: jaxgpt sample {run.directory}" + (f" --prompt {_quote(prompt)}" if prompt.strip() else ""))


def sample(argv: list[str]) -> None:
    options = _parse(SampleOptions, argv, "jaxgpt sample [RUN]")
    for name, value in (("max-new-tokens", options.max_new_tokens), ("num-samples", options.num_samples)):
        if value < 1:
            raise UserError(f"--{name} {value}: needs at least 1")
    for run in (options.run, *([options.draft] if options.draft else [])):
        find_run(run)  # before jax is imported: a wrong path answers at once
    _prepare_jax()
    from jaxgpt.data.tokenizer import start_token
    from jaxgpt.run import load

    run = load(options.run).packed(options.weights)
    if not options.prompt:
        _say(f"no prompt: starting from {start_token(run.tokenizer)[1]}")
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "greedy", "stop")
    how: dict[str, Any] = {name: getattr(options, name) for name in (*names, "seed", "cache_dtype")}
    if options.draft:
        how["draft"] = load(options.draft).packed(options.weights)
    if options.stream and sys.stdout.isatty() and not options.json and options.num_samples == 1:
        print(options.prompt, end="", flush=True)
        for piece in run.stream(options.prompt, **how):
            print(piece, end="", flush=True)
        print()
        return
    texts = run.sample([options.prompt] * options.num_samples, **how)
    if options.json:
        print(json.dumps([{"prompt": options.prompt, "text": text} for text in texts], ensure_ascii=False))
        return
    for number, text in enumerate(texts):
        if number:
            print("-" * 40)
        print(options.prompt + text)


def evaluate(argv: list[str]) -> None:
    options = _parse(EvaluateOptions, argv, "jaxgpt evaluate [RUN]")
    find_run(options.run)
    _prepare_jax()
    from jaxgpt.run import evaluate_run, load

    run = load(options.run)
    found = evaluate_run(run if options.weights is None else run.packed(options.weights), options.data)
    if options.json:
        print(json.dumps(found))
        return
    print(f"{found['tokens']:,} tokens: loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.3f}")
    if found["bits_per_character"] is not None:
        print(f"{found['bits_per_character']:.4f} bits per character")


def plan(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or EXPERIMENTS["quickstart"]()
    options = _parse(PlanOptions, argv, "jaxgpt plan [EXPERIMENT]", PlanOptions(experiment=experiment))
    if options.topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles; no device of this machine is wanted
    _prepare_jax()
    from jaxgpt.plan import plan, table
    from jaxgpt.run import vocabulary

    found = plan(options.experiment, vocabulary(options.experiment), topology=options.topology, say=_say)
    print(json.dumps(dataclasses.asdict(found)) if options.json else table(found))


VERBS: dict[str, Callable[[list[str]], None]] = {"train": train, "sample": sample, "evaluate": evaluate, "plan": plan}


def main(argv: Sequence[str] | None = None) -> None:
    """The command `jaxgpt`. Exit status 0: done; 2: the user's mistake, told in a line or two; 1: anything else."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with _told_in_words():
        if not arguments or arguments[0] in ("-h", "--help"):
            print(USAGE.format(experiments=", ".join(EXPERIMENTS)), end="")
            return
        verb = arguments.pop(0)
        if verb not in VERBS:
            raise UserError(
                f"unknown verb {verb!r}{_close(verb, VERBS)}. There are {', '.join(VERBS)}: see jaxgpt --help"
            )
        VERBS[verb](arguments)


def run_experiment(experiment: Experiment) -> None:
    """What an experiment file ends with: `jaxgpt train FILE`, with the options of this command line."""
    with _told_in_words():
        _train(_parse(TrainOptions, sys.argv[1:], Path(sys.argv[0]).name, TrainOptions(experiment=experiment)))


@contextlib.contextmanager
def _told_in_words():
    def showwarning(message, category, *where, **kwargs):
        if category is UserWarning:  # ours, for the user
            _say(f"jaxgpt: {message}")
        else:
            usual(message, category, *where, **kwargs)

    usual = warnings.showwarning
    try:
        with warnings.catch_warnings():
            warnings.showwarning = showwarning
            yield
    except UserError as e:
        _say(f"jaxgpt: {e}")
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before or after the loop, which saves: there is nothing to save
        _say("interrupted")
        raise SystemExit(1) from None
    except BrokenPipeError:  # `jaxgpt sample | head`
        sys.stderr.close()
        raise SystemExit(1) from None


def _parse(cls: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """tyro's parse, with its framed messages told in one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return tyro.cli(cls, args=argv, prog=prog, default=default, description=cls.__doc__)
    except SystemExit as e:
        if e.code in (0, None):
            raise
        raise UserError(_one_line(told.getvalue(), prog)) from None


def _one_line(framed: str, prog: str) -> str:
    """The words of one of tyro's boxes, without frame, repeated help or pointer to the help."""
    words = [re.sub(r"^[│\s]+|[│\s]+$", "", line) for line in framed.splitlines() if not re.match(r"^[╭╰]", line)]
    text = " ".join(w for w in words if w and not set(w) <= set("─"))
    text = re.split(r"For full helptext|Argument helptext:", text)[0].strip()
    text = re.sub(r"Perhaps you meant: (--[\w.-]+).*", r"Did you mean \1?", text)
    text = re.sub(r"^Error parsing (\S+): ", lambda m: "" if not m[1].startswith("-") else f"{m[1]}: ", text)
    return f"{text if text.endswith('?') else text.rstrip('.') + '.'} See {prog} --help"


def _named_experiment(argv: list[str]) -> Experiment | None:
    """The experiment that the first argument names, if it does, taken off the arguments."""
    return _load_experiment(argv.pop(0)) if argv and not argv[0].startswith("-") else None


def _load_experiment(named: str) -> Experiment:
    """A built-in experiment, or the `experiment` (with FILE.py:NAME, another one) of a Python file, which is run."""
    if named in EXPERIMENTS:
        return EXPERIMENTS[named]()
    file, _, attribute = named.partition(".py:")
    path = Path(file + ".py") if attribute else Path(named)
    attribute = attribute or "experiment"
    if path.suffix != ".py" or not path.is_file():
        why = "there is no such file" if path.suffix == ".py" else "it is neither a built-in name nor a .py file"
        raise UserError(
            f"no experiment {named!r}: {why}{_close(named, EXPERIMENTS)}. Built in: {', '.join(EXPERIMENTS)}"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    experiment = getattr(module, attribute, None)
    if not isinstance(experiment, Experiment):
        others = [name for name, value in vars(module).items() if isinstance(value, Experiment)]
        raise UserError(f"{path} has no `{attribute} = Experiment(...)`; it has {', '.join(others) or 'none'}")
    return experiment


def _default_experiment(argv: list[str]) -> Experiment:
    """Without an EXPERIMENT: what --run-dir holds, if it is a run; else the quickstart."""
    for at, argument in enumerate(argv):
        name, _, value = argument.partition("=")
        if name in ("--run-dir", "--run_dir"):
            directory = Path(value or (argv[at + 1] if at + 1 < len(argv) else ""))
            if is_run(directory):
                from jaxgpt.record import read_record

                return read_record(directory).experiment
    return EXPERIMENTS["quickstart"]()


def _prepare_jax() -> None:
    from jaxgpt.parallel.device import enable_compilation_cache, keep_freed_memory

    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells every save in a dozen lines
    keep_freed_memory()
    enable_compilation_cache()


def _close(word: str, known) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _quote(text: str) -> str:
    """For a shell, on one line: a newline at the end of a prompt is left to the reader."""
    text = text.rstrip("\n")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
