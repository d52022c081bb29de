"""Load experiments: built-in ones by name, others by running a Python file."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
import types
from collections.abc import Iterator
from importlib.util import decode_source
from pathlib import Path

from jaxgpt.config import Experiment
from jaxgpt.config.presets import EXPERIMENTS, find_preset
from jaxgpt.config.validate import suggest
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, read_bytes

LARGEST_FILE = 2**22  # bytes
MODULE = "__experiment__"  # name of a file's module while it runs; like `__main__`, no other module has it


def load_experiment(named: str) -> Experiment:
    """Return a built-in experiment, `experiment` of FILE.py, or NAME of FILE.py:NAME. Raises `UserError`."""
    if (preset := find_preset(named)) is not None:
        return preset
    file, _, attribute = named.partition(".py:")
    path = Path(file + ".py") if attribute else Path(named)
    attribute = attribute or "experiment"
    if path.suffix != ".py" or not is_there(path, "Give a .py file."):
        why = "there is no such file" if path.suffix == ".py" else "it is neither a built-in name nor a .py file"
        raise UserError(
            f"no experiment {named!r}: {why}{suggest(named, EXPERIMENTS)}. Built in: {', '.join(EXPERIMENTS)}, depth:N"
        )
    found = vars(_run(path))
    experiment = found.get(attribute)
    if not isinstance(experiment, Experiment):
        others = [name for name, value in found.items() if isinstance(value, Experiment)]
        raise UserError(f"{path} has no `{attribute} = Experiment(...)`; it has {', '.join(others) or 'none'}")
    return experiment


def load_variants(named: str) -> dict[str, Experiment]:
    """Return `variants` of a Python file: the experiments that a study compares, by name. Raises `UserError`."""
    path = Path(named)
    if path.suffix != ".py" or not is_there(path, "Give a .py file."):
        raise UserError(f"no study {named!r}: give a .py file with `variants = {{name: Experiment(...), ...}}` in it")
    variants = vars(_run(path)).get("variants")
    if not isinstance(variants, dict) or not variants:
        raise UserError(f"{path} has no `variants = {{name: Experiment(...), ...}}`, which a study needs")
    for name, experiment in variants.items():
        if not isinstance(name, str) or not isinstance(experiment, Experiment):
            raise UserError(
                f"{path}: variants has {name!r}: {type(experiment).__name__}, needs a name and an Experiment"
            )
    return variants


def _run(path: Path) -> types.ModuleType:
    """Run the file as a module. The user named it, so it is trusted as a program is, but it may have errors."""
    raw, module = read_bytes(path, LARGEST_FILE), types.ModuleType(MODULE)
    module.__file__ = str(path)
    try:
        source = decode_source(raw)
        with contextlib.redirect_stdout(sys.stderr), _as_a_program(module, path):  # stdout is for results
            exec(compile(source, str(path), "exec"), vars(module))
    except SyntaxError as e:
        raise UserError(f"{e.filename or path}:{e.lineno or 1}: {e.msg}: repair the experiment file") from None
    except (Exception, SystemExit) as e:
        lines = [n for frame, n in traceback.walk_tb(e.__traceback__) if frame.f_code.co_filename == str(path)]
        said = str(e) if isinstance(e, UserError) else f"{type(e).__name__}: {e}: repair the experiment file"
        raise UserError(f"{path}:{lines[-1] if lines else 1}: {said}") from None
    return module


@contextlib.contextmanager
def _as_a_program(module: types.ModuleType, path: Path) -> Iterator[None]:
    """Let a file import what `python FILE` can: modules of its folder first. dataclasses need it in `sys.modules`.

    The modules of its folder are removed afterwards: the next file may have others of the same names.
    """
    folder = str(path.resolve().parent)
    search_path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    sys.modules[MODULE] = module
    importlib.invalidate_caches()  # a module may have been written since the folder was last read
    try:
        yield
    finally:
        folders = {folder, *sys.path} - set(search_path) | {folder}
        new = {name.partition(".")[0] for name in sys.modules.keys() - modules} - modules
        neighbours = {name for name in new if _folder_of(sys.modules.get(name)) in folders} | {MODULE}
        for name in [name for name in sys.modules if name.partition(".")[0] in neighbours]:
            del sys.modules[name]
        sys.path[:] = search_path


def _folder_of(module: types.ModuleType | None) -> str | None:
    """Return the folder in which a module or package was found; None if it has no file."""
    folders = list(getattr(module, "__path__", []))
    file = folders[0] if folders else getattr(module, "__file__", None)
    return None if file is None else str(Path(file).parent)
