"""Commands that read a run or an experiment, most by a tool of `jaxgpt.tools`, which is imported when it is used."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any, Literal

from jaxgpt.cli.console import say
from jaxgpt.cli.experiment_file import load_variants
from jaxgpt.config.validate import Count, NonNegativeInt, Size
from jaxgpt.data.tokenizer import find_start_token
from jaxgpt.errors import UserError, shell_line
from jaxgpt.files import Result, new_file, read_bytes, read_json
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.run import load
from jaxgpt.runs.directory import RUNS, find_run
from jaxgpt.sample import MAX_NEW_TOKENS, Precision, Sampling
from jaxgpt.serve import ServeOptions
from jaxgpt.tools.executor import Workers
from jaxgpt.tools.html_page import write_page

LARGEST_SCHEMA = 2**20  # bytes
KEY = "JAXGPT_API_KEY"


def sample(
    run: str | None = None,
    *,
    average: Count | None = None,
    prompt: str = "",
    chat: bool = False,
    max_new_tokens: Size = MAX_NEW_TOKENS,
    num_samples: Count = 1,
    sampling: Sampling = Sampling(),  # noqa: B008, it is frozen
    stop: tuple[str, ...] = (),
    schema: str | None = None,
    regex: str | None = None,
    choice: tuple[str, ...] = (),
    seed: int = 0,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
    slots: Count | None = None,
    json: bool = False,
) -> Result | None:
    """Generate text from a trained run.

    Args:
        prompt: text to continue. An empty one means the end-of-text token or a newline
        chat: treat the prompt as a user's turn and print only the assistant's reply. Without a prompt, standard input is
            the turn
        max_new_tokens: tokens to generate
        num_samples: completions to generate
        sampling: how to draw the next token
        stop: end before this text
        schema: a file with a JSON schema that the text must match. None means any text
        regex: an expression, in Rust's syntax, that the whole text must match. None means any text
        choice: a text that it may be. Give the option for each
        seed: the same seed gives the same text
        slots: samples to generate together. A server's number gives the same bits as the server. None means all
    """
    if chat and not prompt:
        typed = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
        prompt = typed.decode(errors="surrogateescape").removesuffix("\n")
        if not prompt.strip():
            raise UserError("--chat has no prompt: give --prompt TEXT, or write the user's turn to standard input")
    model = load(run, average=average).for_decoding(weights, donate=True)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "seed": seed, "chat": chat}
    options |= {"cache_dtype": cache_dtype, "slots": slots, "regex": regex, "choices": choice or None, **vars(sampling)}
    options["schema"] = read_json(Path(schema), LARGEST_SCHEMA) if schema else None
    if not (chat or prompt):
        say(f"no prompt: starting from {find_start_token(model.tokenizer)[1]}")
    start = "" if chat else prompt
    if sys.stdout.isatty() and not json and num_samples == 1:  # show the text as it is generated
        for piece in itertools.chain([start], model.stream(prompt, **options), ["\n"]):
            print(piece, end="", flush=True)
        return None
    texts = model.sample([prompt] * num_samples, **options)
    found = [{"prompt": prompt, "text": text} for text in texts]
    return Result(found, "\n----------------------------------------\n".join(start + text for text in texts))


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
        tasks: tasks of the harness, such as hellaswag,arc_easy,piqa,lambada_openai. None means the loss
        limit: questions of each task. None means all
        num_fewshot: solved examples before each question. None means the task's own number
        include_path: directory with task files of your own. None means no directory
    """
    of_tasks = {"limit": limit, "num_fewshot": num_fewshot, "include_path": include_path}
    unused = of_tasks.values() if tasks is None else (data, stride)
    if any(value is not None for value in unused):
        raise UserError("--limit, --num-fewshot and --include-path need --tasks, and --data and --stride go without it")
    if tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-evaluation-harness, which is not installed: pip install 'jaxgpt[eval]'")
    model = load(run, average=average)
    model = model if weights is None else model.for_decoding(weights, donate=True)
    if tasks is not None:
        from jaxgpt.tools.evaluate.tasks import evaluate_tasks, format_tasks

        names = [name.strip() for name in tasks.split(",")]
        found = evaluate_tasks(model, names, **of_tasks, batch_size=batch_size)
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
) -> None:
    """Show what a model does with a text, as an HTML page.

    Args:
        prompt: the text, at most block_size tokens
        out: the page to write
        data: a UTF-8 text file in which to look for the top activating examples of each MLP unit. None means the run's own training text
    """
    path = new_file(out, force=force)
    model = load(run, average=average)
    from jaxgpt.tools.xray.xray import xray

    print(write_page(path, xray(model, prompt, data=data)))


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

    print(write_page(path, make_page(model, prompt, weights=weights)))


def study(
    experiment: str,
    *,
    seeds: Count = 8,
    run_dir: str | None = None,
    workers: Workers = Workers(),  # noqa: B008, it is frozen
) -> object:
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
    return run_study(variants, place, seeds=seeds, say=say, workers=workers)


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
    found = {"run": run_dir, "model_type": source.family.model_type, "tensors": len(source.tensors)}
    said = f"{found['model_type']}: {found['tensors']} tensors of {source.directory} are in {run_dir}"
    return Result(found, f'{said}\nnext: {shell_line("jaxgpt", "sample", run_dir)} --prompt "..."')


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
        size = export_gguf(run, out, dtype=dtype).stat().st_size
        return Result({"out": out, "bytes": size}, f"{out}: {size:,} bytes")
    export = export_hf if to == "hf" else export_peft
    files = sorted(path.name for path in export(run, out, dtype=dtype).iterdir())
    return Result({"out": out, "files": files}, f"{out}: {', '.join(files)}")


def serve(
    run: str | None = None,
    *,
    average: Count | None = None,
    weights: Precision | None = None,
    options: ServeOptions = ServeOptions(),  # noqa: B008, it is frozen
) -> None:
    """Serve a run: OpenAI's interface, and a page.

    A host beyond this machine needs a key: in the environment variable JAXGPT_API_KEY, or in a file.
    """
    key = _read_key(options.api_key_file)
    if key is None and not options.no_key and options.host not in ("localhost", "127.0.0.1", "::1"):
        remedy = f"set {KEY}, name a file with --api-key-file, or say --no-key"
        raise UserError(f"host {options.host} can be reached from other machines: {remedy}")
    needed = ("starlette", "uvicorn", "prometheus_client")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise UserError(f"jaxgpt serve needs {' and '.join(missing)}: python -m pip install 'jaxgpt[serve]'")
    loaded = load(run, average=average).for_decoding(weights, donate=True)
    from jaxgpt.serve import server

    listener = server.bind(options.host, options.port)
    log = server.make_log(say, options.log_format)
    app, compile_all = server.make_server(loaded, options, key=key, log=log)
    server.serve(app, compile_all, listener, log)


def _read_key(path: str | None) -> str | None:
    """Return the key that clients must send, or None."""
    key = read_bytes(path, 4096).decode("utf-8", errors="replace").strip() if path else os.environ.get(KEY)
    if key is not None and not re.fullmatch("[!-~]{16,}", key):
        raise UserError(f"the key in {path or KEY} has {len(key)} characters: needs at least 16, ASCII without spaces")
    return key
