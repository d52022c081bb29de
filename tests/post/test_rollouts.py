"""experiments/post: rows that the model writes itself are a function of the run alone, and scored as the step scores them."""

import dataclasses
import os
import resource
import shutil

import jax
import numpy as np
import pytest

import jaxgpt
from jaxgpt import Experiment, OptimConfig, ParallelConfig, TrainConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.lora import LoraConfig
from jaxgpt.parallel.trainer import make_trainer
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.sample.engine import generate
from jaxgpt.tools.evaluate.evaluate import evaluate_run, format_evaluation
from jaxgpt.tools.overview import format_rows, read_rows
from jaxgpt.tools.replay import audit, replay
from jaxgpt.tools.report import make_report
from jaxgpt.training import fit, open_training
from tests.conftest import REPOSITORY
from tests.helpers import TINY, check_command, import_pages, make_model, replace_fields, run_command

POST = REPOSITORY / "experiments" / "post"
tasks, rollouts, updates, distillation = import_pages("post", "tasks", "rollouts", "updates", "distillation")

# A user's file, beside those of the folder. Its reward, or its callback, ends the process where KILL says.
OWN = """
import dataclasses, os, signal, threading

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
        if KILL == "in an update" and len(asked) == 20:
            threading.Timer(0.01, die).start()
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


def count_live_arrays():
    """(number, bytes)."""
    sizes = [x.nbytes for x in jax.live_arrays()]
    return len(sizes), sum(sizes)


def lines_of(run):
    """What a run logs, but for its clock."""
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timed} for line in read_metrics(run / "metrics.jsonl")]


# The tasks ------------------------------------------------------------------------------------------------------------


def test_sums_have_a_carry_and_no_prompt_is_in_two_splits():
    task = tasks.ArithmeticConfig()
    drawn = [{task.draw_prompt(n, 0, stream) for n in range(300)} for stream in range(3)]
    for prompt in set.union(*drawn):
        a, b = prompt.removesuffix("=").split("+")
        assert int(a[-1]) + int(b[-1]) > 9 and task.reward(prompt, str(int(a) + int(b))) == 1.0
    assert not drawn[tasks.HELD_OUT] & (drawn[tasks.EXAMPLES] | drawn[tasks.ROLLOUTS])
    assert task.draw_prompt(5, 0, 0) == task.draw_prompt(5, 0, 0) != task.draw_prompt(5, 1, 0)


def test_a_task_keeps_its_defaults_among_the_bases():
    """If its class came last, `TaskConfig`'s would hide them. A chat model was once asked without its template so."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Talk(tasks.ArithmeticConfig):
        chat: bool = True

    both = dataclasses.dataclass(frozen=True, kw_only=True)(type("Both", (Talk, rollouts.RolloutConfig), {}))
    assert both().chat
    with pytest.raises(UserError, match="Wrong: name Talk before RolloutConfig"):
        type("Wrong", (rollouts.RolloutConfig, Talk), {})


@pytest.mark.slow
def test_the_validation_loss_is_the_share_of_greedy_completions_that_are_wrong():
    """Half of the answers are the model's own greedy completions; of the others one token differs."""
    model, params = make_model(dataclasses.replace(TINY, block_size=16))
    prompts = np.random.default_rng(0).integers(model.config.vocab_size, size=(6, 4))
    options = dict(key=jax.random.key(0), max_new_tokens=5, sampling=jaxgpt.Sampling(greedy=True))
    answers = np.array(generate(model, params, prompts.tolist(), **options).tokens)
    answers[1::2, 3] = (answers[1::2, 3] + 1) % model.config.vocab_size
    rows = [tasks.make_row(*both, 16, "") for both in zip(prompts, answers, strict=True)]
    loss = jax.jit(tasks.AccuracyConfig().make_loss(model), static_argnums=2)
    wrong, count, _ = loss(params, Batch(*map(np.stack, zip(*rows, strict=True))), None)
    assert (float(wrong), float(count)) == (3.0, 6.0)


