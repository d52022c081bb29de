"""Run the code of a user's own classes, keep it in the run directory, and trust it by its digest.

A file is run as `python FILE` runs it, with the files beside it first among what it imports. Their
modules are called NAME@DIGEST in `sys.modules` afterwards: two versions of a module, or two files
of one name, are there at the same time, and each class finds the module that it comes from.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import inspect
import os
import shutil
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import class_name, from_dict, to_dict
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import Json, cache_directory, is_there, json_sha256, make_cache, read_bytes

FOLDER = "code"  # in a run directory
NOT_OWN = Path(__file__).parents[1], Path(os.__file__).parent  # jaxgpt and Python's library
INSTALLED = {"site-packages", "dist-packages"}
LARGEST_FILE = 2**22  # bytes
VALUES = {"experiment", "variants", "callbacks"}  # assigned in a file, they may differ on a resume
_TRUSTED: list[bool] = []  # of this process, set by `trust_code`
Files = dict[str, bytes]  # Python files of one folder by name, such as "moe.py"


class CodeError(UserError):
    """The code of a file or a run is missing, changed, not trusted, or fails."""


def digests_of(files: Files) -> dict[str, str]:
    """Return the SHA-256 of each file."""
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in sorted(files.items())}


def _tag(files: Files) -> str:
    """Return what follows the names of the modules of these files in `sys.modules`."""
    return f"@{json_sha256(digests_of(files))[:16]}"


def collect(path: Path) -> Files:
    """Read a file, and the files beside it that it imports. Raises `CodeError` for packages."""
    path = path.resolve()
    folder, files, left = path.parent, {}, {path.name}
    while left:
        name = left.pop()
        files[name] = read_bytes(folder / name, LARGEST_FILE)
        for module in _imports(files[name]):
            if module and _is_elsewhere(module):
                continue
            if not module or (folder / module / "__init__.py").exists():
                said = f"{folder / name} imports from a package, which no run keeps"
                raise CodeError(f"{said}: put the file that it needs beside the experiment")
            beside = f"{module}.py"
            if beside not in files and (folder / beside).is_file():
                left.add(beside)
    return files


def _imports(raw: bytes) -> Iterator[str]:
    """Yield the top names of the modules that a file imports, "" for a relative import."""
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError):  # reported when it is run
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else str(node.module).partition(".")[0]


def _is_elsewhere(module: str) -> bool:
    """Return whether a module is jaxgpt's, Python's, or an installed one that was imported."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_known = module == "jaxgpt" or module in sys.stdlib_module_names
    return is_known or bool(INSTALLED & {*Path(file).parts})


def _is_own_file(file: str) -> bool:
    """Return whether a file is the user's or a notebook's: not jaxgpt's, Python's, a package's."""
    path = Path(file)
    is_made = file.startswith(("<string>", "<frozen"))  # by dataclasses, for example
    return not (is_made or INSTALLED & {*path.parts} or any(map(path.is_relative_to, NOT_OWN)))


def find_place(e: BaseException, classes: Sequence[type] = ()) -> str:
    """Return "FILE:LINE: " of the user's innermost frame that an exception went through, or "".

    classes: look in the folders of their files only.
    """
    files = [getattr(sys.modules.get(cls.__module__), "__file__", None) or "" for cls in classes]
    folders = [Path(file).resolve().parent for file in files]
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        is_near = not classes or Path(frame.filename).resolve().parent in folders
        if is_near and _is_own_file(frame.filename):
            return f"{frame.filename}:{frame.lineno}: "
    return ""


def place_of(owner: Any) -> str:
    """Return "FILE:LINE: " of a function, or of a class's first one, if a user wrote it, else ""."""
    functions = vars(owner).values() if isinstance(owner, type) else [owner]
    codes = [getattr(inspect.unwrap(x), "__code__", None) for x in functions if callable(x)]
    places = [(code.co_filename, code.co_firstlineno) for code in filter(None, codes)]
    file, line = min((place for place in places if _is_own_file(place[0])), default=("", 0))
    return f"{file}:{line}: " if file else ""


def name_with_place(owner: Any) -> str:
    """Return "FILE:LINE: NAME" of a function or class, or only its name if it is not the user's."""
    return f"{place_of(owner)}{owner.__qualname__}"


def run_file(path: Path) -> types.ModuleType:
    """Run a file as a module. The user named it, so it is trusted as a program is.

    It imports what `python FILE` can: modules of its folder first. What it prints goes to stderr.
    """
    return _run(collect(path), path, path.stem)


