"""A release: one version everywhere, and distributions that work without the repository."""

import importlib.util
import re
import tarfile
import tomllib
import zipfile

import pytest

from jaxgpt.presets import quickstart
from tests.conftest import REPOSITORY
from tests.helpers import check_command

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
TINY = """
    --model.n-layer 1 --model.n-head 2 --model.n-embd 16 --model.block-size 16 --optim.name adamw --optim.warmup-steps 1
    --train.steps 2 --train.batch-size 2 --train.eval-every 2 --train.eval-tokens 64 --train.sample-tokens 5
""".split()


def read(name):
    return (REPOSITORY / name).read_text(encoding="utf-8")


def test_one_version_and_date():
    version, date = re.search(r"^## (\S+), (\S+)$", read("docs/changes.md"), re.MULTILINE).groups()
    citation = dict(re.findall(r"^([\w-]+): (.+)$", read("CITATION.cff"), re.MULTILINE))
    assert (citation["version"], citation["date-released"]) == (version, date)
    assert re.fullmatch(rf"{re.escape(version)}|.*\.dev\d+", VERSION)  # the release, or on the way to the next
    assert citation["license"] == PROJECT["license"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel, built from the source distribution, and the source distribution."""
    for package in ("build", "flit_core"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f'{package} is not installed: pip install "jaxgpt[test]"')
    place = tmp_path_factory.mktemp("dist")
    check_command("-m", "build", "--no-isolation", "--outdir", str(place), str(REPOSITORY), cwd=place)
    return place / f"jaxgpt-{VERSION}-py3-none-any.whl", place / f"jaxgpt-{VERSION}.tar.gz"


@pytest.mark.slow
def test_distributions_hold_the_package_and_nothing_else(distributions):
    wheel, source = distributions
    package = {p.relative_to(REPOSITORY).as_posix() for p in (REPOSITORY / "jaxgpt").rglob("*") if p.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    info = f"jaxgpt-{VERSION}.dist-info"
    records = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    assert set(zipfile.ZipFile(wheel).namelist()) == package | records
    beside = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    with tarfile.open(source) as archive:
        assert {member.name for member in archive} == {f"jaxgpt-{VERSION}/{name}" for name in package | beside}


@pytest.mark.slow
def test_the_wheel_trains_and_shows_its_model_in_an_empty_directory(distributions, tmp_path):
    installed, here = tmp_path / "installed", tmp_path / "here"
    here.mkdir()
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--no-compile", "--target", str(installed)]
    check_command(*install, str(distributions[0]), cwd=here)

    def run(*argv):
        done = check_command(*argv, cwd=here, PYTHONPATH=str(installed))
        return done.stdout

    assert run("-c", "import jaxgpt; print(jaxgpt.__file__)").startswith(str(installed))
    command = installed / "bin" / "jaxgpt"
    assert run(str(command), "--version") == f"jaxgpt {VERSION}\n"
    assert run(str(command), "train", *TINY)
    name = quickstart().name
    assert (here / "runs" / name / "experiment.json").exists()
    run(str(command), "page", "--out", "page.html")
    assert (here / "page.html").stat().st_size > 10_000
