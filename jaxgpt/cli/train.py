"""`jaxgpt train`. What trains is imported when it trains: the help lists its options without it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxgpt.cli.console import report_errors, say, say_error, take_traceback
from jaxgpt.cli.options import parse
from jaxgpt.config.validate import Count, check_value
from jaxgpt.data.conversations import find_validation_prompt
from jaxgpt.data.corpus import find_user_files
from jaxgpt.errors import CheckpointSaveError, Diverged, Preempted, UserError, shell_line
from jaxgpt.experiment import CONTEXT_OF_WEIGHTS, Experiment
from jaxgpt.files import Json, open_file, write_whole
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.parallel.multihost import exit_now, is_process_0
from jaxgpt.presets import EXPERIMENTS, quickstart
from jaxgpt.runs.bucket import Bucket, address_of, name_of
from jaxgpt.tools.executor import Workers, train_on_ray

if TYPE_CHECKING:
    from jaxgpt.run import Run


def train(
    *,
    run_dir: str | None = None,
    fresh: bool = False,
    extend: bool = False,
    workers: Workers = Workers(),  # noqa: B008, it is frozen
    hosts: Count | None = None,
    tpu_slice: str | None = None,
    experiment: Experiment,
    callbacks: Sequence[Callable[[Json], None]] = (),
) -> None:
    """Train an experiment, or resume a run.

    EXPERIMENT: a file that defines `experiment`, or quickstart, finetune or depth:4.

    Args:
        run_dir: run directory, resumed if it exists. None means runs/NAME
        fresh: move an old run aside, start over
        extend: continue to more train.steps, although the learning rate rises again
        hosts: hosts of a Ray cluster that train the run together, each with --gpus. None means this process
        tpu_slice: the slice of TPUs whose hosts they are, such as TPU-V6E:4x4. None means CPUs or GPUs
    """
    if hosts is not None or workers.on is not None:
        if hosts is None or workers.on is None or workers.on.startswith("local:"):
            raise UserError("one training takes --on ray and --hosts N together. Many runs take --on: see jaxgpt study")
        return train_on_ray(workers, hosts, tpu_slice)
    from jaxgpt.training import fit

    configure_jax()
    experiment = choose_context(label_own_text(experiment, run_dir))
    began = time.monotonic()
    try:
        run = fit(experiment, run_dir, fresh=fresh, extend=extend or None, callbacks=callbacks)
    except (Preempted, Diverged) as e:
        if is_process_0():
            say(str(e))
        raise SystemExit(1) from None
    except CheckpointSaveError as e:
        say(str(e))
        exit_now(1)  # a normal exit would print pages from TensorStore
    except BaseException as e:
        if not jax.distributed.is_initialized():
            raise
        if isinstance(e, UserError):
            say_error(e)
        elif not isinstance(e, KeyboardInterrupt):
            traceback.print_exc()
        exit_now(2 if isinstance(e, UserError) else 1)
    if not is_process_0():
        return
    t = experiment.train
    tokens = t.steps * t.batch_size * run.model.config.block_size
    say(f"done in {time.monotonic() - began:.0f} s: {t.steps:,} steps, {tokens:,} tokens")
    if run.val_loss is not None:
        say(f"best validation loss {run.val_loss:.4f} at step {run.step}")
    if (prompt := _print_sample(run, experiment)) is None:
        return
    words = ["--chat"] if experiment.data.is_chat else []
    if prompt:
        words += [f"--prompt={prompt}"] if prompt.startswith("-") else ["--prompt", prompt]
    print(f"next: {shell_line('jaxgpt', 'sample', name_of(run.directory), *words)}")


def label_own_text(experiment: Experiment, run_dir: str | None) -> Experiment:
    """Return a preset for the user's own text: named after run directory or text, its prompt from the validation text."""
    path, name = experiment.data.path, experiment.name
    if path is None or name not in EXPERIMENTS:
        return experiment
    prompt, preset = experiment.train.sample_prompt, EXPERIMENTS[name]()
    is_text = not (experiment.data.is_packed or path.endswith((".bin", ".json")))
    with contextlib.suppress(UserError, StopIteration):  # training reports it
        if experiment.data.is_chat and prompt in ("", quickstart(chat=True).train.sample_prompt):
            prompt = find_validation_prompt(path, experiment.data.val_fraction)
        elif is_text and prompt == preset.train.sample_prompt:
            prompt = ""
            file = find_user_files(path)[-1]
            with open_file(file) as f:
                f.seek(int(file.stat().st_size * (1 - experiment.data.val_fraction)))
                prompt = " ".join(f.read(200).decode(errors="ignore").split()[1:5])  # the first word may be cut
    places = Path(run_dir or "").name, Path(re.split(r":[\d.]+(?:,|$)|,", path)[0]).stem  # the first of a mixture
    name = next(filter(None, (re.sub(r"[^\w-]", "-", place)[:50].strip("-_") for place in places)), name)
    return dataclasses.replace(experiment, name=name, train=dataclasses.replace(experiment.train, sample_prompt=prompt))


def choose_context(experiment: Experiment) -> Experiment:
    """Return an experiment on conversations with a context, unless it is given or comes from weights to start from."""
    model = experiment.model
    if not experiment.data.is_chat or model.block_size != CONTEXT_OF_WEIGHTS or experiment.train.init_from is not None:
        return experiment
    from jaxgpt.runs.pretrained import open_context

    context = open_context(experiment.data, model)
    return dataclasses.replace(experiment, model=dataclasses.replace(model, block_size=context))


def _print_sample(run: Run, experiment: Experiment) -> str | None:
    """Print and save the sample that the experiment asks for. Return its prompt, without trailing newlines.

    None means that the model cannot be sampled.
    """
    config, data = experiment.train, experiment.data
    prompt = config.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError as e:  # the tokenizer lacks characters of the prompt
        say(f"sampling from an empty prompt instead of {prompt!r}: {e}")
        prompt = ""
    if config.sample_tokens:
        how = {"temperature": config.sample_temperature, "max_new_tokens": config.sample_tokens, "seed": config.seed}
        try:
            sampled = run.sample(prompt, chat=data.is_chat, **how)
        except UserError as e:  # a model of the experiment's own needs more than a prompt
            say(f"no sample: {e}")
            return None
        text = f"{prompt}\n\n{sampled}" if data.is_packed else f"{prompt}{sampled}"
        address = address_of(name_of(run.directory))
        with contextlib.suppress(Exception):  # it is printed anyway
            write_whole(run.directory / "sample.txt", text + "\n")
            if address is not None:
                Bucket(address).send("sample.txt")
        print(f"\n{text}\n", flush=True)
    return prompt.rstrip("\n") if prompt.strip() else ""


def run_experiment(experiment: Experiment, callbacks: Sequence[Callable[[Json], None]] = ()) -> None:
    """Train an experiment with the options of the command line: the main function of an experiment file.

    callbacks: see `jaxgpt.fit`. `jaxgpt train FILE` finds them under that name in the file.
    """
    with report_errors():
        example = f"{shell_line('python', sys.argv[0])} --train.seed 1"
        run = functools.partial(train, callbacks=callbacks)
        check_value("experiment", experiment, Experiment)
        parse(run, take_traceback(sys.argv[1:]), Path(sys.argv[0]).name, example=example, experiment=experiment)()
