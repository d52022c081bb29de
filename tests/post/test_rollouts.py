"""experiments/post: rows that the model writes itself are a function of the run alone, and scored as the step scores them."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.lora import LoraConfig
from jaxgpt.tools.replay import audit, replay
from jaxgpt.training import fit, open_training
from tests.conftest import REPOSITORY
from tests.helpers import check_command, import_pages, logged, replace_fields, run_command

POST = REPOSITORY / "experiments" / "post"
(tasks,) = import_pages("post", "tasks")

# A user's file, beside those of the folder. Its reward, or its callback, ends the process where KILL says.
OWN = """
import dataclasses, os, signal

from grpo import GRPOConfig
from rollouts import RolloutConfig
from tasks import AccuracyConfig

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy(AccuracyConfig, GRPOConfig):
    def sum_loss(self, logits_BTV, batch):
        total, count, metrics = super().sum_loss(logits_BTV, batch)
        from logprobs import pick_logprobs

        differs_BT = pick_logprobs(logits_BTV, batch.targets_BT) != batch.extras["old_logprobs_BT"]
        return total, count, metrics | {"unequal": (differs_BT & batch.mask_BT).sum()}


experiment = Experiment(
    name="own",
    model=GPTConfig(block_size=12, n_layer=2, n_head=2, n_embd=8, position="rope"),
    data=Rollouts(group=4, max_new_tokens=5, val_prompts=8),
    objective=Policy(),
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
def test_rollouts_score_as_the_step_does(experiment, tmp_path):
    """Every log-probability of the step's forward pass has the bits of the rollout's, also in micro-batches."""
    for micro in (None, 4):
        small = replace_fields(experiment, train={"steps": 6}, parallel={"micro_batch_size": micro})
        training = open_training(small, tmp_path / "r", None)
        for step, _, metrics in training.take_steps(training.restore_or_init(0), 0, 5):
            assert float(metrics["unequal"]) == 0.0 and float(metrics["ratio"]) == 1.0, step
            assert metrics["sampler_gap"] < 1e-5  # the engine adds in another order


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
    run = jaxgpt.load(trained, setup=False, trust_code=True)
    assert run.experiment.data.group == 4
    again = replay(trained, 3)
    assert again.equal and again.start == 0  # the two newest checkpoints, and the best, are kept
    found = audit(trained, steps=6, seed=0)
    assert found.accepted and found.retaken == found.steps, str(found)


@pytest.mark.slow
def test_rejection_sampling_learns_from_good_completions_only(experiment, tmp_path):
    sft = replace_fields(experiment, data={"keep": 0.25})
    sft = dataclasses.replace(sft, objective=tasks.AccuracyConfig())
    training = open_training(sft, tmp_path / "r", None)
    state = training.restore_or_init(0)
    batch, alone = training.whole_batch(2, state), training.whole_batch(2)
    assert batch.extras is None and 0 < batch.mask_BT.any(axis=1).sum() < 8
    tokenizer = training.dataset.tokenizer
    for inputs, targets, mask, prompt in zip(
        batch.inputs_BT, batch.targets_BT, batch.mask_BT, alone.inputs_BT, strict=True
    ):
        if mask.any():
            text = tokenizer.decode(targets[mask])
            assert text.endswith("\n") and sft.data.reward(tokenizer.decode(inputs[:7]), text[:-1]) >= 0.25
        np.testing.assert_array_equal(inputs[:7], prompt[:7])


@pytest.mark.slow
def test_adapters_and_a_reference_take_part(experiment, trained, tmp_path):
    parts = {
        "train": {"init_from": str(trained), "steps": 3},
        "data": {"reference": str(trained)},
        "objective": {"kl": 0.1},
    }
    adapted = dataclasses.replace(replace_fields(experiment, **parts), lora=LoraConfig(rank=2))
    fit(adapted, tmp_path / "r", progress=False, setup=False)
    lines = [line for line in logged(tmp_path / "r") if "loss" in line]
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]
    np.testing.assert_allclose([line["ratio"] for line in lines], 1.0, rtol=1e-5)
