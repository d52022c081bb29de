"""The command line: `jaxgpt VERB ...`, equal to `python -m jaxgpt VERB ...`.

Each verb is a function whose options come from a dataclass in `options`, by tyro. Importing this module imports no jax, so
that help and mistakes answer at once. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import io
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from jaxgpt.checks import LARGEST_COUNT, LARGEST_SIZE
from jaxgpt.config import Experiment
from jaxgpt.errors import SaveFailed, UserError
from jaxgpt.experiment_file import close, load_experiment
from jaxgpt.options import EvaluateOptions, PlanOptions, ReplayOptions, SampleOptions, TrainOptions
from jaxgpt.paths import find_run, is_run, write_whole
from jaxgpt.presets import EXPERIMENTS
from jaxgpt.start import start_jax

T = TypeVar("T")

USAGE = """\
usage: jaxgpt VERB [OPTIONS]

  train [EXPERIMENT]   train an experiment: a Python file with an `experiment` in it, or one of {experiments}
  sample [RUN]         continue a prompt from a trained run
  evaluate [RUN]       loss and bits per byte on held-out text
  replay [RUN]         one step of a run again, alone: its loss, and what made it not finite
  plan [EXPERIMENT]    memory, exchanges and speed of a training step, here or on a TPU slice, without running it