# Rollouts -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_several_updates_are_as_many_steps_on_one_batch():
    """By `value_and_grad`, which also adds up micro-batches."""
    optim = dict(learning_rate=1e-2, warmup_steps=0, schedule="cosine")
    base = Experiment(
        name="u", model=TINY, train=TrainConfig(steps=3, batch_size=4), parallel=ParallelConfig(micro_batch_size=2)
    )
    several = dataclasses.replace(
        base, optim=updates.UpdatesConfig(**optim, updates=3), train=TrainConfig(steps=1, batch_size=4)
    )
    trainers = [make_trainer(dataclasses.replace(base, optim=OptimConfig(**optim))), make_trainer(several)]
    text = np.random.default_rng(0).integers(TINY.vocab_size, size=(4, 9))
    batch, found = Batch(text[:, :-1], text[:, 1:]), []
    for trainer, steps in zip(trainers, (3, 1), strict=True):
        state = trainer.init_state(jax.random.key(0))
        for _ in range(steps):
            state, metrics = trainer.train_step(state, batch, jax.random.key(1))
        found.append(jax.device_get(state.params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *found)
    assert float(metrics["learning_rate"]) == pytest.approx(1e-2)


@pytest.mark.slow
def test_thirty_rollouts_score_as_the_step_does_compile_nothing_and_leave_nothing(experiment, tmp_path):
    """Every log-probability of the step's forward pass has the bits of the rollout's, also in micro-batches."""
    names = []

    def on_event(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    for micro in (None, 4):
        small = replace_fields(experiment, train={"steps": 40}, parallel={"micro_batch_size": micro})
        training = open_training(small, tmp_path / "r", None)
        held = []
        for step, _, metrics in training.take_steps(training.restore_or_init(0), 0, 35):
            assert float(metrics["unequal"]) == 0.0 and float(metrics["ratio"]) == 1.0, step
            assert metrics["sampler_gap"] < 1e-5  # the engine adds in another order
            held.append((*count_live_arrays(), len(names)))
            if step == 5:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert len(set(held[4:])) == 1, held
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # kilobytes
    jax.monitoring.unregister_event_duration_listener(on_event)


@pytest.fixture(scope="module")
def trained(lab, experiment, tmp_path_factory):
    """A run of the command line that nothing has interrupted."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    check_command("-m", "jaxgpt", "train", str(lab / "own.py"), "--run-dir", str(run), cwd=lab)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in a rollout", "in an update", "in a save"])
def test_a_killed_run_goes_on_with_the_same_bits(where, lab, trained, tmp_path):
    command = ["-m", "jaxgpt", "train", str(lab / "own.py"), "--run-dir", str(tmp_path / "r")]
    assert run_command(*command, cwd=lab, KILL=where).returncode == -9
    check_command(*command, cwd=lab)
    assert lines_of(tmp_path / "r") == lines_of(trained)
    (both, whole) = (jaxgpt.load(run, which="last", setup=False, trust_code=True) for run in (tmp_path / "r", trained))
    jax.tree.map(np.testing.assert_array_equal, both.params, whole.params)


@pytest.mark.slow
def test_a_run_logs_its_rewards_and_is_replayed_and_audited(trained, lab):
    lines = [line for line in lines_of(trained) if "loss" in line]
    assert len(lines) == 6 and all({"reward", "solved", "finished", "length"} <= line.keys() for line in lines)
    run = jaxgpt.load(trained, setup=False, trust_code=True)
    assert run.experiment.data.group == 4
    found = evaluate_run(run)
    assert found["perplexity"] is None and found["bits_per_byte"] is None
    assert format_evaluation(found) == f"8 scored: loss {found['loss']:.4f}, share of wrong answers"
    (lab / "text.txt").write_text("ab>a\n" * 20)
    on_text = evaluate_run(run, str(lab / "text.txt"))
    assert on_text["unit"] == "nats per token" and on_text["perplexity"] == np.exp(on_text["loss"])
    page = make_report(run, tokens=1)[1]
    for said in ('"unit": "share of wrong answers"', '"reward": [[1, ', '"entropy": [[1, ', '"length": [[1, '):
        assert said.replace(" ", "") in page.replace(" ", ""), said
    (row,) = read_rows(trained.parent)
    assert row.reward == lines[-1]["reward"] and f"{row.reward:.4f}" in format_rows([row], None)
    again = replay(trained, 3)
    assert again.equal and again.start == 0  # the two newest checkpoints, and the best, are kept
    found = audit(trained, steps=6, seed=0)
    assert found.accepted and found.is_whole, str(found)


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
    lines = [line for line in lines_of(tmp_path / "r") if "loss" in line]
    assert abs(lines[0]["kl"]) < 1e-6 < lines[2]["kl"]
    np.testing.assert_allclose([line["ratio"] for line in lines], 1.0, rtol=1e-5)

    for part, field, said in (
        ("data", {"tokenizer": "byte"}, "has another tokenizer: name a run with the policy's"),
        ("model", {"block_size": 16}, "has a context of 12: needs block_size=16"),
    ):
        other = replace_fields(replace_fields(experiment, data={"reference": str(trained)}), **{part: field})
        with pytest.raises(UserError, match=said):
            open_training(other, tmp_path / "s", None)


DEVICES = """
import pathlib, jax, jaxgpt
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.parallel.jax_setup import configure_jax
from jaxgpt.training import open_training
import dataclasses
configure_jax()
own, found = load_experiment("own.py"), []
for parallel in (dict(strategy="single"), dict(strategy="pmap"), dict(strategy="mesh", fsdp=2)):
    e = dataclasses.replace(own, parallel=jaxgpt.ParallelConfig(**parallel))
    training = open_training(e, pathlib.Path("none"), None)
    steps = [m for _, _, m in training.take_steps(training.restore_or_init(0), 0, 3)]
    found.append([(m["reward"], m["length"], round(float(m["grad_norm"]), 4)) for m in steps])
    assert parallel["strategy"] == "mesh" or not any(float(m["unequal"]) for m in steps), parallel
assert jax.device_count() == 2 and found[0] == found[1] == found[2], found
"""


@pytest.mark.slow
def test_two_devices_draw_the_completions_of_one(lab):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    check_command("-c", DEVICES, cwd=lab, XLA_FLAGS=flags)
