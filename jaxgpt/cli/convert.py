"""Commands from and to other formats, by `jaxgpt.tools.convert`."""

from __future__ import annotations

from typing import Literal

from tyro.conf import Positional

from jaxgpt.errors import shell_line
from jaxgpt.files import render_json
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import find_run

WeightsDtype = Literal["float32", "bfloat16", "float16"]


def import_model(
    model: Positional[str],
    *,
    run_dir: str,
    dtype: WeightsDtype | None = None,
    tokenizer: str | None = None,
    json: bool = False,
) -> None:
    """Make a run of a model of the Hub, or of our GGUF.

    Args:
        model: a directory, an id on the Hub such as openai-community/gpt2, or a FILE.gguf that jaxgpt export wrote
        run_dir: directory of the new run
        dtype: dtype of the parameters; None: as stored
        tokenizer: path of another tokenizer.json, or ids for none; None: the model's
        json: print JSON instead of text
    """
    configure_jax(computes=False)
    from jaxgpt.tools.convert import import_gguf, import_hf

    convert = import_gguf if model.endswith(".gguf") else import_hf
    source = convert(model, run_dir, dtype=dtype, tokenizer=tokenizer)
    family, count = source.family.model_type, len(source.tensors)
    if json:
        print(render_json({"run": run_dir, "model_type": family, "tensors": count}))
        return
    print(f"{family}: {count} tensors of {source.directory} are in {run_dir}")
    print(f'next: {shell_line("jaxgpt", "sample", run_dir)} --prompt "..."')


def export_model(
    run: Positional[str | None] = None,
    *,
    to: Literal["gguf", "hf"],
    out: str,
    dtype: str | None = None,
    json: bool = False,
) -> None:
    """Write a run as GGUF or in Hugging Face's format.

    llama.cpp and ollama run the file, transformers and vLLM the directory.

    Args:
        run: run directory; None: the newest under runs/
        to: gguf: one file; hf: a directory
        out: the file or directory to write
        dtype: float32, float16, bfloat16, or for gguf q8_0; None: as in the run
        json: print JSON instead of text
    """
    find_run(run)
    configure_jax(computes=False)
    from jaxgpt.gguf.file import NAMES, parse_dtype
    from jaxgpt.tools.convert import export_gguf, export_hf

    dtype = parse_dtype(dtype, [name for name in NAMES if to == "gguf" or name != "q8_0"])
    if to == "gguf":
        place = export_gguf(run, out, dtype=dtype)
        size = place.stat().st_size
        print(render_json({"out": str(place), "bytes": size}) if json else f"{place}: {size:,} bytes")
    else:
        place = export_hf(run, out, dtype=dtype)
        files = sorted(path.name for path in place.iterdir())
        print(render_json({"out": str(place), "files": files}) if json else f"{place}: {', '.join(files)}")
