"""Run the code of a user's own classes, keep it in the run directory, and trust it by its digest.

A file is run as `python FILE` runs it, except that its modules are called NAME@DIGEST in
`sys.modules` afterwards: two versions of a module, or two files of one name, are there at the same
time, and each class finds the module that it comes from.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import itertools
import os
import shutil
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxgpt.config.serialize import class_name, from_dict, to_dict
from jaxgpt.config.validate import short
from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment
from jaxgpt.files import cache_directory, is_there, json_sha256, make_cache, read_bytes

FOLDER = "code"  # in a run directory
NOT_OWN = Path(__file__).parents[1], Path(os.__file__).parent  # jaxgpt and Python's library
LARGEST_FILE = 2**22  # bytes
_TRUSTED: list[bool] = []  # this process's, set by `trust_code`


class CodeError(UserError):
    """The code of a file or a run is missing, changed, not trusted, or fails."""


@dataclasses.dataclass(frozen=True)
class Code:
    """Python files that belong together: one that was named, and what it imports there."""

    folder: Path
    files: Mapping[str, bytes]  # by path from the folder, such as "moe.py" or "lab/moe.py"

    @property
    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file."""
        return {name: hashlib.sha256(raw).hexdigest() for name, raw in sorted(self.files.items())}

    @property
    def tag(self) -> str:
        """Return what follows the names of these modules in `sys.modules`."""
        return f"@{json_sha256(self.digests)[:16]}"

    def find(self, module: str) -> str | None:
        """Return the file of a module a.b: a/b/__init__.py, a/b.py or a.b.py, the first of them."""
        path = module.replace(".", "/")
        names = (f"{path}/__init__.py", f"{path}.py", f"{module}.py")
        return next((name for name in names if name in self.files), None)

    def write(self, folder: Path) -> None:
        """Write the files into another folder."""
        for name, raw in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)


def collect(path: Path, module: str) -> Code:
    """Read a file, and what the import statements in it name in its folder, or in its package.

    module: its name, which says how many folders above it imports begin.
    """
    path = path.resolve()
    depth = 0 if module == path.stem else module.count(".") + (path.name == "__init__.py")
    folder = path.parents[depth]
    is_installed = _is_installed(folder)  # all other packages are there too
    files, left = {}, [path.relative_to(folder).as_posix()]
    while left:
        name = left.pop()
        files[name] = read_bytes(folder / name, LARGEST_FILE)
        for imported in _imports(files[name], name):
            is_own = imported.partition(".")[0] == module.partition(".")[0]
            if not is_own and (is_installed or _is_elsewhere(imported)):
                continue
            *packages, last = itertools.accumulate(imported.split("."), "{}/{}".format)
            places = [f"{last}.py", *(f"{package}/__init__.py" for package in (*packages, last))]
            left += [x for x in places if x not in {*files, *left} and (folder / x).is_file()]
    return Code(folder, files)


