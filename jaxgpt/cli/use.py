"""The verbs that use a run, or make one of a model that is there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from jaxgpt.cli.console import say, stdout_is_unicode
from jaxgpt.cli.options import (
    EvaluateOptions,
    ExportOptions,
    ImportOptions,
    ReportOptions,
    SampleOptions,
    XrayOptions,
    count_in_range,
    parse,
)
from jaxgpt.config.validate import LARGEST_COUNT, LARGEST_SIZE
from jaxgpt.errors import shell_line
from jaxgpt.files import new_file, render_json, write_whole
from jaxgpt.parallel.jax_setup import start_jax
from jaxgpt.runs.find import find_run


def sample(argv: list[str]) -> None:
    options = parse(SampleOptions, argv, "jaxgpt sample [RUN]")
    for name, value, most in (
        ("max-new-tokens", options.max_new_tokens, LARGEST_SIZE),
        ("num-samples", options.num_samples, LARGEST_COUNT),
    ):
        count_in_range(name, value, most)
    if options.beams is not None:
        count_in_range("beams", options.beams, LARGEST_COUNT)
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
    reads = options.chat or run.experiment.data.is_pairs  # the prompt, which is no part of the text
    if not options.prompt and not reads:
        say(f"no prompt: starting from {start_token(run.tokenizer)[1]}")
    how: dict[str, Any] = {
        name: getattr(options, name) for name in ("max_new_tokens", "stop", "seed", "cache_dtype", "chat")
    }
    how |= given
    shown = "" if reads else options.prompt
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
        found = [{"prompt": options.prompt, "text": text} for text in texts]
        print(render_json(found, ensure_ascii=not stdout_is_unicode()))
        return
    for number, text in enumerate(texts):
        if number:
            print("-" * 40)
        print(shown + text)


def evaluate(argv: list[str]) -> None:
    options = parse(EvaluateOptions, argv, "jaxgpt evaluate [RUN]")
    if options.batch_size is not None:
        count_in_range("batch-size", options.batch_size, LARGEST_COUNT)
    if options.beams is not None:
        count_in_range("beams", options.beams, LARGEST_COUNT)
    find_run(options.run)
    start_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.evaluate.text import evaluate_run, text_table

    run = load(options.run, average=options.average)
    run = run if options.weights is None else run.packed(options.weights)
    found = evaluate_run(run, options.data, stride=options.stride, batch_size=options.batch_size, beams=options.beams)
    print(render_json(found) if options.json else text_table(found))


def xray(argv: list[str]) -> None:
    options = parse(XrayOptions, argv, "jaxgpt xray [RUN]")
    if options.corpus_tokens:
        count_in_range("corpus-tokens", options.corpus_tokens, LARGEST_SIZE)
    find_run(options.run)
    out = new_file(options.out, force=options.force)
    start_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.xray.xray import xray as xray_page

    run = load(options.run, average=options.average)
    page = xray_page(run, options.prompt, data=options.data, corpus_tokens=options.corpus_tokens)
    write_whole(out, page)
    print(f"{out}: {len(page.encode()) / 1e3:,.0f} kB; open it in a browser")


def report(argv: list[str]) -> None:
    options = parse(ReportOptions, argv, "jaxgpt report [RUN]")
    count_in_range("samples", options.samples, LARGEST_COUNT)
    count_in_range("tokens", options.tokens, LARGEST_SIZE)
    directory = find_run(options.run)
    out = directory if options.out is None else Path(options.out)
    page = new_file(str(out / "report.html"), force=options.force)
    new_file(str(out / "summary.json"), force=options.force)
    start_jax()
    from jaxgpt.run import load
    from jaxgpt.tools.report.report import report

    summary, html = report(load(directory), samples=options.samples, tokens=options.tokens)
    write_whole(page, html)
    write_whole(out / "summary.json", render_json(summary, indent=1, ensure_ascii=False) + "\n")
    if options.json:
        print(render_json(summary, indent=1, ensure_ascii=not stdout_is_unicode()))
        return
    print(f"{summary['experiment']}: {summary['verdict']}")
    print(f"{page}: {len(html.encode()) / 1e3:,.0f} kB; open it in a browser")


def import_hf(argv: list[str]) -> None:
    options = parse(ImportOptions, argv, "jaxgpt import-hf DIR")
    start_jax(computes=False)
    from jaxgpt.tools.convert.import_hf import import_hf

    source = import_hf(options.model, options.run_dir, dtype=options.dtype, tokenizer=options.tokenizer)
    if options.json:
        print(
            render_json(
                {"run": options.run_dir, "model_type": source.family.model_type, "tensors": len(source.tensors)}
            )
        )
        return
    print(f"{source.family.model_type}: {len(source.tensors)} tensors of {source.directory} are in {options.run_dir}")
    print(f'next: {shell_line("jaxgpt", "sample", options.run_dir)} --prompt "..."')


def export_hf(argv: list[str]) -> None:
    options = parse(ExportOptions, argv, "jaxgpt export-hf [RUN]")
    find_run(options.run)
    start_jax(computes=False)
    from jaxgpt.tools.convert.export_hf import export_hf

    place = export_hf(options.run, options.out, dtype=options.dtype)
    files = sorted(path.name for path in place.iterdir())
    print(render_json({"out": str(place), "files": files}) if options.json else f"{place}: {', '.join(files)}")
