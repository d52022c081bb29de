"""The tree is the architecture diagram: imports point down, heavy packages stay where they belong."""

import ast
import functools
import graphlib
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command

PACKAGE = REPOSITORY / "jaxgpt"

# From top to bottom; a module imports from rows below its own, and from its own row only its own folder.
ROWS = [
    ["__init__", "__main__"],
    ["cli"],
    ["serve"],
    ["tools"],
    ["training"],
    ["run"],
    ["runs"],
    ["parallel"],
    ["presets"],
    ["experiment"],
    ["gguf"],
    ["hf"],
    ["interventions"],
    ["sample"],
    ["data"],
    ["loss", "plain_generate"],
    ["optim"],
    ["train"],
    ["model", "lora"],
    ["layers"],
    ["batch", "statistics"],
    ["config"],
    ["files"],
    ["errors"],
]

# Inside layers, the same again.
LAYER_ROWS = [
    ["block", "gpu"],
    ["attention", "mlp"],
    ["kernels"],
    ["kernels.plain", "kernels.native.build"],
    ["norm", "position", "linear"],
]

# The only modules that may import a package.
HOMES = {
    "orbax": ["runs.checkpoint"],
    "etils": ["runs.checkpoint"],
    "tokenizers": ["data.tokenizer"],
    "jinja2": ["data.render"],
    "llguidance": ["sample.grammar"],
    "matplotlib": ["runs.metrics"],
    "filelock": ["data.corpus", "runs.bucket", "runs.directory"],
    "fsspec": ["data.corpus"],
    "safetensors": ["hf.weights"],
    "gguf": ["gguf.file"],
    "huggingface_hub": ["hf.source", "hf.weights"],
    "starlette": ["serve.responses", "serve.server"],
    "uvicorn": ["serve.server"],
    "lm_eval": ["tools.evaluate.tasks"],
    "pyarrow": ["tools.prepare"],
    "ray": ["tools.executor"],
    "datasets": ["tools.prepare"],
}


@functools.cache
def modules():
    """(name, tree) of each."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found.append(((name.removesuffix(".__init__") if name != "__init__" else name), ast.parse(path.read_text())))
    return found


NAMES = {f"jaxgpt.{name}" for name, _ in modules()}


def imports(tree):
    """Modules named by import statements anywhere in a file, also in functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in NAMES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def row(name, rows):
    matches = [
        (len(entry), number)
        for number, names in enumerate(rows)
        for entry in names
        if name == entry or name.startswith(entry + ".")
    ]
    return max(matches)[1] if matches else None


def test_every_module_has_a_row():
    assert [name for name, _ in modules() if row(name, ROWS) is None] == []


def test_imports_point_down():
    upward = []
    for name, tree in modules():
        for target in imports(tree):
            if target.split(".")[0] != "jaxgpt":
                continue
            target = "__init__" if target == "jaxgpt" else target.removeprefix("jaxgpt.")
            same_package = name.split(".")[0] == target.split(".")[0]
            here, there = row(name, ROWS), row(target, ROWS)
            if there is not None and here >= there and not same_package:
                upward.append(f"{name} -> {target}")
            if name.startswith("layers.") and target.startswith("layers."):
                here, there = (row(n.removeprefix("layers."), LAYER_ROWS) for n in (name, target))
                if here >= there:
                    upward.append(f"{name} -> {target}")
    assert upward == []


def test_no_tool_imports_another():
    """Each folder of tools can be deleted alone; what two of them need is a module beside them."""
    shared = {path.stem for path in (PACKAGE / "tools").glob("*.py")}
    crossing = [
        f"{name} -> {target}"
        for name, tree in modules()
        if name.startswith("tools.")
        for target in imports(tree)
        if target.startswith("jaxgpt.tools.") and target.split(".")[2] not in {*shared, name.split(".")[1]}
    ]
    assert crossing == []