def _imports(raw: bytes, name: str) -> Iterator[str]:
    """Yield the modules that a file's import statements may name. name: its path in its folder."""
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError):  # reported when it is run
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = name.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _is_elsewhere(module: str) -> bool:
    """Return whether a module is jaxgpt's, Python's, or an installed package's that was imported."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top == "jaxgpt" or top in sys.stdlib_module_names or _is_installed(Path(file))


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _is_own_file(file: str) -> bool:
    """Return whether a file is the user's, or of a notebook: not jaxgpt's, Python's or a package's."""
    path = Path(file)
    is_made = file.startswith(("<string>", "<frozen"))  # by dataclasses, for example
    return not (is_made or _is_installed(path) or any(map(path.is_relative_to, NOT_OWN)))


def find_place(e: BaseException, classes: Iterable[type] = ()) -> str:
    """Return "FILE:LINE: " of the user's innermost frame that an exception went through, or "".

    classes: look in the folders of their files only, unless they are in none.
    """
    files = [getattr(sys.modules.get(cls.__module__), "__file__", None) for cls in classes]
    folders = [Path(file).resolve().parent for file in filter(None, files)] or [Path("/")]
    for frame in reversed(traceback.extract_tb(e.__traceback__)):
        is_near = any(map(Path(frame.filename).resolve().is_relative_to, folders))
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


def _run(code: Code, module: str, path: Path) -> types.ModuleType:
    """Run a module, whose file is `path`. What it raises becomes a `CodeError` of one line."""
    name, tagged = str(code.find(module)), f"{module}{code.tag}"
    try:
        with contextlib.redirect_stdout(sys.stderr), _importing(code):
            if "/" in name:
                importlib.import_module(module)
            else:  # by an import, a module of Python with the same name would be found
                made = sys.modules[tagged] = types.ModuleType(tagged)
                made.__file__ = str(path)
                if not _is_elsewhere(module):
                    sys.modules[module] = made
                exec(compile(code.files[name], path, "exec", dont_inherit=True), vars(made))
    except BaseException as e:
        sys.modules.pop(tagged, None)
        if not isinstance(e, Exception | SystemExit):
            raise
        place, said = find_place(e) or f"{path}:1: ", f"{type(e).__name__}: {e}"
        if isinstance(e, UserError):
            raise CodeError(f"{place}{e}") from e
        if isinstance(e, SyntaxError):
            place, said = f"{e.filename or path}:{e.lineno or 1}: ", e.msg
        raise CodeError(f"{place}{said}: repair the experiment file") from e
    if tagged not in sys.modules:
        file = sys.modules[module].__file__
        raise CodeError(f"{module} was imported from {file}, so {path} needs a process of its own")
    return sys.modules[tagged]


@contextlib.contextmanager
def _importing(code: Code) -> Iterator[None]:
    """Let imports find the files of this code first, and hide modules of the same names.

    Afterwards what was imported is in `sys.modules` as MODULE@DIGEST, as the others are again.
    """
    tops = {Path(name).parts[0].removesuffix(".py") for name in code.files}

    def take_away() -> dict[str, types.ModuleType]:
        names = [name for name in sys.modules if name.partition(".")[0] in tops and "@" not in name]
        return {name: sys.modules.pop(name) for name in names if not _is_elsewhere(name)}

    hidden, search_path = take_away(), list(sys.path)
    known = {name: module for name, module in sys.modules.items() if name.endswith(code.tag)}
    sys.modules.update({name.removesuffix(code.tag): module for name, module in known.items()})
    sys.path.insert(0, str(code.folder))
    importlib.invalidate_caches()  # a module may have been written since the folder was last read
    try:
        yield
    finally:
        sys.path[:] = search_path
        for name, module in take_away().items():
            module.__name__ = name + code.tag
            sys.modules[module.__name__] = module
            _rename(module, name, module.__name__)
        sys.modules.update(hidden)


def _rename(owner: Any, old: str, new: str) -> None:
    """Change the name of a module in its classes, and in those that they define."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == old:
            value.__module__ = new
            _rename(value, old, new)


def run_file(path: Path) -> types.ModuleType:
    """Run a file as a module. The user named it, so it is trusted as a program is.

    It imports what `python FILE` can: modules of its folder first. What it prints goes to stderr.
    """
    module = path.resolve().stem
    return _run(collect(path, module), module, path)


def code_of(cls: type) -> Code | None:
    """Return the files of a class, as they are now, or None if it is in none, as in a notebook."""
    file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return collect(file, class_name(cls).partition(":")[0]) if file.is_file() else None


def own_code(config: Any) -> Code | None:
    """Return the files of a configuration's classes that are not jaxgpt's, if there are any."""
    codes = list(filter(None, map(code_of, own_classes(config))))
    files = {name: raw for code in codes for name, raw in code.files.items()}
    return Code(codes[0].folder, files) if codes else None


def own_classes(config: Any) -> Iterator[type]:
    """Yield the classes in a configuration that are not jaxgpt's."""
    if not type(config).__module__.startswith("jaxgpt."):
        yield type(config)
    for field in dataclasses.fields(config):
        if dataclasses.is_dataclass(value := getattr(config, field.name)):
            yield from own_classes(value)


def keep_code(directory: Path, code: Code) -> None:
    """Write the code that a user trains with into a run directory, and trust it from now on."""
    code.write(directory / FOLDER)
    make_cache(_trusted())
    (_trusted() / json_sha256(code.digests)).touch()