def _run(files: Files, path: Path, module: str) -> types.ModuleType:
    """Run one of the files as a module. What it raises becomes a `CodeError` of one line."""
    # Not by an import, which would find a module of Python with the same name.
    made = types.ModuleType(f"{module}{_tag(files)}")
    made.__file__ = str(path)
    try:
        with contextlib.redirect_stdout(sys.stderr), _importing(files, path.resolve().parent):
            sys.modules[made.__name__] = made
            if not _is_elsewhere(module):
                sys.modules[module] = made
            exec(compile(files[path.resolve().name], path, "exec", dont_inherit=True), vars(made))
    except BaseException as e:
        sys.modules.pop(made.__name__, None)
        if not isinstance(e, Exception | SystemExit):
            raise
        place, said = find_place(e) or f"{path}:1: ", f"{type(e).__name__}: {e}"
        if isinstance(e, UserError):
            raise CodeError(f"{place}{e}") from e
        if isinstance(e, SyntaxError):
            place, said = f"{e.filename or path}:{e.lineno or 1}: ", e.msg
        raise CodeError(f"{place}{said}: repair the experiment file") from e
    return made


@contextlib.contextmanager
def _importing(files: Files, folder: Path) -> Iterator[None]:
    """Let imports find these files of a folder first, and hide modules of the same names.

    Afterwards what was imported is in `sys.modules` as MODULE@DIGEST, as the others are again.
    """
    own = [name.removesuffix(".py") for name in files]
    own = [name for name in own if not _is_elsewhere(name)]
    hidden = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    search_path = list(sys.path)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a module may have been written since the folder was last read
    try:
        yield
    finally:
        sys.path[:] = search_path
        for name in own:
            module = sys.modules.pop(name, None)
            if module is not None:
                module.__name__ = name + _tag(files)
                sys.modules[module.__name__] = module
                _rename(module, name, module.__name__)
        sys.modules.update(hidden)


def _rename(owner: Any, old: str, new: str) -> None:
    """Change the name of a module in its classes, and in those that they define."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == old:
            value.__module__ = new
            _rename(value, old, new)


def code_of(cls: type) -> Files | None:
    """Return the files of a class, as they are now, or None if it is in none, as in a notebook."""
    file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return collect(file) if file.is_file() else None


def own_code(config: Any) -> Files:
    """Return the files of the classes of a configuration that do not belong to jaxgpt."""
    files: Files = {}
    for cls in own_classes(config):
        files |= code_of(cls) or {}
    return files


def own_classes(config: Any) -> Iterator[type]:
    """Yield the classes in a configuration that do not belong to jaxgpt."""
    if not type(config).__module__.startswith("jaxgpt."):
        yield type(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from own_classes(value)


def keep_code(directory: Path, files: Files) -> None:
    """Write the code that a user trains with into a run directory, and trust it from now on."""
    shutil.rmtree(directory / FOLDER, ignore_errors=True)  # left by a run that was killed as it began
    _write(files, directory / FOLDER)
    make_cache(_trusted())
    (_trusted() / json_sha256(digests_of(files))).touch()


def _write(files: Files, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)


def read_code(directory: Path) -> Files:
    """Return the code in a run directory, which may come from somebody else. None of it is run."""
    place = directory / FOLDER
    if not is_there(place, "It holds the code of the run's own classes."):
        return {}
    found = [path for path in place.glob("*.py") if path.is_file() and not path.is_symlink()]
    return {path.name: read_bytes(path, LARGEST_FILE) for path in found}


def trust_code() -> None:
    """Trust the code of all runs that this process reads: the option --trust-code."""
    _TRUSTED.append(True)


def is_trusting() -> bool:
    """Return whether `trust_code` was called."""
    return bool(_TRUSTED)


def unpack(values: Json, files: Files) -> Experiment:
    """Return the experiment of `to_dict` and `own_code`, which is trusted: it is of the process that gave the task."""
    with tempfile.TemporaryDirectory() as directory:
        _write(files, Path(directory) / FOLDER)
        find = functools.partial(find_class, directory=Path(directory), digests=digests_of(files), trusted=True)
        return from_dict(Experiment, values, find_class=find)


def with_classes_of(known: Experiment, experiment: Experiment) -> Experiment:
    """Return an experiment with the classes of `known`, a run's own code, by their names."""
    return from_dict(Experiment, to_dict(experiment), find_class=find_class_in(experiment, known))


