"""experiments/benchmarks/gpu.py: every part, shrunken, on CPU; and what an interruption leaves."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.helpers import run_command, script

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


def test_a_table_is_kept_when_the_command_is_interrupted(gpu, tmp_path, monkeypatch, capsys):
    target = tmp_path / "found.json"
    parts = iter([{"rows": [gpu.Row(what="first")], "ended": None}, {"rows": [], "ended": gpu.INTERRUPTED}])
    monkeypatch.setattr(gpu, "run_part", lambda *args, **env: next(parts) | {"seconds": 1.0, "log": ""})
    gpu.run_parts(["correctness", "training", "decode"], 9.0, lambda *args: [], target)
    assert list(json.loads(target.read_text())) == ["correctness", "training"]
    assert "| first |" in capsys.readouterr().out


def test_a_check_that_fails_leaves_the_others(gpu, tmp_path, monkeypatch):
    def fails():
        yield gpu.Row(what="before")
        raise ValueError("a message\nof two lines")

    part = type(sys)("gpu.part")
    part.checks = lambda setting: [fails, lambda: iter([gpu.Row(what="after")])]
    monkeypatch.setitem(sys.modules, "gpu.part", part)
    monkeypatch.setattr("jaxgpt.parallel.jax_setup.configure_jax", lambda: None)
    gpu.measure("part", None, tmp_path / "rows.json")
    before, failed, after = json.loads((tmp_path / "rows.json").read_text())
    assert (before["what"], after["what"]) == ("before", "after")
    assert failed["what"] == "fails" and failed["beside"] == "failed: ValueError: a message" and failed["ok"] is False


def test_shares_of_the_limits(gpu, monkeypatch):
    from gpu import decode, training

    facts = {"flops": 1e12, "peak": 1e15, "device": "a GPU"}
    row = training.utilization("MFU", [0.001, 0.002, 0.004], facts)
    assert list(row.values) == [100, 50, 25] and row.ok
    assert not training.utilization("MFU", [0.0021], facts).ok
    assert training.utilization("MFU", [0.1], facts | {"peak": None}).beside.startswith("not available here")

    device = types.SimpleNamespace(device_kind="NVIDIA H200")  # 4.8 TB/s
    monkeypatch.setattr(decode, "first_device", lambda: device)
    row = decode.share("bandwidth", 3_000_000_000, 360_000_000, [0.001])
    assert list(row.values) == [pytest.approx(70)] and "3,000 MB of weights and 360 of cache" in row.beside


def test_kernels_of_a_gpu_are_those_of_its_streams(gpu, monkeypatch):
    """As CUPTI's traces have them: XLA's own lines and the host's sum up the same kernels."""
    from gpu import profile

    def plane(name, lines):
        events = {
            line: [types.SimpleNamespace(name=n, duration_ns=ns, stats=[("hlo_op", n)]) for n, ns in events]
            for line, events in lines.items()
        }
        return types.SimpleNamespace(
            name=name, lines=[types.SimpleNamespace(name=line, events=each) for line, each in events.items()]
        )

    product, copy = ("gemm", 6e6), ("copy", 3e6)
    planes = [
        plane("/device:GPU:0", {"Stream #7(Compute)": [product, product], "Stream #8": [copy], "XLA Ops": [product]}),
        plane("/host:CPU", {"python": [product]}),
    ]
    for found, expected in ((planes, {"gemm": 4, "copy": 1}), (planes[1:], {"gemm": 2})):
        monkeypatch.setattr(
            profile.jax.profiler,
            "ProfileData",
            types.SimpleNamespace(from_file=lambda path, found=found: types.SimpleNamespace(planes=iter(found))),
        )
        kernels, calls = profile.read_kernels(Path("trace"))
        assert kernels == expected and calls["gemm"] == len(found)


# As much of nanoGPT's model.py as the benchmark uses.
NANOGPT = """
import dataclasses, torch
@dataclasses.dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)
        print("number of parameters: 0.00M")
    def forward(self, x, y):
        logits = self.wte(x) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
"""


@pytest.mark.slow
def test_every_part_shrunken(tmp_path):
    options = ["--tiny", "--budget", "780", "--json", str(tmp_path / "found.json")]
    if importlib.util.find_spec("torch"):
        Path(tmp_path, "model.py").write_text(NANOGPT)
        options += ["--nanogpt", str(tmp_path)]
    done = run_command(str(BENCHMARKS / "gpu.py"), *options, cwd=tmp_path, deadline=840)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [part["ended"] for part in found.values()] == [None] * 7, done.stderr
    rows = {name: {row["what"]: row for row in part["rows"]} for name, part in found.items()}
    unmet = [what for part in rows.values() for what, row in part.items() if row["ok"] is False]
    assert not [what for what in unmet if "over nanoGPT" not in what]
    assert {name: len(part) for name, part in rows.items()} == {
        "training": 8 if "--nanogpt" in options else 6,
        **{"correctness": 11, "decode": 13, "memory": 2, "startup": 2, "profile": 11, "variants": 6},
    }
    assert all(
        row["values"] or "not available here" in row["beside"] or what == "machine"
        for part in rows.values()
        for what, row in part.items()
    )