def test_no_imports_go_round_in_a_circle():
    """Inside a package too: its modules have an order, though no table here says which."""
    graph = {f"jaxgpt.{name}": NAMES & set(imports(tree)) for name, tree in modules()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", HOMES)
def test_heavy_packages_stay_where_they_belong(package):
    users = [name for name, tree in modules() if any(t.split(".")[0] == package for t in imports(tree))]
    assert users == HOMES[package]


def test_layers_model_and_loss_name_no_device():
    words = ("devices", "device_put", "default_backend", "platform", "Mesh", "process_index", "print")
    for name, tree in modules():
        if name.split(".")[0] in ("layers", "model", "loss", "train", "optim"):
            used = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            used |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            assert not used & set(words), (name, used & set(words))


def test_a_field_keeps_its_name_and_is_met_in_few_files():
    """From the configuration to the kernel, and where files of others are read."""
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert sum("n_kv_head" in text for text in texts.values()) <= 11
    assert [path for path, text in texts.items() if "kv_heads" in text] == []


def test_only_the_command_line_prints():
    calls = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert calls == {
        "cli.chat",
        "cli.commands",
        "cli.console",
        "cli.main",
        "cli.train",
    }


# The most lines of Python of each part, all of it counted. A part that shrinks takes its number down with it. One rises
# only by what moves into it, or by a feature that other parts pay for in the same change: the sum never does.
BUDGET = {
    "the flat files and config": 3_215,
    "layers": 1_285,
    "parallel": 1_429,
    "data": 2_752,
    "sample": 1_951,
    "runs": 2_179,  # with runs in a bucket, and "tools" with the executor, which all parts paid for
    "hf": 1_235,
    "gguf": 760,  # with the reader of any program's files, also in parts
    "interventions": 545,
    "serve": 1_270,
    "cli": 1_272,  # with the conversation in a terminal, which tools paid for
    "tools": 3_806,
    "all of jaxgpt": 21_699,
    "tests": 21_478,
}
# Nodes of Python's syntax tree, which no formatting changes: lines alone became dense.
NODES = {"all of jaxgpt": 178_754, "tests": 194_808}
FILES = 120  # of the package


def count_parts():
    """{part: (files, lines, nodes)}."""
    parts = {name: list((PACKAGE / name).rglob("*.py")) for name in BUDGET if (PACKAGE / name).is_dir()}
    parts["the flat files and config"] = [*PACKAGE.glob("*.py"), *(PACKAGE / "config").glob("*.py")]
    parts["all of jaxgpt"] = list(PACKAGE.rglob("*.py"))
    parts["tests"] = list((REPOSITORY / "tests").rglob("*.py"))
    counted = {}
    for name, files in parts.items():
        texts = [file.read_text() for file in files]
        nodes = sum(sum(1 for _ in ast.walk(ast.parse(text))) for text in texts) if name in NODES else 0
        counted[name] = (len(files), sum(len(text.splitlines()) for text in texts), nodes)
    return counted


def test_the_house_keeps_its_budget():
    counted = count_parts()
    table = "\n".join(f"{part:<16} {counted[part][1]:>7,} of {lines:>7,}" for part, lines in BUDGET.items())
    print(table)
    assert [part for part, lines in BUDGET.items() if counted[part][1] > lines] == [], table
    assert {part: counted[part][2] for part, nodes in NODES.items() if counted[part][2] > nodes} == {}
    assert counted["all of jaxgpt"][0] <= FILES


# The core is what these modules bring in: all of it is read in an evening, and needs jax, flax and optax alone.
CORE = ("train", "loss", "model", "optim", "plain_generate")
CORE_LINES = 2_370  # with the decoding kernel, which came from sample: Attention itself keeps keys and values


def test_the_core_is_read_in_an_evening_and_imports_little(tmp_path):
    code = f"""
import sys
for name in {CORE}:
    __import__(f"jaxgpt.{{name}}")
print(*(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "jaxgpt"), sep="\\n")
"""
    done = check_command("-c", code, cwd=tmp_path)
    texts = {file: Path(file).read_text() for file in done.stdout.splitlines()}
    assert sum(len(text.splitlines()) for text in texts.values()) <= CORE_LINES
    assert f" {CORE_LINES:,} lines" in (REPOSITORY / "README.md").read_text()
    allowed = {"jax", "flax", "optax", "jaxgpt"} | sys.stdlib_module_names
    for file, text in texts.items():
        packages = {target.split(".")[0] for target in imports(ast.parse(text))}
        assert packages <= allowed, (file, packages - allowed)


def test_importing_jaxgpt_imports_no_jax_and_its_names_start_no_backend(tmp_path):
    code = """
import sys, jaxgpt
assert "jax" not in sys.modules
for name in jaxgpt.__all__:
    getattr(jaxgpt, name)
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
assert "matplotlib" not in sys.modules
"""
    check_command("-c", code, cwd=tmp_path)


def test_public_names_are_listed_once_and_typed():
    import jaxgpt

    tree = ast.parse(Path(jaxgpt.__file__).read_text())
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        for inner in node.body
        if isinstance(inner, ast.ImportFrom)
        for alias in inner.names
    }
    assert typed == {*jaxgpt.__all__}
    assert all(getattr(jaxgpt, name).__doc__ for name in typed)
    with pytest.raises(AttributeError, match="no attribute 'GTP'"):
        _ = jaxgpt.GTP


def test_python_is_what_pyproject_promises():
    assert sys.version_info >= (3, 11)
