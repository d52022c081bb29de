"""The track of fewest steps: valid entries pass, each broken rule is named, and one command trains and audits an entry."""

import json
import shutil

import pytest

from jaxgpt.files import sha256
from tests.conftest import REPOSITORY
from tests.helpers import script

tool = script("records")
HEAD, MARK, SEEDS, format_cells = tool.HEAD, tool.MARK, tool.SEEDS, tool.format_cells


def losses(mean):
    return [{"seed": seed, "val_loss": mean + 0.01 * (seed % 3 - 1)} for seed in range(SEEDS)]


@pytest.fixture
def entries():
    """A first entry and a record, by the names of their files."""
    made = {}
    for name, steps, mean in (("first", 250, MARK - 0.01), ("second", 200, MARK - 0.02)):
        runs = [run | {"seconds": 9.0, "audit": {"retaken": steps, "accepted": True}} for run in losses(mean)]
        made[name] = {"experiment": f"{name}.py", "steps": steps, "processor": "a processor", "date": "2026-11-26"}
        made[name] |= {"runs": runs, "against": None}
    made["second"]["against"] = {"experiment": "first.py", "losses": losses(MARK)}
    return made


@pytest.fixture
def check(tmp_path):
    def check(entries, change=str):
        """Write entries and a table of them, and check it. change: turns the page, or a file, into another text."""
        rows = ""
        for name, record in entries.items():
            (tmp_path / f"{name}.json").write_text(change(json.dumps(record)))
            rows += f"| {' | '.join(format_cells(record, entry=name, data=f'[data]({name}.json)'))} |\n"
        (tmp_path / "page.md").write_text(change(f"# Records\n\n{HEAD}\n|---|\n{rows}\nThe end.\n"))
        return tool.check_page(str(tmp_path / "page.md"))

    return check


def test_a_first_entry_and_a_record_are_valid_and_so_is_the_real_table(check, entries, tmp_path):
    assert check({}) == {}
    assert check(entries) == {f"{tmp_path}/page.md:5: first": [], f"{tmp_path}/page.md:6: second": []}
    assert not any(tool.check_page(str(REPOSITORY / "experiments/RECORDS.md")).values())


FALSE = {
    "its steps are True, not a whole number from 1": lambda second: second.update(steps=True),
    "its seeds are not 0 to 19, each once": lambda second: second["runs"].pop(),
    "seeds [7]: not every step is audited and right": lambda second: second["runs"][7]["audit"].update(accepted=False),
    "seeds [8]: not every step is audited and right": lambda second: second["runs"][8]["audit"].update(retaken=199),
    "its mean loss is not below 1.88 at p < 0.001": lambda second: second["runs"][9].update(val_loss=1.95),
    "the last record has no more steps": lambda second: second.update(steps=250),
    "against is not the last record's experiment": lambda second: second["against"].update(experiment="other.py"),
    "against has other seeds": lambda second: second["against"]["losses"].append({"seed": 0, "val_loss": 2.0}),
    "the last record is not worse at p < 0.001": lambda second: second["against"].update(losses=losses(MARK - 0.021)),
}


@pytest.mark.parametrize("fault", FALSE)
def test_a_broken_rule_is_named(check, entries, fault):
    FALSE[fault](entries["second"])
    found = check(entries)
    first, second = found.values()
    assert first == [] and fault in second


EXPERIMENTS = """
import dataclasses
from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig

experiment = Experiment(name="a", model=GPTConfig(block_size=8, n_layer=1, n_head=2, n_embd=8), train=TrainConfig(batch_size=4))
faster = dataclasses.replace(experiment, optim=OptimConfig(learning_rate=0.02))
larger = dataclasses.replace(experiment, train=TrainConfig(batch_size=8))
"""


@pytest.mark.slow
def test_one_command_runs_and_resumes_an_entry_and_refuses_another_batch(tmp_path, text_file, monkeypatch, capsys):
    (tmp_path / "tiny.py").write_text(EXPERIMENTS)
    module, audited = tool, []
    monkeypatch.setattr(module, "BASE", str(tmp_path / "tiny.py"))
    monkeypatch.setattr(module, "TEXT", sha256(text_file))
    audit = module.audit
    monkeypatch.setattr(module, "audit", lambda run, *, steps: audited.append(run.name) or audit(run, steps=steps))

    def run(name, *options):
        argv = [f"{tmp_path}/tiny.py:{name}", "--data.path", str(text_file), "--steps", "2", "--seeds", "3"]
        argv += ["--out", str(tmp_path / "made/one.json"), "--runs", str(tmp_path / "runs"), *options]
        module.main(argv)
        return json.loads((tmp_path / "made/one.json").read_text())

    found = run("faster", "--against", f"{tmp_path}/tiny.py")
    row = capsys.readouterr().out
    assert [run["audit"] for run in found["runs"]] == [{"retaken": 2, "accepted": True}] * 3
    assert found["experiment"] == f"{tmp_path}/tiny.py:faster" and "made/one.json" in row
    assert row.split(" | ")[1:-1] == format_cells(found, entry=f"`{found['experiment']}`", data="")[1:-1]
    assert found["against"]["experiment"] == f"{tmp_path}/tiny.py"
    assert len({run["val_loss"] for run in found["runs"] + found["against"]["losses"]}) == 6
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("manifest.json")}
    shutil.rmtree(tmp_path / "runs/one/2")
    again = run("faster", "--against", f"{tmp_path}/tiny.py")
    assert [run["val_loss"] for run in again["runs"]] == [run["val_loss"] for run in found["runs"]]
    assert audited == ["0", "1", "2", "2"] and len(kept) == 6
    assert [path.parts[-4:-2] for path in kept if path.stat().st_mtime_ns != kept[path]] == [("2", "checkpoints")]
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        run("larger")
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and "/tiny.py: train.batch_size 4 -> 8. Only its" in said
