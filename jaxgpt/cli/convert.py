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
    """Make a run of a model in Hugging Face's format or GGUF.

    Args:
        model: a directory, an id on the Hub such as openai-community/gpt2, or a file FILE.gguf
        run_dir: directory of the new run
        dtype: dtype of the parameters; None: as stored
        tokenizer: path of another tokenizer.json, or ids for none; None: the model's
        json: print JSON instead of text
    """
    configure_jax(computes=False)
    if model.endswith(".gguf"):
        from jaxgpt.tools.convert.import_gguf import import_gguf

        source = import_gguf(model, run_dir, dtype=dtype, tokenizer=tokenizer)
    else:
        from jaxgpt.tools.convert.import_hf import import_hf

        source = import_hf(model, run_dir, dtype=dtype, tokenizer=tokenizer)
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
    from jaxgpt.gguf.file import DTYPES, parse_dtype

    known = [name for name in DTYPES if to == "gguf" or name != "q8_0"]
    dtype = parse_dtype(dtype, known)
    if to == "gguf":
        from jaxgpt.tools.convert.export_gguf import export_gguf

        place = export_gguf(run, out, dtype=dtype)
        size = place.stat().st_size
        print(render_json({"out": str(place), "bytes": size}) if json else f"{place}: {size:,} bytes")
        return
    from jaxgpt.tools.convert.export_hf import export_hf

    place = export_hf(run, out, dtype=dtype)
    files = sorted(path.name for path in place.iterdir())
    print(render_json({"out": str(place), "files": files}) if json else f"{place}: {', '.join(files)}")
