"""Bad input as a table: the real command line, and for each row the same promise.

Exit status 2, at most three lines on stderr that name the value and what to do, no traceback, nothing on stdout, and
every file where it was and as it was. Rows run in forks of one process (see `zygote`), some in fresh ones as well.
"""

import dataclasses
import hashlib
import re
import shlex
import stat
from typing import get_args, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxgpt.experiment import TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.optim import OptimConfig
from tests.bad_inputs import AT_IMPORT, TEXT, TRAIN, rows
from tests.bad_place import prepare_place
from tests.conftest import TEXT as MANCHA
from tests.zygote import Zygote, fresh

# Words that tell what to do, or what would have done.
REMEDY = re.compile(
    r"needs?\b|needed|give|take|see |did you mean|name |repair|delete|put back|there (is|are)|it has|outside|reads|lies|"
    r"train (it|one)|known are|download|of another model|import those|leave|lower|correct it|unset|Look at|fetch|unpack|"
    r"exceeds|is not|damaged|cannot|only|are for",
    re.I,
)


@pytest.fixture(scope="module")
def zygote():
    parent = Zygote()
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def place(zygote, tmp_path_factory):
    directory = tmp_path_factory.mktemp("place")
    (directory / "t.txt").write_text(MANCHA)
    done = zygote.run(shlex.split(f"{TEXT} --run-dir trained"), directory, deadline=240)
    assert done.returncode == 0, done.stderr
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
    assert done.stderr.splitlines()[-1].startswith("jaxgpt: ") and REMEDY.search(done.stderr), done.stderr
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
@pytest.mark.parametrize("row", [*rows()[::20], *AT_IMPORT], ids=name_of)
def test_the_same_in_a_fresh_process(place, untouched, row):
    line, env, said = row
    assert_refused(fresh(shlex.split(line), place, **env), said)
    untouched()


def bad_values(hint):
    """Values that no field of this type takes, whatever its range."""
    words = st.text(st.characters(exclude_categories=["Cs", "Nd"], exclude_characters="\0"), max_size=20)
    if hint is int:
        return st.one_of(
            st.integers(max_value=-2).map(str),
            st.integers(min_value=2**63).map(str),
            st.floats().map(repr),
            words,
        )
    if hint is float:
        return st.one_of(st.sampled_from(["nan", "-inf", "1e999", "0x1p3", "1,5"]), words)
    return words


FIELDS = {
    f"--{part}.{field.name.replace('_', '-')}": hint
    for part, config in (("model", GPTConfig), ("optim", OptimConfig), ("train", TrainConfig))
    for field in dataclasses.fields(config)
    if (hint := get_type_hints(config)[field.name]) not in (bool, str)
}
GENERATED = 20


@pytest.mark.slow  # 32 s of processor time
@given(st.data())
@settings(
    derandomize=True,
    max_examples=GENERATED,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_generated_bad_values(zygote, place, untouched, data):
    option = data.draw(st.sampled_from(sorted(FIELDS)))
    hint = FIELDS[option]
    hints = [h for h in get_args(hint) or [hint] if h is not type(None)]
    value = data.draw(bad_values(hints[0]).filter(lambda v: v.strip().lower() not in ("none", *map(str, hints))))
    assert_refused(zygote.run(["train", f"{option}={value}"], place), "")
    untouched()
