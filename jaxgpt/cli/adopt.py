"""Use a model that is not a run yet: it is imported once, into the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxgpt.cli.console import say
from jaxgpt.files import cache_directory
from jaxgpt.hf.source import HUB_ID, find_directory
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.runs.directory import RUNS, is_run
from jaxgpt.tools.convert import import_model


def find_run_of(name: str) -> str:
    """Return the run into which a model is imported: a GGUF file, a folder of Hugging Face's, or an id on the Hub.

    Any other name is returned as it is. A model that has changed since is imported again.
    """
    path = Path(name)
    is_path = path.exists() or path.parent.exists() or path.parts[:1] == RUNS.parts
    is_id = not is_path and HUB_ID.fullmatch(name)
    is_file = path.suffix == ".gguf" and path.is_file()
    is_folder = (path / "config.json").exists() and not is_run(path)
    if not (is_id or is_file or is_folder):
        return name
    place = find_directory(name) if is_id else path.resolve()
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    run = cache_directory() / "models" / f"{path.name}-{digest}"
    if not is_run(run):
        say(f"importing {name} into {run}, once")
        configure_jax()
        import_model(str(name if is_id else path), run)
    return str(run)