def read_code(directory: Path) -> Code:
    """Return the code in a run directory, which may be somebody else's. None of it is run."""
    place, files = directory / FOLDER, {}
    if is_there(place, "It holds the code of the run's own classes.") and place.is_dir():
        for path in place.rglob("*.py"):  # which follows no links to folders
            if path.is_file() and not path.is_symlink():
                files[path.relative_to(place).as_posix()] = read_bytes(path, LARGEST_FILE)
    return Code(place.resolve(), files)


def trust_code() -> None:
    """Trust the code of all runs that this process reads: the option --trust-code."""
    _TRUSTED.append(True)


def is_trusting() -> bool:
    """Return whether `trust_code` was called."""
    return bool(_TRUSTED)


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

    Args:
        base: the class of which it must be a subclass.
        name: "module:Class".
        directory: the run directory.
        digests: the SHA-256 of the run's code. None means that it was in no file.
        trusted: run the code even if this user has not trained with it here.

    Raises:
        CodeError: there is no such class, or its code is not trusted. Nothing is run then.
    """
    for cls in _subclasses(base):
        if class_name(cls) == name and _is_made_of(cls, digests):
            return cls
    said = f"class {short(name)}"
    if digests is None:
        raise CodeError(f"{said} was defined in no file: define it again, then load the run")
    code, place = read_code(directory), directory / FOLDER
    module, _, qualified = name.partition(":")
    file = code.find(module)
    if file is None:
        raise CodeError(f"{said} is needed, and {place} does not have its file: put it there again")
    if code.digests != digests:
        changed = ", ".join(sorted({name for name, _ in code.digests.items() ^ digests.items()}))
        raise CodeError(f"{place} is not the code that the run was trained with: restore {changed}")
    if not (trusted or _TRUSTED or (_trusted() / json_sha256(code.digests)).exists()):
        brought = f"{', '.join(digests)} (SHA-256 {digests[file][:12]}...)"
        remedy = f"read it in {place}, then add --trust-code (trust_code=True) to run it"
        said = f"{directory} brings code of its own, {brought}"
        raise CodeError(f"{said}, and you have not trained with it on this machine: {remedy}")
    found: Any = sys.modules.get(f"{module}{code.tag}")
    if found is None:
        # In the run's folder Python would also find bytecode, libraries and links without a digest.
        copy = Path(tempfile.mkdtemp(prefix="jaxgpt-code-")).resolve()
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        code.write(copy)
        found = _run(Code(copy, code.files), module, copy / file)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise CodeError(f"{said}: {place / file} has no subclass of {base.__name__} of that name")
    return found


def _subclasses(base: type) -> Iterator[type]:
    for cls in base.__subclasses__():
        yield cls
        yield from _subclasses(cls)


def _is_made_of(cls: type, digests: dict[str, str] | None) -> bool:
    """Return whether the files of a class have these digests. None means that it is in no file."""
    code = code_of(cls)
    if code is None or digests is None:
        return code is None and digests is None
    return code.digests.items() <= digests.items()


def check_same_code(experiment: Experiment, directory: Path, digests: dict[str, str] | None) -> None:
    """Raise `UserError` unless an experiment's classes are made of the code of a run.

    Comments, docstrings, `experiment`, `variants` and `callbacks` may differ.
    """
    code = own_code(experiment)
    if code is None or digests is None:
        return
    kept = read_code(directory).files
    for name, digest in code.digests.items():
        before = digests.get(name, "absent")
        if before != digest and _program(kept.get(name, b"")) != _program(code.files[name]):
            raise UserError(
                f"{name} has changed since {directory} was trained with it "
                f"(SHA-256 {before[:12]} -> {digest[:12]}): restore it, name another --run-dir, start over "
                "with --fresh, or continue with the run's own copy by --trust-code (trust_code=True)"
            )


def _program(raw: bytes) -> str:
    """Return what a file defines, without comments, docstrings and experiments."""
    tree = ast.parse(raw)
    values = {"experiment", "variants", "callbacks"}
    assigned = [x for x in tree.body if isinstance(x, ast.Assign)]
    experiments = [x for x in assigned if {ast.unparse(target) for target in x.targets} <= values]
    tree.body = [x for x in tree.body if x not in experiments]
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            texts = [x for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant)]
            body[:] = [x for x in body if x not in texts]
    return ast.dump(tree)
