"""Commands that read a run or an experiment by a tool of `jaxgpt.tools`, which is imported when the command runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from pathlib import Path
from typing import Annotated, Literal

import jax

from jaxgpt.cli.console import say
from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.config.validate import LARGEST_SIZE, Count, Interval, NonNegativeInt, PositiveFloat
from jaxgpt.errors import UserError, shell_line
from jaxgpt.experiment import Experiment
from jaxgpt.files import Result, new_file, write_whole
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.run import load
from jaxgpt.runs.directory import RUNS, find_run
from jaxgpt.sample import Precision


def evaluate(
    run: str | None = None,
    *,
    average: Count | None = None,
    data: str | None = None,
    stride: int | None = None,
    batch_size: Count | None = None,
    weights: Precision | None = None,
    tasks: str | None = None,
    limit: Count | None = None,
    num_fewshot: NonNegativeInt | None = None,
    include_path: str | None = None,
) -> Result:
    """Measure loss and perplexity of a run on held-out text.

    Bits per byte and per character compare runs with different tokenizers. With --tasks, score the questions of
    lm-evaluation-harness instead.

    Args:
        data: a UTF-8 text file, or conversations (.jsonl). None means the run's validation split
        stride: tokens from one window to the next. Each token has at least block_size - stride tokens before it: a
            smaller stride takes longer and gives a lower loss. None means block_size, windows that do not overlap
        batch_size: windows per batch. None means the run's train.batch_size
        weights: dtype of the matrices, to measure what fewer bits cost. None means as trained
        tasks: tasks of the harness, such as hellaswag,arc_easy,piqa,lambada_openai, or core. None means the loss
        limit: questions of each task. None means all
        num_fewshot: solved examples before each question, of which core has numbers of its own. None means the task's own number
        include_path: directory with task files of your own. None means no directory
    """
    if any(x is not None for x in ((limit, num_fewshot, include_path) if tasks is None else (data, stride))):
        raise UserError("--limit, --num-fewshot and --include-path need --tasks, and --data and --stride go without it")
    if tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness, which is not installed: pip install 'jaxgpt[eval]'")
    model = load(run, average=average)
    model = model if weights is None else model.for_decoding(weights, donate=True)
    if tasks is not None:
        from jaxgpt.tools.evaluate.tasks import evaluate_tasks, format_tasks

        options = {"limit": limit, "num_fewshot": num_fewshot, "include_path": include_path, "batch_size": batch_size}
        found = evaluate_tasks(model, [name.strip() for name in tasks.split(",")], **options)
        return Result(found, format_tasks(found))
    from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation

    found = evaluate_run(model, data, stride=stride, batch_size=batch_size)
    return Result(found, format_evaluation(found))


def xray(
    run: str | None = None,
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
        prompt: the text, at most block_size tokens
        out: the page to write
        data: a UTF-8 text file in which to look for the top activating examples of each MLP unit. None means the run's own training text
        corpus_tokens: tokens of that text to read, spread evenly over it. 0 means none
    """
    path = new_file(out, force=force)
    model = load(run, average=average)
    from jaxgpt.tools.xray.xray import xray

    _write_page(path, xray(model, prompt, data=data, corpus_tokens=corpus_tokens))


def page(
    run: str | None = None,
    *,
    average: Count | None = None,
    weights: Literal["int8", "float32"] = "int8",
    prompt: str | None = None,
    out: str = "page.html",
    force: bool = False,
) -> None:
    """Write a model as an HTML page that runs it.

    The page has the weights and needs no network: type, let it write, and switch heads and MLPs off.

    Args:
        weights: dtype of the matrices on the page
        prompt: the text to begin with. None means the run's train.sample_prompt
        out: the page to write
    """
    path = new_file(out, force=force)
    model = load(run, average=average)
    from jaxgpt.tools.xray.live import make_page

    _write_page(path, make_page(model, prompt, weights=weights))


def _write_page(path: Path, html: str) -> None:
    write_whole(path, html)
    print(f"{path}: {len(html.encode()) / 1e3:,.0f} kB; open it in a browser")


