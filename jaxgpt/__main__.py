"""The command line: `jaxgpt VERB ...`, equal to `python -m jaxgpt VERB ...`.

Each verb is a function whose options come from a dataclass in `options`, by tyro. Importing this module imports no jax, so
that help and mistakes answer at once. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.checks import LARGEST_COUNT, LARGEST_SIZE
from jaxgpt.config import Experiment
from jaxgpt.errors import SaveFailed, UserError
from jaxgpt.experiment_file import close, load_experiment, load_variants
from jaxgpt.options import (
    EvaluateOptions,
    ExportOptions,
    ImportOptions,
    PlanOptions,
    ReplayOptions,
    SampleOptions,
    StudyOptions,
    TrainOptions,
    XrayOptions,
    parse,
)
from jaxgpt.paths import RUNS, find_run, is_run, new_file, write_whole
from jaxgpt.presets import EXPERIMENTS
from jaxgpt.start import start_jax
from jaxgpt.tell import quote, say, told_in_words

USAGE = """\
usage: jaxgpt VERB [OPTIONS]

  train [EXPERIMENT]   train an experiment: a Python file with an `experiment` in it, or one of {experiments}
  sample [RUN]         continue a prompt from a trained run
  evaluate [RUN]       loss and bits per byte on held-out text
  study EXPERIMENT     variants of an experiment, several seeds each: which differ by more than noise
  xray [RUN]           what the model does with a text, piece by piece, as a page for a browser
  replay [RUN]         one step of a run again, alone: its loss, and what made it not finite
  import-hf DIR        a model in Hugging Face's format becomes a run
  export-hf [RUN]      a run becomes a model in Hugging Face's format
  plan [EXPERIMENT]    memory, exchanges and speed of a training step, here or on a TPU slice, without running it