`jaxgpt VERB --help` lists the options. RUN is a run directory; without one, the newest under runs/.
"""


def train(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or _default_experiment(argv)
    options = _parse(TrainOptions, argv, "jaxgpt train [EXPERIMENT]", TrainOptions(experiment=experiment))
    _train(options)


def _train(options: TrainOptions) -> None:
    start_jax()
    from jaxgpt.interrupts import second_leaves_at_once
    from jaxgpt.loop import Diverged, Interrupted, fit
    from jaxgpt.parallel.multihost import ProcessLost, is_leader, joined, leave, status_of
    from jaxgpt.parallel.replicas import ReplicasDiffer

    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # asks a run that hangs where it stands
    began = time.monotonic()
    try:
        with second_leaves_at_once(_say):
            run = fit(options.experiment, options.run_dir, fresh=options.fresh)
    except (Interrupted, Diverged, ReplicasDiffer) as e:
        if is_leader():
            _say(str(e))
        raise SystemExit(1) from None
    except SaveFailed as e:
        _say(str(e))
        leave(1)  # a usual exit would print pages of TensorStore's
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
        with contextlib.suppress(OSError):  # it is printed as well
            write_whole(run.directory / "sample.txt", text + "\n")
        print(f"\n{text}\n", flush=True)
    print(f"next: jaxgpt sample {run.directory}" + (f" --prompt {_quote(prompt)}" if prompt.strip() else ""))


def sample(argv: list[str]) -> None:
    options = _parse(SampleOptions, argv, "jaxgpt sample [RUN]")
    for name, value, most in (
        ("max-new-tokens", options.max_new_tokens, LARGEST_SIZE),
        ("num-samples", options.num_samples, LARGEST_COUNT),
    ):
        _in_range(name, value, most)
    for run in (options.run, *([options.draft] if options.draft else [])):
        find_run(run)  # before jax is imported: a wrong path answers at once
    start_jax()
    from jaxgpt.data.tokenizer import start_token
    from jaxgpt.run import load
    from jaxgpt.sample.filters import Sampling

    filters = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "greedy")
    given = {name: getattr(options, name) for name in filters}
    Sampling(**{name: value for name, value in given.items() if value is not None})  # a mistake, before the weights
    run = load(options.run).packed(options.weights)
    if not options.prompt:
        _say(f"no prompt: starting from {start_token(run.tokenizer)[1]}")
    how: dict[str, Any] = {name: getattr(options, name) for name in ("max_new_tokens", "stop", "seed", "cache_dtype")}
    how |= given
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
    if options.batch_size is not None:
        _in_range("batch-size", options.batch_size, LARGEST_COUNT)
    if options.task is not None and options.data is None:
        raise UserError(f"--task {options.task} needs --data FILE, a file of its questions, one JSON object a line")
    if options.task is not None and options.stride is not None:
        raise UserError("--stride is for texts: leave it out with --task")
    find_run(options.run)
    start_jax()
    from jaxgpt.evaluate import evaluate_run, evaluate_task, read_questions, task_table, text_table
    from jaxgpt.run import load

    # Before the weights, so that a mistake answers at once.
    questions = read_questions(options.task, options.data) if options.task and options.data else []
    run = load(options.run)
    run = run if options.weights is None else run.packed(options.weights)
    if options.task is not None:
        found = evaluate_task(run, options.task, questions, batch_size=options.batch_size)
        table = task_table
    else:
        found = evaluate_run(run, options.data, stride=options.stride, batch_size=options.batch_size)
        table = text_table
    print(json.dumps(found) if options.json else table(found))


def replay(argv: list[str]) -> None:
    options = _parse(ReplayOptions, argv, "jaxgpt replay [RUN]")
    find_run(options.run)
    start_jax()
    from jaxgpt.autopsy import in_json
    from jaxgpt.replay import replay, replay_table

    found = replay(options.run, options.step, say=_say)
    print(json.dumps(in_json(dataclasses.asdict(found))) if options.json else replay_table(found))


def plan(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or EXPERIMENTS["quickstart"]()
    options = _parse(PlanOptions, argv, "jaxgpt plan [EXPERIMENT]", PlanOptions(experiment=experiment))
    if options.topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles; no device of this machine is wanted
    start_jax()
    from jaxgpt.plan import plan, table
    from jaxgpt.run import vocabulary

    found = plan(options.experiment, vocabulary(options.experiment), topology=options.topology, say=_say)
    print(json.dumps(dataclasses.asdict(found)) if options.json else table(found))


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "replay": replay,
    "plan": plan,
}


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
                f"unknown verb {verb!r}{close(verb, VERBS)}. There are {', '.join(VERBS)}: see jaxgpt --help"
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

    def unraisablehook(unraisable):
        # What TensorStore's threads print, dozens of times, after a write has failed and was told.
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    usual = warnings.showwarning
    sys.unraisablehook = unraisablehook
    try:
        with warnings.catch_warnings():
            warnings.showwarning = showwarning
            yield
    except UserError as e:
        _say(_on_one_line(f"jaxgpt: {e}"))
        raise SystemExit(2) from None
    except KeyboardInterrupt:  # before or after the loop, which saves: there is nothing to save
        _say("interrupted")
        raise SystemExit(1) from None
    except BrokenPipeError:  # `jaxgpt sample | head`
        sys.stderr.close()
        raise SystemExit(1) from None
    except OSError as e:  # a full disk, a directory without permission: the place, not the program
        if e.filename is None:
            raise
        _say(_on_one_line(f"jaxgpt: {e.filename}: {e.strerror}"))
        raise SystemExit(2) from None


def _in_range(name: str, value: int, most: int) -> None:
    if value < 1:
        raise UserError(f"--{name} {value}: needs at least 1")
    if value > most:
        raise UserError(f"--{name} {value}: needs at most {most:,}")


def _on_one_line(text: str, most: int = 1000) -> str:
    """What came from files and arguments may hold anything: line ends, control codes, megabytes."""
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text)


def _parse(cls: type[T], argv: list[str], prog: str, default: T | None = None) -> T:
    """tyro's parse, with its framed messages told in one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            options = tyro.cli(cls, args=argv, prog=prog, default=default, description=cls.__doc__)
        for name in ("run", "run_dir", "data", "draft", "topology"):
            if getattr(options, name, None) == "":
                raise UserError(f"{name} is empty: name one, or leave it out. See {prog} --help")
        return options
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
    return load_experiment(argv.pop(0)) if argv and not argv[0].startswith("-") else None


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


def _quote(text: str) -> str:
    """For a shell, on one line: a newline at the end of a prompt is left to the reader."""
    text = text.rstrip("\n")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
