"""The verbs that train, or say how it would be."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.console import say, told_in_words
from jaxgpt.cli.experiment_file import load_experiment, load_variants
from jaxgpt.cli.options import PlanOptions, ReplayOptions, StudyOptions, TrainOptions, count_in_range, parse
from jaxgpt.config import Experiment
from jaxgpt.config.presets import EXPERIMENTS
from jaxgpt.config.validate import LARGEST_COUNT
from jaxgpt.errors import SaveFailed, UserError, shell_line
from jaxgpt.files import render_json, write_whole
from jaxgpt.parallel.jax_setup import start_jax
from jaxgpt.runs.find import RUNS, find_run, is_run

if TYPE_CHECKING:
    from jaxgpt.runs.metadata import RunMetadata


def train(argv: list[str]) -> None:
    experiment, metadata = _named_experiment(argv), None
    if experiment is None:
        metadata = _resumed_run(argv)
        experiment = EXPERIMENTS["quickstart"]() if metadata is None else metadata.given
    options = parse(TrainOptions, argv, "jaxgpt train [EXPERIMENT]", TrainOptions(experiment=experiment))
    _train(options, metadata)


def _train(options: TrainOptions, metadata: RunMetadata | None = None) -> None:
    """Train, print a sample, and say what to do next. metadata: of the run to resume, if it has been read."""
    start_jax()
    from jaxgpt.cluster.multihost import ProcessLost, is_leader, joined, leave, status_of
    from jaxgpt.cluster.replicas import ReplicasDiffer
    from jaxgpt.cluster.signals import second_leaves_at_once
    from jaxgpt.session import Diverged, Interrupted, fit_as_command

    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1)  # asks a run that hangs where it stands
    began = time.monotonic()
    try:
        with second_leaves_at_once(say):
            run = fit_as_command(options.experiment, options.run_dir, fresh=options.fresh, metadata=metadata)
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
    chat, reads = options.experiment.data.is_chat, options.experiment.data.is_pairs
    if reads and len(run.tokenizer.prefix) + len(run.tokenizer.encode(prompt)) > run.model.config.block_size:
        say(f"no sample of {prompt!r}: it is longer than block_size={run.model.config.block_size}")
        prompt = ""
    if t.sample_tokens and (prompt or not reads):
        how = {"temperature": t.sample_temperature, "max_new_tokens": t.sample_tokens, "seed": t.seed}
        written = str(run.sample(prompt, chat=chat, **how))
        text = f"{prompt}\n\n{written}" if chat or reads else prompt + written
        with contextlib.suppress(OSError):  # it is printed as well
            write_whole(run.directory / "sample.txt", text + "\n")
        print(f"\n{text}\n", flush=True)
    following = ["sample", run.directory, *(["--chat"] if chat else [])]
    if prompt.strip():
        asked = prompt.rstrip("\n")  # a newline at its end is left to the reader
        following += [f"--prompt={asked}"] if asked.startswith("-") else ["--prompt", asked]
    print(f"next: {shell_line('jaxgpt', *following)}")


def run_experiment(experiment: Experiment) -> None:
    """What an experiment file ends with: `jaxgpt train FILE`, with the options of this command line."""
    with told_in_words():
        _train(parse(TrainOptions, sys.argv[1:], Path(sys.argv[0]).name, TrainOptions(experiment=experiment)))


def study(argv: list[str]) -> None:
    options = parse(StudyOptions, argv, "jaxgpt study EXPERIMENT")
    count_in_range("seeds", options.seeds, LARGEST_COUNT)
    variants = load_variants(options.experiment)
    start_jax()
    from jaxgpt.session import Interrupted, fit_as_command
    from jaxgpt.tools.study.study import STUDY, study, study_table

    place = Path(options.run_dir) if options.run_dir else RUNS / "studies" / Path(options.experiment).stem
    try:
        found = study(variants, place, seeds=options.seeds, say=say, fit_one=fit_as_command)
    except Interrupted as e:
        say(f"{str(e).partition(' To continue')[0]} The same command goes on from there.")
        raise SystemExit(1) from None
    write_whole(place / STUDY, render_json(found, indent=1, ensure_ascii=False) + "\n")
    print(render_json(found) if options.json else study_table(found))


def plan(argv: list[str]) -> None:
    experiment = _named_experiment(argv) or EXPERIMENTS["quickstart"]()
    options = parse(PlanOptions, argv, "jaxgpt plan [EXPERIMENT]", PlanOptions(experiment=experiment))
    if options.topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles; no device of this machine is wanted
    start_jax()
    from jaxgpt.data.dataset import vocabulary
    from jaxgpt.runs.pretrained import begun
    from jaxgpt.tools.plan.plan import plan, table

    experiment, _ = begun(options.experiment)
    found = plan(experiment, vocabulary(experiment), topology=options.topology, say=say)
    print(render_json(dataclasses.asdict(found)) if options.json else table(found))


def replay(argv: list[str]) -> None:
    options = parse(ReplayOptions, argv, "jaxgpt replay [RUN]")
    find_run(options.run)
    start_jax()
    from jaxgpt.tools.diagnose.replay import replay, replay_table

    found = replay(options.run, options.step, say=say)
    print(render_json(dataclasses.asdict(found), not_finite=str) if options.json else replay_table(found))


def _named_experiment(argv: list[str]) -> Experiment | None:
    """The experiment that the first argument names, if it does, taken off the arguments."""
    return load_experiment(argv.pop(0)) if argv and not argv[0].startswith("-") else None


def _resumed_run(argv: list[str]) -> RunMetadata | None:
    """Return the metadata of the run in --run-dir, if it is one."""
    for at, argument in enumerate(argv):
        name, _, value = argument.partition("=")
        if name in ("--run-dir", "--run_dir"):
            directory = Path(value or (argv[at + 1] if at + 1 < len(argv) else ""))
            if is_run(directory):
                from jaxgpt.runs.metadata import read_metadata

                return read_metadata(directory)
    return None
