"""Commands on a run: each calls a tool of `jaxgpt.tools`, imported when the command runs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.config import Precision
from jaxgpt.config.validate import LARGEST_SIZE, Count, Interval, Size
from jaxgpt.files import new_file, render_json, write_whole
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import find_run

PageWeights = Literal["int8", "float32"]
Sort = Literal["date", "loss", "name", "size", "speed", "tokens"]


def runs(
    directory: Positional[str] = "runs",
    *,
    sort: Sort = "name",
    filter: UseAppendAction[tuple[str, ...]] = (),
    json: bool = False,
) -> None:
    """List all runs below a directory.

    Args:
        directory: is searched at any depth, but for links
        sort: the column to sort by: best loss, largest number or newest date first
        filter: FIELD<VALUE, with name, status, date, verdict, size, tokens, loss, speed, step or steps; also <= > >= =
            != and, with a pattern, name~*relu*; may be given several times
        json: print JSON instead of text
    """
    from jaxgpt.tools.overview import format_rows, read_rows, select_rows

    found = read_rows(Path(directory))
    rows = select_rows(found, filter, sort)
    if json:
        print(render_json([dataclasses.asdict(row) for row in rows]))
        return
    print(format_rows(rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    if len(rows) < len(found) or not found:
        say(f"{len(rows)} of {len(found)} runs below {directory}")


def evaluate(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    data: str | None = None,
    stride: int | None = None,
    batch_size: Count | None = None,
    weights: Precision | None = None,
    json: bool = False,
) -> None:
    """Measure loss and perplexity of a run on held-out text.

    Bits per byte and per character compare runs with different tokenizers.

    Args:
        run: run directory; None: the newest under runs/
        average: average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint
        data: a UTF-8 text file, or conversations (.jsonl); None: the run's validation split
        stride: tokens from one window to the next. Each token has at least block_size - stride tokens before it: a
            smaller stride takes longer and gives a lower loss; None: block_size, windows that do not overlap
        batch_size: windows per batch; None: the run's train.batch_size
        weights: dtype of the matrices, to measure what fewer bits cost; None: as trained
        json: print JSON instead of text
    """
    find_run(run)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation

    model = load(run, average=average)
    model = model if weights is None else model.for_decoding(weights)
    found = evaluate_run(model, data, stride=stride, batch_size=batch_size)
    print(render_json(found) if json else format_evaluation(found))


def replay(run: Positional[str | None] = None, *, step: int, json: bool = False) -> None:
    """Repeat one training step of a run, writing nothing.

    Args:
        run: run directory; None: the newest under runs/
        step: the step to repeat, with all steps since the newest checkpoint before it
        json: print JSON instead of text
    """
    find_run(run)
    configure_jax()
    from jaxgpt.tools.replay import format_replay, replay

    found = replay(run, step, say=say)
    print(render_json(dataclasses.asdict(found), not_finite=str) if json else format_replay(found))


def audit(
    run: Positional[str | None] = None,
    *,
    steps: Count | None = None,
    seed: Annotated[int, Interval(ge=0, lt=2**32)] | None = None,
    data: str | None = None,
    tolerance: Annotated[float, Interval(ge=0, lt=1)] = 0.0,
    json: bool = False,
) -> None:
    """Check a run's numbers by taking random steps again.

    They are compared with the log and the checkpoints, bit for bit. The SHA-256 of configuration, data and checkpoints
    are compared, and the last validation loss is measured again. Exit status 1: something differs.

    Args:
        run: run directory; None: the newest under runs/
        steps: most steps to take again; as many as the run has: all; None: 3.5% of them
        seed: seed of the random draw; None: a new one each time
        data: the text, if it is elsewhere now; None: where the run read it
        tolerance: relative difference to accept, for a run of other hardware or versions; 0: equal bits
        json: print JSON instead of text
    """
    find_run(run)
    configure_jax()
    from jaxgpt.tools.replay import audit, format_audit

    found = audit(run, steps=steps, seed=seed, data=data, tolerance=tolerance, say=say)
    print(render_json(dataclasses.asdict(found)) if json else format_audit(found))
    if not found.accepted:
        raise SystemExit(1)


def xray(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    prompt: str,
    out: str = "xray.html",
    force: bool = False,
    data: str | None = None,
    corpus_tokens: Annotated[int, Interval(ge=0, le=LARGEST_SIZE)] = 32768,
) -> None:
    """Show what a model does with a text, as an HTML page.

    Args:
        run: run directory; None: the newest under runs/
        average: average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint
        prompt: the text, at most block_size tokens
        out: the page to write
        force: overwrite files that exist
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


def page(
    run: Positional[str | None] = None,
    *,
    average: Count | None = None,
    weights: PageWeights = "int8",
    prompt: str | None = None,
    out: str = "page.html",
    force: bool = False,
) -> None:
    """Write a model as an HTML page that runs it.

    The page has the weights and needs no network: type, let it write, and switch heads and MLPs off.

    Args:
        run: run directory; None: the newest under runs/
        average: average this many checkpoints, the newest that train.keep_last kept; None: the best checkpoint
        weights: dtype of the matrices on the page
        prompt: the text to begin with; None: the run's train.sample_prompt
        out: the page to write
        force: overwrite files that exist
    """
    find_run(run)
    path = new_file(out, force=force)
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.xray.live import make_page

    html = make_page(load(run, average=average), prompt, weights=weights)
    write_whole(path, html)
    print(f"{path}: {len(html.encode()) / 1e3:,.0f} kB; open it in a browser")


def report(
    run: Positional[str | None] = None,
    *,
    out: str | None = None,
    force: bool = False,
    samples: Count = 4,
    tokens: Size = 400,
    json: bool = False,
) -> None:
    """Summarise a run as an HTML page and JSON.

    The page has losses, speed and samples, and how much of the samples is memorised.

    Args:
        run: run directory; None: the newest under runs/
        out: the directory for report.html and summary.json; None: the run directory
        force: overwrite files that exist
        samples: number of texts to generate and to compare with the training text
        tokens: tokens per text
        json: print JSON instead of text
    """
    directory = find_run(run)
    folder = directory if out is None else Path(out)
    page = new_file(str(folder / "report.html"), force=force)
    new_file(str(folder / "summary.json"), force=force or page.exists())  # it belongs to the page that is replaced
    configure_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.report import make_report

    summary, html = make_report(load(directory), samples=samples, tokens=tokens)
    write_whole(page, html)
    write_whole(folder / "summary.json", render_json(summary, indent=1, ensure_ascii=False) + "\n")
    if json:
        print(render_json(summary, indent=1, ensure_ascii=not stdout_is_unicode()))
        return
    print(f"{summary['experiment']}: {summary['verdict']}")
    print(f"{page}: {len(html.encode()) / 1e3:,.0f} kB; open it in a browser")
