"""experiments/benchmarks/gpu.py: every part, shrunk, on CPU, and what an interruption leaves."""

import json
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import check_command, script

BENCHMARKS = REPOSITORY / "experiments/benchmarks"
ROW = json.dumps([{"what": "a row", "values": [3.0, 1.0, 2.0], "unit": "ms", "beside": "a | b", "ok": True}])
WRITE = "import sys, time; open(sys.argv[1], 'w').write(sys.argv[2])"
# A program for each part; argv: the file of its rows, and what to write there.
PROGRAMS = {
    "correctness": WRITE,
    "training": f"{WRITE}; time.sleep(600)",
    "decode": f"{WRITE}; raise ValueError('no such device')",
    "memory": "raise SystemExit(3)",
    "startup": f"{WRITE}; print('as it should')",
}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield script("benchmarks/gpu")
    for name in [name for name in sys.modules if name.split(".")[0] in ("gpu", "training")]:
        del sys.modules[name]


def test_a_part_that_hangs_or_dies_leaves_the_others(gpu, tmp_path, monkeypatch, capfd):
    target = tmp_path / "found.json"

    def command(name, limit, rows):
        assert 0 < limit <= 80
        return [sys.executable, "-c", PROGRAMS[name], str(rows), ROW]

    monkeypatch.setattr(gpu, "PARTS", dict.fromkeys(PROGRAMS, 20) | {"training": 1})
    gpu.run_parts(list(PROGRAMS), 80.0, command, target)
    found, said = json.loads(target.read_text()), capfd.readouterr()
    assert list(found) == list(PROGRAMS)
    ended = {name: part["ended"] for name, part in found.items()}
    assert ended["correctness"] is None and ended["startup"] is None and "stopped after" in ended["training"]
    assert ended["decode"] == "ended with status 1" and ended["memory"] == "ended with status 3"
    assert {name: len(part["rows"]) for name, part in found.items()} == dict.fromkeys(PROGRAMS, 1) | {"memory": 0}
    assert "no such device" in said.err and "as it should" not in said.err
    lines = said.out.splitlines()
    assert len(lines) == 2 + 4 + 3 and {line.count("|") for line in lines} == {7}
    assert lines[2] == "| correctness | a row | 2 ms (1 to 3) | a / b |  | yes |"


@pytest.mark.slow
def test_every_part_shrunken(tmp_path):
    options = ["--tiny", "--budget", "780", "--json", str(tmp_path / "found.json")]
    done = check_command(str(BENCHMARKS / "gpu.py"), *options, cwd=tmp_path, deadline=840)
    found = json.loads((tmp_path / "found.json").read_text())
    assert [part["ended"] for part in found.values()] == [None] * 7, done.stderr
    rows = {name: {row["what"]: row for row in part["rows"]} for name, part in found.items()}
    flat = [item for part in rows.values() for item in part.items()]
    unmet = [what for what, row in flat if row["ok"] is False]
    profile = 1 if "kernels" in rows["profile"] else 11  # some processes trace no operation of a CPU
    counts = {"correctness": 11, "training": 6, "decode": 13, "memory": 2, "startup": 2, "variants": 6}
    assert unmet == [] and {name: len(part) for name, part in rows.items()} == counts | {"profile": profile}
    assert all(row["values"] or "not available here" in row["beside"] or what == "machine" for what, row in flat)
