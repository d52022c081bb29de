"""A forger of runs: he edits any file and computes every checksum again, and runs the program where it helps him.

Each forgery claims the experiment of an honest run, `base`. `train(**parts)` returns the directory of a real run of that
experiment with other fields, such as optim={"learning_rate": 1e-4}.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxgpt.config import Experiment
from jaxgpt.files import json_sha256
from jaxgpt.optim import learning_rate
from jaxgpt.parallel.trainer import mean_loss
from jaxgpt.runs import manifest
from jaxgpt.runs.checkpoint import Checkpoints
from jaxgpt.runs.metadata import read_metadata
from jaxgpt.runs.metrics import MetricsFile, read_metrics
from jaxgpt.runs.training import Training, reopen_training
from jaxgpt.train import TrainState

Train = Callable[..., Path]
Forge = Callable[[Path, Train, np.random.Generator], Path]
ALL = 10**6  # checkpoints kept by the forger's own saves


def edit_log(run: Path, change: Callable[[dict], dict | None]) -> None:
    """Change or drop (None) lines of metrics.jsonl, with their checksums."""
    path = run / "metrics.jsonl"
    lines = [change(dict(line)) for line in read_metrics(path)]
    path.unlink()
    file = MetricsFile(path)
    for line in lines:
        if line is not None:
            file.write(**line)
    file.close()


def edit_experiment(run: Path, change: Callable[[dict], object]) -> None:
    """Change experiment.json, with its SHA-256."""
    path = run / "experiment.json"
    record = json.loads(path.read_text())
    del record["sha256"]
    change(record)
    path.write_text(json.dumps({"format": record["format"], "sha256": json_sha256(record), **record}))


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def claim_experiment_of(run: Path, base: Path) -> None:
    """Replace experiment.json, and make all that follows from it in the log fit."""
    shutil.copy(base / "experiment.json", run / "experiment.json")
    fit_log(run)


def fit_log(run: Path) -> None:
    """Give the lines of the log the tokens and learning rates of the claimed experiment."""
    experiment = read_metadata(run).experiment
    tokens, schedule = experiment.train.batch_size * experiment.model.block_size, rates(experiment)

    def change(line):
        step = line["step"]
        return line if "loss" not in line else line | {"tokens": step * tokens, "learning_rate": schedule[step - 1]}

    edit_log(run, change)


def rates(experiment: Experiment) -> list[float]:
    steps = experiment.train.steps
    return np.broadcast_to(learning_rate(experiment.optim, steps)(np.arange(steps)), steps).astype(float).tolist()


def claim_validation(run: Path, step: int, loss: float) -> None:
    """In the log and in the manifest."""
    edit_log(run, lambda x: x | {"val_loss": loss} if x["step"] == step and "val_loss" in x else x)
    if (directory := run / "checkpoints" / str(step)).exists():
        manifest.rewrite(directory, val_loss=loss)


def training_of(run: Path) -> Training:
    training = reopen_training(read_metadata(run), remedy="")
    return dataclasses.replace(training, checkpoints=Checkpoints(run / "checkpoints", keep_last=ALL))


def validate(training: Training, state: TrainState) -> float:
    return mean_loss(training.trainer.eval_step, state.params, training.validation_windows())[0]


def save(training: Training, state: TrainState, step: int, val_loss: float | None) -> None:
    """Save a state as the checkpoint of a step, in place of the one that is there."""
    state = jax.tree.map(lambda x: jax.numpy.array(x), state)
    state = dataclasses.replace(state, step=jax.numpy.full_like(state.step, step))
    training.checkpoints.save(state, step, val_loss)
    training.checkpoints.close()


def total_steps(run: Path) -> int:
    return read_metadata(run).experiment.train.steps


def better_last_validation(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    copy(base, target)
    last = total_steps(base)
    lowest = min(x["val_loss"] for x in read_metrics(base / "metrics.jsonl") if "val_loss" in x)
    claim_validation(target, last, lowest * rng.uniform(0.9, 0.999))


def better_validations(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """All after some step."""
    copy(base, target)
    after, factor = rng.uniform(0.1, 0.8) * total_steps(base), rng.uniform(0.8, 0.999)
    for x in read_metrics(base / "metrics.jsonl"):
        if "val_loss" in x and x["step"] > after:
            claim_validation(target, x["step"], x["val_loss"] * factor)


def better_losses(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """Over half of the run or more."""
    copy(base, target)
    share, factor = rng.uniform(0.5, 0.9), rng.uniform(0.8, 0.999)
    start = rng.uniform(0, 1 - share) * total_steps(base)
    stop = start + share * total_steps(base)
    edit_log(target, lambda x: x | {"loss": x["loss"] * factor} if "loss" in x and start < x["step"] <= stop else x)


def without_bad_lines(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """The highest losses are left out."""
    copy(base, target)
    losses = [x["loss"] for x in read_metrics(base / "metrics.jsonl") if "loss" in x]
    highest = np.quantile(losses, rng.uniform(0.8, 0.97))
    edit_log(target, lambda x: None if x.get("loss", 0) > highest else x)


def better_manifests(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """The losses that `load` and `report` show."""
    copy(base, target)
    checkpoints = Checkpoints(target / "checkpoints")
    for step in checkpoints.steps():
        if (loss := checkpoints.val_loss(step)) is not None:
            manifest.rewrite(target / "checkpoints" / str(step), val_loss=loss * rng.uniform(0.8, 0.99))


def weights_of_other(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """The last checkpoint is that of a run with another seed, and the validation loss is that of its weights."""
    copy(base, target)
    other, last = training_of(train(train={"seed": int(rng.integers(1, 3))})), total_steps(base)
    state = other.restore_or_init(last)
    loss = validate(other, state)
    save(training_of(target), state, last, loss)
    claim_validation(target, last, loss)


def disturbed_weights(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """By a part in a thousand, with the validation loss that they have."""
    copy(base, target)
    training, last = training_of(target), total_steps(base)
    state, size = training.restore_or_init(last), 10 ** rng.uniform(-5, -2)
    changed = jax.tree.map(lambda x: x * (1 + size * rng.standard_normal(x.shape)).astype(x.dtype), state.params)
    state = dataclasses.replace(state, params=changed)
    loss = validate(training, state)
    save(training, state, last, loss)
    claim_validation(target, last, loss)


def other_seed(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    claim_experiment_of(copy(train(train={"seed": int(rng.integers(1, 3))}), target), base)


def other_data(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """The same characters in another text, whose fingerprint is replaced."""
    claim_experiment_of(copy(train(data={"path": str(train.other_text)}), target), base)  # type: ignore[attr-defined]


def other_learning_rate(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    claim_experiment_of(copy(train(optim={"learning_rate": float(rng.choice([5e-4, 4e-3]))}), target), base)


def other_batch_size(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    claim_experiment_of(copy(train(train={"batch_size": 8}), target), base)


def log_of_other(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """With the checkpoints of the honest run, whose manifests get the validation losses of that log."""
    copy(base, target)
    other = train(optim={"learning_rate": float(rng.choice([5e-4, 4e-3]))})
    shutil.copy(other / "metrics.jsonl", target / "metrics.jsonl")
    fit_log(target)
    for x in read_metrics(target / "metrics.jsonl"):
        if "val_loss" in x:
            claim_validation(target, x["step"], x["val_loss"])


def fewer_steps(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """Trained for half of the steps; the log is extrapolated, and the last checkpoint gets the number of the claim."""
    total = total_steps(base)
    copy(train(train={"steps": total // 2}), target)
    shutil.copy(base / "experiment.json", target / "experiment.json")
    lines = read_metrics(target / "metrics.jsonl")
    taken = [x for x in lines if "loss" in x]
    last = next(x for x in reversed(lines) if "val_loss" in x)
    every = read_metadata(base).experiment.train.eval_every
    if (total // 2) % every:
        edit_log(target, lambda x: None if "val_loss" in x and x["step"] == total // 2 else x)
        manifest.rewrite(target / "checkpoints" / str(total // 2), val_loss=None)
    file = MetricsFile(target / "metrics.jsonl")
    for step in range(total // 2 + 1, total + 1):
        like = dict(taken[int(rng.integers(len(taken) // 2, len(taken)))])
        file.write(**like | {"step": step, "seconds": taken[-1]["seconds"] * step / (total // 2)})
        if step % every == 0 or step == total:
            file.write(step=step, val_loss=last["val_loss"] if step == total else last["val_loss"] * 1.001)
    file.close()
    fit_log(target)
    training = training_of(target)
    save(training, training.restore_or_init(total // 2), total, last["val_loss"])


def spliced(target: Path, base: Path, train: Train, rng: np.random.Generator) -> None:
    """The honest run up to a step; from there on, its experiment is continued from the weights of another run.

    Everything after that step is what the program gives. He has trained twice as long, or with another seed.
    """
    copy(base, target)
    training, total = training_of(target), total_steps(base)
    kept = [step for step in training.checkpoints.steps() if step < total * 0.8]
    start = int(rng.choice(kept[len(kept) // 4 :]))
    other = (
        train(train={"seed": 1}) if rng.random() < 0.5 else train(train={"steps": total * 2, "checkpoint_every": total})
    )
    source = training_of(other)
    better = source.restore_or_init(source.checkpoints.steps()[-1]).params
    state = dataclasses.replace(training.restore_or_init(start), params=better)
    experiment = training.experiment.train
    again = [start, *(step for step in training.checkpoints.steps() if step > start)]
    losses, validations = {}, {}

    def keep(step, state):
        if step % experiment.eval_every == 0 or step == total:
            validations[step] = validate(training, state)
        if step in again:
            save(training_of(target), state, step, validations.get(step))

    keep(start, state)
    for step, taken, metrics in training.take_steps(state, start, total):
        losses[step] = {name: float(metrics[name]) for name in ("loss", "grad_norm")}
        keep(step, taken)

    def change(line):
        step = line["step"]
        if "val_loss" in line:
            return line | {"val_loss": validations.get(step, line["val_loss"])}
        return line | losses.get(step, {})

    edit_log(target, change)


FORGERIES = {
    forge.__name__: forge
    for forge in (
        better_last_validation,
        better_validations,
        better_losses,
        without_bad_lines,
        better_manifests,
        weights_of_other,
        disturbed_weights,
        other_seed,
        other_data,
        other_learning_rate,
        other_batch_size,
        log_of_other,
        fewer_steps,
        spliced,
    )
}
