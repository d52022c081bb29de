"""Bad input as a table: the real command line, and for each row the same promise.

Exit status 2, at most three lines on stderr that name the value, no traceback, nothing on stdout, and every file where
it was and as it was. Rows run in forks of one process (see `zygote`), some in fresh ones as well.
"""

import contextlib
import dataclasses
import hashlib
import shlex
import stat
from pathlib import Path

import pytest

from jaxgpt.training import fit
from tests.bad_inputs import AT_IMPORT, TRAIN, rows
from tests.bad_place import prepare_place
from tests.conftest import TEXT
from tests.helpers import run_command, tiny_experiment
from tests.zygote import NO_CACHE, Zygote


@pytest.fixture(scope="module")
def zygote():
    parent = Zygote()
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("place")
    with contextlib.chdir(directory):
        Path("t.txt").write_text(TEXT)
        fit(dataclasses.replace(tiny_experiment(Path("t.txt")), name="train"), "trained", progress=False)
    place = directory / "place"
    place.mkdir()
    prepare_place(place, directory / "trained")
    return place


def tree(directory, read=False):
    """Every path below, links not followed: mode, size, times of change (the system's own, too), and what it holds."""
    found = {}
    for path in sorted(directory.rglob("*")):
        s = path.lstat()
        held = hashlib.sha256(path.read_bytes()).hexdigest() if read and stat.S_ISREG(s.st_mode) else None
        found[str(path.relative_to(directory))] = (s.st_mode, s.st_size, s.st_mtime_ns, s.st_ctime_ns, held)
    return found


@pytest.fixture(scope="module")
def untouched(place):
    """Called after a row: the place is as it was before."""
    before, held = [tree(place)], tree(place, read=True)

    def check():
        now = tree(place)
        changed = {name for name in before[0].keys() | now if before[0].get(name) != now.get(name)}
        for name in sorted(now.keys() - before[0], reverse=True):  # so that one row's fault is not the next one's
            new = place / name
            new.rmdir() if stat.S_ISDIR(new.lstat().st_mode) else new.unlink()
        before[0] = tree(place)
        assert not changed

    yield check
    assert tree(place, read=True) == held


def assert_refused(done, said):
    assert done.returncode == 2, (done.returncode, done.stdout[-500:], done.stderr[-3000:])
    assert said in done.stderr or said in done.stderr.replace("_", "-"), done.stderr
    assert done.stderr.splitlines()[-1].startswith("jaxgpt: "), done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 3 and len(done.stderr) < 2000, done.stderr
    assert done.stderr.removesuffix("\n").replace("\n", "").isprintable(), done.stderr
    assert done.stdout == ""


def name_of(row):
    line, env, _ = row
    return " ".join([*env, ascii(line.removeprefix(TRAIN))[1:-1]])[:90]


@pytest.mark.parametrize("row", rows(), ids=name_of)
def test_bad_input(zygote, place, untouched, row):
    line, env, said = row
    assert_refused(zygote.run(shlex.split(line), place, **env), said)
    untouched()


# That the zygote changes nothing: some rows in a process of their own, as well.
@pytest.mark.slow
@pytest.mark.parametrize("row", [rows()[0], *AT_IMPORT], ids=name_of)
def test_the_same_in_a_fresh_process(place, untouched, row):
    line, env, said = row
    env = {"JAX_PLATFORMS": "cpu"} | NO_CACHE | env
    assert_refused(run_command("-m", "jaxgpt", *shlex.split(line), cwd=place, **env), said)
    untouched()
