"""The commands over runs and experiments: each is a tool of `jaxgpt.tools`, imported when it is asked for."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.cli.options import Average, Force, Json, RunName, WeightsDtype
from jaxgpt.config import Experiment, Precision
from jaxgpt.config.validate import LARGEST_SIZE, Count, Interval, Size
from jaxgpt.errors import shell_line
from jaxgpt.files import new_file, render_json, write_whole
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.find import RUNS, find_run


def evaluate(
    run: RunName = None,
    *,
    average: Average = None,
    data: str | None = None,
    stride: int | None = None,
    batch_size: Count | None = None,
    beams: Count | None = None,
    weights: Precision | None = None,
    json: Json = False,
) -> None:
    """Measure loss, perplexity and bits per byte of a run on held-out text.

    Args:
        data: a UTF-8 text file, conversations (.jsonl) or pairs (.tsv); None: the run's validation split
        stride: tokens that each window moves on, so that a token has at least block_size less this many before it: the
            smaller, the better the loss and the longer it takes; None: block_size, windows that touch
        batch_size: windows read together; None: the run's, in training
        beams: for pairs, generate by beam search of this width; None: greedy
        weights: dtype of the matrices, to see what fewer bits cost; None: as trained
    """
    find_run(run)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation

    model = load(run, average=average)
    model = model if weights is None else model.for_decoding(weights)
    found = evaluate_run(model, data, stride=stride, batch_size=batch_size, beams=beams)
    print(render_json(found) if json else format_evaluation(found))


def study(experiment: Positional[str], *, seeds: Count = 5, run_dir: str | None = None, json: Json = False) -> None:
    """Train the variants of an experiment with several seeds each; report which differ by more than noise.

    Args:
        experiment: a Python file with `variants = {name: Experiment(...), ...}` in it
        seeds: runs of each variant; seeds are 0, 1, ...
        run_dir: where the runs go, or continue; None: runs/studies/FILE
    """
    variants = load_variants(experiment)
    configure_jax()
    from jaxgpt.errors import Preempted
    from jaxgpt.session import fit_as_command
    from jaxgpt.tools.study.study import STUDY, format_study, run_study

    place = Path(run_dir) if run_dir else RUNS / "studies" / Path(experiment).stem
    try:
        found = run_study(variants, place, seeds=seeds, say=say, fit_one=fit_as_command)
    except Preempted as e:
        say(f"{str(e).partition(' To continue')[0]} The same command goes on from there.")
        raise SystemExit(1) from None
    write_whole(place / STUDY, render_json(found, indent=1, ensure_ascii=False) + "\n")
    print(render_json(found) if json else format_study(found))


def plan(*, topology: str | None = None, json: Json = False, experiment: Annotated[Experiment, arg(name="")]) -> None:
    """Compile a training step without running it: memory, collectives, and how fast it could be.

    Args:
        topology: a TPU slice such as v5e:4x4, v6e:16x16, v5p:8x8x8; None: this machine
        experiment: whose fields are options too
    """
    if topology is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # libtpu compiles; no device of this machine is wanted
    configure_jax()
    from jaxgpt.data.dataset import prepare_for
    from jaxgpt.runs.pretrained import resolve_init_from
    from jaxgpt.tools.plan.estimate import format_plan
    from jaxgpt.tools.plan.plan import make_plan

    full, _ = resolve_init_from(experiment)
    vocab_size = full.model.vocab_size or prepare_for(full.model, full.data).tokenizer.vocab_size
    found = make_plan(full, vocab_size, topology=topology, say=say)
    print(render_json(found.to_json()) if json else format_plan(found))


def replay(run: RunName = None, *, step: int, json: Json = False) -> None:
    """Repeat one training step of a run from the state that entered it, writing nothing.

    Args:
        step: the step; all since the newest checkpoint before it are repeated
    """
    find_run(run)
    configure_jax()
    from jaxgpt.tools.diagnose.replay import format_replay, replay

    found = replay(run, step, say=say)
    print(render_json(dataclasses.asdict(found), not_finite=str) if json else format_replay(found))


def xray(
    run: RunName = None,
    *,
    average: Average = None,
    prompt: str,
    out: str = "xray.html",
    force: Force = False,
    data: str | None = None,
    corpus_tokens: Annotated[int, Interval(ge=0, le=LARGEST_SIZE)] = 32768,
) -> None:
    """Show what a model does with a text, token by token, as a page for a browser.

    Args:
        prompt: the text, at most as long as the context
        out: the page to write
        data: a UTF-8 text file in which to look for the top activating examples of each MLP unit; None: the run's own training text
        corpus_tokens: tokens of that text to read, spread evenly over it; 0: none
    """
    find_run(run)
    path = new_file(out, force=force)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.xray.xray import xray

    page = xray(load(run, average=average), prompt, data=data, corpus_tokens=corpus_tokens)
    write_whole(path, page)
    print(f"{path}: {len(page.encode()) / 1e3:,.0f} kB; open it in a browser")


def report(
    run: RunName = None,
    *,
    out: str | None = None,
    force: Force = False,
    samples: Count = 4,
    tokens: Size = 400,
    json: Json = False,
) -> None:
    """Summarise a run as a page and JSON: what it learnt, how fast, samples, and how much of them is memorised.

    Args:
        out: the directory for report.html and summary.json; None: the run's
        samples: texts to generate and to compare with the training text
        tokens: of each text
    """
    directory = find_run(run)
    folder = directory if out is None else Path(out)
    page = new_file(str(folder / "report.html"), force=force)
    new_file(str(folder / "summary.json"), force=force)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.report.report import make_report

    summary, html = make_report(load(directory), samples=samples, tokens=tokens)
    write_whole(page, html)
    write_whole(folder / "summary.json", render_json(summary, indent=1, ensure_ascii=False) + "\n")
    if json:
        print(render_json(summary, indent=1, ensure_ascii=not stdout_is_unicode()))
        return
    print(f"{summary['experiment']}: {summary['verdict']}")
    print(f"{page}: {len(html.encode()) / 1e3:,.0f} kB; open it in a browser")


def import_hf(
    model: Positional[str],
    *,
    run_dir: str,
    dtype: WeightsDtype | None = None,
    tokenizer: str | None = None,
    json: Json = False,
) -> None:
    """Make a run of a model in Hugging Face's format, to sample, to evaluate, and to export again.

    Args:
        model: its directory, or its id on the Hub, such as openai-community/gpt2
        run_dir: where the run goes
        dtype: of the parameters; None: as stored
        tokenizer: another tokenizer.json, or ids for none; None: the directory's
    """
    configure_jax(computes=False)
    from jaxgpt.tools.convert.import_hf import import_hf

    source = import_hf(model, run_dir, dtype=dtype, tokenizer=tokenizer)
    family, count = source.family.model_type, len(source.tensors)
    if json:
        print(render_json({"run": run_dir, "model_type": family, "tensors": count}))
        return
    print(f"{family}: {count} tensors of {source.directory} are in {run_dir}")
    print(f'next: {shell_line("jaxgpt", "sample", run_dir)} --prompt "..."')


def export_hf(run: RunName = None, *, out: str, dtype: WeightsDtype | None = None, json: Json = False) -> None:
    """Write a run in Hugging Face's format: a directory that transformers, vLLM and llama.cpp's converters open.

    Args:
        out: the directory to write
        dtype: of the tensors; None: as in the run
    """
    find_run(run)
    configure_jax(computes=False)
    from jaxgpt.tools.convert.export_hf import export_hf

    place = export_hf(run, out, dtype=dtype)
    files = sorted(path.name for path in place.iterdir())
    print(render_json({"out": str(place), "files": files}) if json else f"{place}: {', '.join(files)}")