`jaxgpt VERB --help` lists the options. RUN is a run directory; without one, the newest under runs/.
"""


def train(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or _default_experiment(argv)
    options = parse(TrainOptions, argv, "jaxgpt train [EXPERIMENT]", TrainOptions(experiment=experiment))
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
        with second_leaves_at_once(say):
            run = fit(options.experiment, options.run_dir, fresh=options.fresh)
    except (Interrupted, Diverged, ReplicasDiffer) as e:
        if is_leader():
            say(str(e))
        raise SystemExit(1) from None
    except SaveFailed as e:
        say(str(e))
        leave(1)  # a usual exit would print pages of TensorStore's
    except BaseException as e:
        if not joined():
            raise
        if isinstance(e, UserError | ProcessLost):
            say(f"jaxgpt: {e}")
        elif not isinstance(e, KeyboardInterrupt):
            traceback.print_exc()
        leave(status_of(e))
    if not is_leader():
        return
    t = options.experiment.train
    say(
        f"done in {time.monotonic() - began:.0f} s: {t.steps:,} steps, {t.steps * t.batch_size * run.model.config.block_size:,} tokens"
    )
    if run.val_loss is not None:
        say(f"best validation loss {run.val_loss:.4f} at step {run.step}")
    prompt = t.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError as e:  # the experiment's prompt, another text than it was written for
        say(f"sampling from nothing, not from {prompt!r}: {e}")
        prompt = ""
    chat, reads = options.experiment.data.is_chat, bool(run.model.config.n_encoder_layer)
    if t.sample_tokens and (prompt or not reads):
        written = str(run.sample(prompt, max_new_tokens=t.sample_tokens, seed=t.seed, chat=chat))
        text = f"{prompt}\n\n{written}" if chat or reads else prompt + written
        with contextlib.suppress(OSError):  # it is printed as well
            write_whole(run.directory / "sample.txt", text + "\n")
        print(f"\n{text}\n", flush=True)
    asked = f" --prompt {quote(prompt)}" if prompt.strip() else ""
    print(f"next: jaxgpt sample {run.directory}{' --chat' * chat}{asked}")


def sample(argv: list[str]) -> None:
    options = parse(SampleOptions, argv, "jaxgpt sample [RUN]")
    for name, value, most in (
        ("max-new-tokens", options.max_new_tokens, LARGEST_SIZE),
        ("num-samples", options.num_samples, LARGEST_COUNT),
    ):
        _in_range(name, value, most)
    if options.beams is not None:
        _in_range("beams", options.beams, LARGEST_COUNT)
    for run in (options.run, *([options.draft] if options.draft else [])):
        find_run(run)  # before jax is imported: a wrong path answers at once
    start_jax()
    from jaxgpt.data.tokenizer import start_token
    from jaxgpt.run import load
    from jaxgpt.sample.filters import Sampling

    filters = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "greedy")
    given = {name: getattr(options, name) for name in filters}
    Sampling(**{name: value for name, value in given.items() if value is not None})  # a mistake, before the weights
    run = load(options.run, average=options.average).packed(options.weights)
    if not options.prompt and not options.chat:
        say(f"no prompt: starting from {start_token(run.tokenizer)[1]}")
    how: dict[str, Any] = {
        name: getattr(options, name) for name in ("max_new_tokens", "stop", "seed", "cache_dtype", "chat")
    }
    how |= given
    shown = "" if options.chat or run.model.config.n_encoder_layer else options.prompt
    if options.beams is not None:
        how["beams"] = options.beams
    if options.draft:
        how["draft"] = load(options.draft).packed(options.weights)
    if options.stream and sys.stdout.isatty() and not (options.json or options.beams) and options.num_samples == 1:
        print(shown, end="", flush=True)
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
        print(shown + text)


def evaluate(argv: list[str]) -> None:
    options = parse(EvaluateOptions, argv, "jaxgpt evaluate [RUN]")
    if options.batch_size is not None:
        _in_range("batch-size", options.batch_size, LARGEST_COUNT)
    if options.beams is not None:
        _in_range("beams", options.beams, LARGEST_COUNT)
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
    run = load(options.run, average=options.average)
    run = run if options.weights is None else run.packed(options.weights)
    if options.task is not None:
        found = evaluate_task(run, options.task, questions, batch_size=options.batch_size)
        table = task_table
    else:
        found = evaluate_run(
            run, options.data, stride=options.stride, batch_size=options.batch_size, beams=options.beams
        )
        table = text_table
    print(json.dumps(found) if options.json else table(found))


def study(argv: list[str]) -> None:
    options = parse(StudyOptions, argv, "jaxgpt study EXPERIMENT")
    _in_range("seeds", options.seeds, LARGEST_COUNT)
    variants = load_variants(options.experiment)
    start_jax()
    from jaxgpt.loop import Interrupted
    from jaxgpt.study import study, study_table

    place = Path(options.run_dir) if options.run_dir else RUNS / "studies" / Path(options.experiment).stem
    try:
        found = study(variants, place, seeds=options.seeds, say=say)
    except Interrupted as e:
        say(f"{str(e).partition(' To continue')[0]} The same command goes on from there.")
        raise SystemExit(1) from None
    write_whole(place / "study.json", json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(found) if options.json else study_table(found))


def xray(argv: list[str]) -> None:
    options = parse(XrayOptions, argv, "jaxgpt xray [RUN]")
    if options.corpus_tokens:
        _in_range("corpus-tokens", options.corpus_tokens, LARGEST_SIZE)
    find_run(options.run)
    out = new_file(options.out, force=options.force)
    start_jax()
    from jaxgpt.run import load

    run = load(options.run, average=options.average)
    page = run.xray(options.prompt, data=options.data, corpus_tokens=options.corpus_tokens)
    write_whole(out, page)
    print(f"{out}: {len(page.encode()) / 1e6:.1f} MB; open it in a browser")


def replay(argv: list[str]) -> None:
    options = parse(ReplayOptions, argv, "jaxgpt replay [RUN]")
    find_run(options.run)
    start_jax()
    from jaxgpt.autopsy import in_json
    from jaxgpt.replay import replay, replay_table

    found = replay(options.run, options.step, say=say)
    print(json.dumps(in_json(dataclasses.asdict(found))) if options.json else replay_table(found))


def plan(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or EXPERIMENTS["quickstart"]()
    options = parse(PlanOptions, argv, "jaxgpt plan [EXPERIMENT]", PlanOptions(experiment=experiment))
    if options.topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles; no device of this machine is wanted
    start_jax()
    from jaxgpt.init_from import begun
    from jaxgpt.plan import plan, table
    from jaxgpt.run import vocabulary

    experiment, _ = begun(options.experiment)
    found = plan(experiment, vocabulary(experiment), topology=options.topology, say=say)
    print(json.dumps(dataclasses.asdict(found)) if options.json else table(found))


def import_hf(argv: list[str]) -> None:
    options = parse(ImportOptions, argv, "jaxgpt import-hf DIR")
    start_jax(computes=False)
    from jaxgpt.import_hf import import_hf

    source = import_hf(options.model, options.run_dir, dtype=options.dtype, tokenizer=options.tokenizer)
    if options.json:
        print(
            json.dumps({"run": options.run_dir, "model_type": source.family.model_type, "tensors": len(source.tensors)})
        )
        return
    print(f"{source.family.model_type}: {len(source.tensors)} tensors of {source.directory} are in {options.run_dir}")
    print(f'next: jaxgpt sample {options.run_dir} --prompt "..."')


def export_hf(argv: list[str]) -> None:
    options = parse(ExportOptions, argv, "jaxgpt export-hf [RUN]")
    find_run(options.run)
    start_jax(computes=False)
    from jaxgpt.export_hf import export_hf

    place = export_hf(options.run, options.out, dtype=options.dtype)
    files = sorted(path.name for path in place.iterdir())
    print(json.dumps({"out": str(place), "files": files}) if options.json else f"{place}: {', '.join(files)}")


VERBS: dict[str, Callable[[list[str]], None]] = {
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "study": study,
    "xray": xray,
    "replay": replay,
    "plan": plan,
    "import-hf": import_hf,
    "export-hf": export_hf,
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command `jaxgpt`. Exit status 0: done; 2: the user's mistake, told in a line or two; 1: anything else."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with told_in_words():
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
    with told_in_words():
        _train(parse(TrainOptions, sys.argv[1:], Path(sys.argv[0]).name, TrainOptions(experiment=experiment)))


def _in_range(name: str, value: int, most: int) -> None:
    if value < 1:
        raise UserError(f"--{name} {value}: needs at least 1")
    if value > most:
        raise UserError(f"--{name} {value}: needs at most {most:,}")


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

                return read_record(directory).given
    return EXPERIMENTS["quickstart"]()


if __name__ == "__main__":
    main()