def find_class_in(*configs: Any) -> Callable[[type, str], type]:
    """Return a `find_class` of `from_dict` that knows configurations' classes, the last's first."""
    known = {class_name(cls): cls for config in configs for cls in own_classes(config)}

    def find(base: type, name: str) -> type:
        if name not in known:
            raise UserError(f"class {short(name)} is none of {', '.join(known) or 'jaxgpt'}")
        return known[name]

    return find


def _trusted() -> Path:
    return cache_directory() / "trusted-code"


def find_class(
    base: type, name: str, directory: Path, digests: dict[str, str] | None, *, trusted: bool = False
) -> type:
    """Return the subclass of `base` with this name and code: an imported one, or the run's own.

    Raises `CodeError` if there is none, or if its code is not trusted. Nothing is run then.

    Args:
        base: the class of which it must be a subclass.
        name: "module:Class".
        directory: the run directory.
        digests: the SHA-256 of the run's code. None means that it was in no file.
        trusted: run the code even if this user has not trained with it here.
    """
    for cls in _subclasses(base):
        if class_name(cls) == name and _is_made_of(cls, digests):
            return cls
    said = f"class {short(name)}"
    if digests is None:
        raise CodeError(f"{said} was defined in no file: define it again, then load the run")
    files, place = read_code(directory), directory / FOLDER
    module, _, qualified = name.partition(":")
    names = f"{module}.py", f"{module.rpartition('.')[2]}.py"  # the second of a package's module
    file = next((file for file in names if file in files), None)
    if file is None:
        raise CodeError(f"{said} is needed, and {place} does not have its file: put it there again")
    if digests_of(files) != digests:
        differing = digests_of(files).items() ^ digests.items()
        changed = ", ".join(sorted({name for name, _ in differing}))
        raise CodeError(f"{place} is not the code that the run was trained with: restore {changed}")
    if not (trusted or _TRUSTED or (_trusted() / json_sha256(digests)).exists()):
        brought = f"{', '.join(digests)} (SHA-256 {digests[file][:12]}...)"
        remedy = f"read it in {place}, then add --trust-code (trust_code=True) to run it"
        said = f"{directory} brings code of its own, {brought}"
        raise CodeError(f"{said}, and you have not trained with it on this machine: {remedy}")
    made: Any = sys.modules.get(f"{module}{_tag(files)}")
    if made is None:
        # In the run's folder Python would also find bytecode, libraries and links without a digest.
        copy = Path(tempfile.mkdtemp(prefix="jaxgpt-code-")).resolve()
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        _write(files, copy)
        made = _run(files, copy / file, module)
    for part in qualified.split("."):
        made = getattr(made, part, None)
    if not (isinstance(made, type) and issubclass(made, base)):
        raise CodeError(f"{said}: {place / file} has no subclass of {base.__name__} of that name")
    return made


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _is_made_of(cls: type, digests: dict[str, str] | None) -> bool:
    """Return whether the files of a class have these digests. None means that it is in no file."""
    files = code_of(cls)
    if files is None or digests is None:
        return files is None and digests is None
    return digests_of(files).items() <= digests.items()


def check_same_code(experiment: Experiment, directory: Path, digests: dict[str, str] | None) -> None:
    """Raise `UserError` unless an experiment's classes are made of the code of a run.

    Comments, docstrings and VALUES may differ.
    """
    files, kept = own_code(experiment), read_code(directory)
    for name, digest in digests_of(files).items():
        before = digest if digests is None else digests.get(name, "absent")
        if before != digest and _program(kept.get(name, b"")) != _program(files[name]):
            changed = f"(SHA-256 {before[:12]} -> {digest[:12]})"
            raise UserError(
                f"{name} has changed since {directory} was trained with it {changed}: "
                "restore it, name another --run-dir, start over with --fresh, or continue with "
                "the run's own copy by --trust-code (trust_code=True)"
            )


def _program(raw: bytes) -> str:
    """Return what a file defines, without comments, docstrings and VALUES."""
    tree = ast.parse(raw)
    assigned = [x for x in tree.body if isinstance(x, ast.Assign)]
    values = [x for x in assigned if {ast.unparse(target) for target in x.targets} <= VALUES]
    tree.body = [x for x in tree.body if x not in values]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            docs = [x for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
            body[:] = [x for x in body if x not in docs]
    return ast.dump(tree)
