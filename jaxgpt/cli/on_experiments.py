"""Commands on an experiment: each calls a tool of `jaxgpt.tools`, imported when the command runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

from jaxgpt.cli.console import say
from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.config import Experiment
from jaxgpt.config.validate import Count, NonNegativeInt
from jaxgpt.errors import Preempted
from jaxgpt.files import render_json, write_whole
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import RUNS


@contextlib.contextmanager
def same_command_resumes() -> Iterator[None]:
    """Turn the end of a run by a signal into the end of its command, which says that it can be repeated."""
    try:
        yield
    except Preempted as e:
        say(f"{str(e).partition(' To continue')[0]} Run the same command to resume.")
        raise SystemExit(1) from None


def study(experiment: Positional[str], *, seeds: Count = 8, run_dir: str | None = None, json: bool = False) -> None:
    """Train variants with several seeds; report which differ.

    If nothing differs, at most 5% of studies find a difference: verdicts are corrected for the number of comparisons.

    Args:
        experiment: a Python file with `variants = {name: Experiment(...), ...}` in it
        seeds: runs of each variant; seeds are 0, 1, ...
        run_dir: directory of the runs; those that exist are resumed; None: runs/studies/FILE
        json: print JSON instead of text
    """
    variants = load_variants(experiment)
    configure_jax()
    from jaxgpt.fitting import fit
    from jaxgpt.tools.study import STUDY, format_study, run_study

    place = Path(run_dir) if run_dir else RUNS / "studies" / Path(experiment).stem
    with same_command_resumes():
        found = run_study(variants, place, seeds=seeds, say=say, fit_one=fit)
    write_whole(place / STUDY, render_json(found, indent=1, ensure_ascii=False) + "\n")
    print(render_json(found) if json else format_study(found))


def sweep(
    *,
    over: UseAppendAction[tuple[str, ...]] = (),
    trials: Count = 20,
    seeds: Count = 3,
    seed: NonNegativeInt = 0,
    run_dir: str | None = None,
    json: bool = False,
    experiment: Annotated[Experiment, arg(name="")],
) -> None:
    """Search for the best learning rate, or other values.

    Many short runs, fewer long ones, and a few full ones with several seeds. EXPERIMENT is as for `jaxgpt train`.

    Args:
        over: FIELD=LOW..HIGH, or FIELD=A,B,C; once for each field that varies
        trials: points to try in the first round
        seeds: full runs of each finalist
        seed: seed of the points
        run_dir: directory of the sweep, resumed if it exists; None: runs/sweeps/NAME
        json: print JSON instead of text
        experiment: its fields are options too
    """
    from jaxgpt.tools.space import parse_axes

    axes = tuple(parse_axes(over))
    configure_jax()
    from jaxgpt.fitting import fit
    from jaxgpt.tools.sweep import Sweep, format_sweep, run_sweep, write_report

    place = Path(run_dir) if run_dir else RUNS / "sweeps" / experiment.name
    given = Sweep(experiment=experiment, axes=axes, trials=trials, seeds=seeds, seed=seed)
    with same_command_resumes():
        found = run_sweep(given, place, say=say, fit_one=fit)
    write_report(given, found, place)
    print(render_json(found) if json else format_sweep(given, found, place))


def plan(*, topology: str | None = None, json: bool = False, experiment: Annotated[Experiment, arg(name="")]) -> None:
    """Compile a training step; estimate its memory and speed.

    The step is not run. EXPERIMENT is as for `jaxgpt train`.

    Args:
        topology: TPUs such as v5e:4x4 or v5litepod-16, two slices as 2xv5e:16x16, or GPUs such as h200:8, four
            hosts as h200:4x8; None: this machine
        json: print JSON instead of text
        experiment: its fields are options too
    """
    if topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # a plugin compiles; no device of this machine is wanted
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # JAX cannot read back programs of absent devices
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what does not fit, and so does the plan
    configure_jax()
    from jaxgpt.runs.pretrained import resolve_init_from
    from jaxgpt.tools.plan.plan import format_plan, make_plan

    full, _ = resolve_init_from(experiment)
    vocab_size = full.model.vocab_size or full.data.open_dataset(full.model).tokenizer.vocab_size
    found = make_plan(full, vocab_size, topology=topology, say=say)
    print(render_json(found.to_json()) if json else format_plan(found))