def study(experiment: str, *, seeds: Count = 8, run_dir: str | None = None) -> object:
    """Train variants with several seeds and report which differ.

    If nothing differs, at most 5% of studies find a difference: verdicts are corrected for the number of comparisons.

    Args:
        experiment: a Python file with `variants = {name: Experiment(...), ...}` in it
        seeds: runs of each variant, with the seeds 0, 1, ...
        run_dir: directory of the runs. Those that exist are resumed. None means runs/studies/FILE
    """
    variants = load_variants(experiment)
    configure_jax()
    from jaxgpt.tools.study import run_study

    place = Path(run_dir) if run_dir else RUNS / "studies" / Path(experiment).stem
    return run_study(variants, place, seeds=seeds, say=say)


def plan(
    *,
    topology: str | None = None,
    tokens: str | None = None,
    price: PositiveFloat | None = None,
    experiment: Experiment,
) -> Result:
    """Compile a training step and estimate its memory and speed.

    The step is not run. EXPERIMENT is as for `jaxgpt train`.

    Args:
        topology: devices, such as v5e-8, v5p:2x2x4, 2xv5e:16x16, 8xh100 or 4x8xh200. None means this machine
        tokens: tokens to train on, such as 10B. None means train.steps
        price: USD per device-hour. None means no price
    """
    if topology is not None:
        jax.config.update("jax_platforms", "cpu")  # a plugin compiles, and needs no device of this machine
        jax.config.update("jax_enable_compilation_cache", False)  # JAX cannot read back programs of absent devices
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of what does not fit, and so does the plan
    configure_jax()
    from jaxgpt.runs.pretrained import resolve_init_from
    from jaxgpt.tools.plan.plan import cost, format_plan, make_plan

    full, _ = resolve_init_from(experiment)
    if tokens is not None:
        steps = -(-parse_tokens(tokens) // (full.train.batch_size * full.model.block_size))
        full = dataclasses.replace(full, train=dataclasses.replace(full.train, steps=steps))
    vocab_size = full.model.vocab_size or full.data.open_dataset(full.model).tokenizer.vocab_size
    found = make_plan(full, vocab_size, topology=topology, say=say)
    dollars = {} if price is None else {"dollars": cost(found, price)}
    return Result(found.to_json() | dollars, format_plan(found, price))


def parse_tokens(text: str) -> int:
    """Return the number of 10B, 1.5T or 300_000_000."""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?)([KMBT]?)", text.upper())
    if not match or not (number := round(float(match[1]) * 1000 ** " KMBT".index(match[2] or " "))):
        raise UserError(f"tokens={text!r}: needs a number such as 10B, 500M or 300_000_000")
    return number


def import_model(
    model: str,
    *,
    run_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    tokenizer: str | None = None,
) -> Result:
    """Make a run of a model of the Hub, or of a GGUF file.

    Args:
        model: a directory, an id on the Hub such as openai-community/gpt2, or a FILE.gguf
        run_dir: directory of the new run
        dtype: dtype of the parameters. None means as stored
        tokenizer: path of another tokenizer.json, or ids for none. None means the model's
    """
    configure_jax(computes=False)
    from jaxgpt.tools import convert

    source = convert.import_model(model, run_dir, dtype=dtype, tokenizer=tokenizer)
    family, count = source.family.model_type, len(source.tensors)
    said = f"{family}: {count} tensors of {source.directory} are in {run_dir}\nnext: {shell_line('jaxgpt', 'sample', run_dir)}"
    return Result({"run": run_dir, "model_type": family, "tensors": count}, f'{said} --prompt "..."')


def export_model(
    run: str | None = None, *, to: Literal["gguf", "hf", "peft"], out: str, dtype: str | None = None
) -> Result:
    """Write a run as GGUF or in Hugging Face's format.

    llama.cpp and ollama run the file, transformers and vLLM the directory.

    Args:
        to: gguf is one file, hf a directory, and peft a directory with only the adapters
        out: the file or directory to write
        dtype: float32, float16, bfloat16, or for gguf q8_0. None means as in the run
    """
    find_run(run)
    configure_jax(computes=False)
    from jaxgpt.gguf.file import NAMES, parse_dtype
    from jaxgpt.tools.convert import export_gguf, export_hf, export_peft

    dtype = parse_dtype(dtype, [name for name in NAMES if to == "gguf" or name != "q8_0"])
    if to == "gguf":
        place = export_gguf(run, out, dtype=dtype)
        size = place.stat().st_size
        return Result({"out": str(place), "bytes": size}, f"{place}: {size:,} bytes")
    place = (export_hf if to == "hf" else export_peft)(run, out, dtype=dtype)
    files = sorted(path.name for path in place.iterdir())
    return Result({"out": str(place), "files": files}, f"{place}: {', '.join(files)}")
