"""experiments/post: rows that the model writes itself are a function of the run alone, and scored as the step scores them."""

import contextlib
import dataclasses
import shutil

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.errors import UserError
from jaxgpt.lora import LoraConfig
from jaxgpt.tools.replay import audit, replay
from jaxgpt.training import fit, open_training
from tests.conftest import REPOSITORY
from tests.helpers import check_command, import_pages, logged, replace_fields, run_command

POST = REPOSITORY / "experiments" / "post"
grpo, gaps, mismatch, tasks = import_pages("post", "grpo", "sampler_gap", "mismatch", "tasks")

# A user's file, beside those of the folder. Its reward, or its callback, ends the process where KILL says.
OWN = """
import dataclasses, os, signal

from grpo_arithmetic import PolicyConfig
from rollouts import RolloutConfig

from jaxgpt import Experiment, GPTConfig, OptimConfig, TrainConfig

KILL, asked = os.environ.get("KILL"), []


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts(RolloutConfig):
    alphabet = "\\nab>"

    def prompt(self, rng):
        return "".join(rng.choice(["a", "b"], 6)) + ">"

    def answer(self, prompt):
        return prompt[:1]

    def reward(self, prompt, completion):
        asked.append(completion)
        if KILL == "in a rollout" and len(asked) == 20:
            die()
        return completion.count(prompt[0]) / (1 + len(completion))


experiment = Experiment(
    name="own",
    model=GPTConfig(block_size=12, n_layer=2, n_head=2, n_embd=8, position="rope"),
    data=Rollouts(group=4, max_new_tokens=5, val_prompts=8),
    objective=PolicyConfig(),
    optim=OptimConfig(learning_rate=1e-2, warmup_steps=1),
    train=TrainConfig(steps=6, batch_size=8, log_every=1, eval_every=3, checkpoint_every=2, sample_tokens=0),
)


def callback(line):
    if KILL == "in a save" and line.get("saved") == 4:
        die()


callbacks = [callback]
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A folder with copies of experiments/post, and a file of the user's."""
    folder = tmp_path_factory.mktemp("lab")
    for file in POST.glob("*.py"):
        shutil.copy(file, folder)
    (folder / "own.py").write_text(OWN)
    return folder


@pytest.fixture(scope="module")
def experiment(lab):
    return load_experiment(str(lab / "own.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "micro", "error", "ratio"),
    [
        ("exact", None, 0.0, 1.0),
        ("exact", 32, 0.0, 1.0),
        ("bfloat16", None, 2e-4, 1.0),
        ("noise", None, 1e-7, 1.0),
        ("renormalised", None, 0.067, 0.935),
    ],
)
def test_the_first_ratio_is_exactly_1_or_the_run_ends(scores, micro, error, ratio, tmp_path, monkeypatch):
    """Every log-probability of the step's forward pass has the bits of the rollout's, also in micro-batches."""
    monkeypatch.setattr(mismatch, "NOISE", 1e-7)  # the smallest steps of float32
    parts = {"model": {"n_layer": 1, "n_embd": 16}, "data": {"scores": scores}, "parallel": {"micro_batch_size": micro}}
    small = replace_fields(mismatch.experiment, **parts, train={"init_from": None, "steps": 2, "batch_size": 64})
    with pytest.raises(UserError, match="off_policy") if error else contextlib.nullcontext():
        fit(small, tmp_path, progress=False, setup=False, callbacks=[grpo.check_ratio])
    line, *_ = logged(tmp_path)
    assert line["mismatch"] == pytest.approx(error, rel=0.5) and line["ratio"] == pytest.approx(ratio, abs=0.01)
    assert line["sampler_gap"] < 1e-5


@pytest.fixture(scope="module")
def tiny():
    """A model with its parameters and tokenizer, and what the first cell draws."""
    pytest.importorskip("llguidance")
    model = gaps.open_model(None)
    return model, gaps.measure(gaps.Cell(), *model)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", gaps.CELLS)
def test_the_engine_stores_the_trainers_log_probability(name, tiny):
    """It is "whole", whatever the filters are: only where none changes anything is it "truncated" too."""
    cell, (model, first) = gaps.CELLS[name], tiny
    assert gaps.find_fault(cell, *gaps.measure(cell, *model), first) == ""


@pytest.mark.slow
def test_so_it_is_on_several_devices():
    check_command("sampler_gap.py", "--only", "devices", cwd=POST)


@pytest.fixture(scope="module")
def trained(lab, experiment, tmp_path_factory):
    """A run of the command line that nothing has interrupted."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    check_command("-m", "jaxgpt", "train", str(lab / "own.py"), "--run-dir", str(run), cwd=lab)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a rollout", "in a save"])
def test_a_killed_run_goes_on_with_the_same_bits(where, lab, trained, tmp_path):
    command = ["-m", "jaxgpt", "train", str(lab / "own.py"), "--run-dir", str(tmp_path / "r")]
    assert run_command(*command, cwd=lab, KILL=where).returncode == -9
    check_command(*command, cwd=lab)
    assert logged(tmp_path / "r") == logged(trained)
    (both, whole) = (jaxgpt.load(run, which="last", setup=False, trust_code=True) for run in (tmp_path / "r", trained))
    jax.tree.map(np.testing.assert_array_equal, both.params, whole.params)


@pytest.mark.slow
def test_a_run_logs_its_rewards_and_is_replayed_and_audited(trained, lab):
    lines = [line for line in logged(trained) if "loss" in line]
    assert len(lines) == 6 and all({"reward", "solved", "finished", "length"} <= line.keys() for line in lines)
    again = replay(trained, 3)
    assert again.equal and again.start == 0  # the two newest checkpoints, and the best, are kept
    found = audit(trained, steps=6, seed=0)
    assert found.accepted and found.retaken == found.steps


@pytest.mark.slow
def test_rejection_sampling_learns_from_good_completions_only(experiment, tmp_path):
    sft = dataclasses.replace(replace_fields(experiment, data={"keep": 0.25}), objective=tasks.AccuracyConfig())
    training = open_training(sft, tmp_path / "r", None)
    batch, alone = training.whole_batch(2, training.restore_or_init(0)), training.whole_batch(2)
    assert batch.extras is None and 0 < batch.mask_BT.any(axis=1).sum() < 8
    tokenizer = training.dataset.tokenizer
    np.testing.assert_array_equal(batch.inputs_BT[:, :7], alone.inputs_BT[:, :7])
    for inputs, targets, mask in zip(*batch[:3], strict=True):
        if text := tokenizer.decode(targets[mask]):
            assert text[-1] == "\n" and sft.data.reward(tokenizer.decode(inputs[:7]), text[:-1]) >= 0.25


@pytest.mark.slow
def test_adapters_and_a_reference_take_part(experiment, trained, tmp_path):
    parts = {"train": {"init_from": str(trained), "steps": 3}, "data": {"reference": str(trained)}}
    adapted = dataclasses.replace(replace_fields(experiment, **parts, objective={"kl": 0.1}), lora=LoraConfig(rank=2))
    fit(adapted, tmp_path / "r", progress=False, setup=False)
    lines = [line for line in logged(tmp_path / "r") if "loss" in line]
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]
    np.testing.assert_allclose([line["ratio"] for line in lines], 1.0, rtol=1e-5)
