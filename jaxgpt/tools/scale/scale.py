"""Train a ladder of sizes, write down what its law predicts for ten times the compute, and train that run."""

from __future__ import annotations

import dataclasses
import datetime
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxgpt.config import Experiment, differences
from jaxgpt.config.serialize import from_dict
from jaxgpt.config.validate import short
from jaxgpt.data.dataset import prepare_for, resolve_vocab
from jaxgpt.errors import UserError
from jaxgpt.files import is_there, json_sha256, read_json, render_json, write_whole
from jaxgpt.fitting import fit
from jaxgpt.parallel.multihost import initialize
from jaxgpt.statistics import CONFIDENCE
from jaxgpt.tools.curves import Curve, train_or_resume
from jaxgpt.tools.scale.ladder import Plan, Rung, choose_test, make_plan
from jaxgpt.tools.scale.law import (
    LEAST_POINTS,
    Law,
    Point,
    fit_law,
    interval,
    noise,
    predict,
    relative_errors,
    resample_laws,
)
from jaxgpt.tools.scale.plot import plot_scaling
from jaxgpt.tools.scale.report import WITHIN, format_plan, format_prediction
from jaxgpt.tools.scale.sizes import Size, Speed, make_size, measure_speed, smallest_n_head, with_horizon

PLAN, PREDICTION, SCALE, PLOT = "plan.json", "prediction.json", "scale.json", "scale.png"
LARGEST_FILE = 2**22  # bytes


def run_scale(
    experiment: Experiment,
    directory: Path,
    *,
    minutes: float = 30,
    say: Callable[[str], None] = lambda text: None,
    fit_one: Callable[..., Any] = fit,
    measure: Callable[[Size], Speed] = measure_speed,
) -> dict[str, Any]:
    """Train or resume the ladder, fit its law, write the prediction, train the test run, and compare.

    Args:
        experiment: its width is the reference of the learning rate; its steps are not used.
        directory: directory of the ladder. A plan and a prediction that it has are read, never written again.
        minutes: for all runs together.
        say: receives the plan, and a line of text for each run.
        fit_one: trains a run as `jaxgpt.fit` does.
        measure: measures the speed of a size.

    Returns:
        "plan", "points" with the errors of the fit, "law", "intervals", "frontier", "prediction" and "result", as
        written to scale.json.

    Raises:
        UserError: the experiment cannot be scaled, the ladder does not fit, or the directory has another one.
    """
    check_scalable(experiment)
    initialize(experiment.parallel)
    dataset = prepare_for(experiment.model, experiment.data)
    vocab_size = resolve_vocab(experiment.model, dataset.tokenizer).vocab_size
    assert vocab_size
    size_of = functools.cache(lambda n_head: make_size(experiment, n_head, vocab_size))
    unit = smallest_n_head(experiment)
    asked = {"experiment": dataclasses.asdict(experiment), "minutes": minutes, "data": dataset.fingerprint}
    plan = _read_plan(directory, experiment, asked) or _write_plan(
        directory, asked, make_plan(unit, size_of, measure, minutes=minutes, data_tokens=len(dataset.train))
    )
    say(format_plan(plan))

    def train(rung: Rung, place: str) -> Curve:
        sized = with_horizon(size_of(rung.n_head).experiment, rung.steps, rung.seed)
        curve = train_or_resume(sized, directory / place, fit_one)
        result = f"{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s" if curve.losses else "diverged"
        say(f"width {rung.width}, {rung.tokens:,} tokens: {result}")
        return curve

    rungs, points = _to_points(plan.rungs, [train(rung, rung.directory) for rung in plan.rungs])
    law = fit_law(points)
    laws = resample_laws(points, law)
    prediction = _read_prediction(directory, points) or _write(
        directory / PREDICTION, make_prediction(points, law, laws, choose_test(plan, law, unit, size_of))
    )
    say(format_prediction(prediction))
    test = from_dict(Rung, prediction["run"])
    result = compare(prediction, train(test, "test"))
    found = {"plan": dataclasses.asdict(plan)} | describe_fit(points, rungs, law, laws)
    found |= {"frontier": find_frontier(law, [*rungs, test]), "prediction": prediction, "result": result}
    title = f"{experiment.name}, {Path(experiment.data.path or experiment.data.corpus).name}"
    plot_scaling(found, directory / PLOT, title)
    return _write(directory / SCALE, found)


def check_scalable(experiment: Experiment) -> None:
    """Raise `UserError` unless the experiment trains a decoder on a text from random parameters."""
    if experiment.train.init_from is not None:
        why = f"train.init_from={short(experiment.train.init_from)} fixes the size"
    elif experiment.model.n_encoder_layer:
        why = f"model.n_encoder_layer={experiment.model.n_encoder_layer}: it has an encoder"
    elif experiment.data.is_packed:
        why = f"{experiment.data.path or experiment.data.corpus} has documents, whose tokens are not all targets"
    else:
        return
    raise UserError(f"no ladder of this experiment: {why}. Give a decoder, to be trained on a text")


def _to_points(rungs: Sequence[Rung], curves: Sequence[Curve]) -> tuple[list[Rung], list[Point]]:
    """Return the runs that did not diverge, and their points. Raises `UserError` if they are too few for a fit."""
    trained = [(rung, curve.losses[-1]) for rung, curve in zip(rungs, curves, strict=True) if curve.losses]
    if len(trained) < LEAST_POINTS:
        raise UserError(
            f"{len(trained)} of {len(rungs)} runs did not diverge, a fit needs {LEAST_POINTS}: lower "
            "--optim.learning-rate, and give another --run-dir"
        )
    points = [Point(parameters=r.parameters, tokens=r.tokens, flops=r.flops, loss=loss) for r, loss in trained]
    return [rung for rung, _ in trained], points


def describe_fit(points: Sequence[Point], rungs: Sequence[Rung], law: Law, laws: Sequence[Law]) -> dict[str, Any]:
    """Return the fitted law, its intervals, and the errors of the points. rungs: of the points."""
    rows = [
        dataclasses.asdict(point)
        | {"width": rung.width, "seed": rung.seed, "epochs": rung.epochs, "relative_error": error}
        for point, rung, error in zip(points, rungs, relative_errors(points, law), strict=True)
    ]
    return {
        "points": rows,
        "law": dataclasses.asdict(law),
        "parameters_exponent": law.parameters_exponent,
        "intervals": {
            name: interval([getattr(x, name) for x in laws], CONFIDENCE)
            for name in ("E", "alpha", "beta", "parameters_exponent")
        },
        "noise": noise(points, law),
        "largest_error": max((row["relative_error"] for row in rows), key=abs),
    }


def find_frontier(law: Law, rungs: Sequence[Rung], count: int = 25) -> list[dict[str, float]]:
    """Return the compute-optimal parameters and tokens, and their loss by the law, from the least FLOPs to the most.

    The FLOPs per token of sizes between those of the runs are interpolated.
    """
    log_n, log_per_token = np.log(sorted({(rung.parameters, rung.flops / rung.tokens) for rung in rungs})).T
    n = np.linspace(log_n[0], log_n[-1], 500)
    per_token, frontier = np.exp(np.interp(n, log_n, log_per_token)), []
    for flops in np.geomspace(min(rung.flops for rung in rungs), max(rung.flops for rung in rungs), count):
        losses = law.E + law.A * np.exp(-law.alpha * n) + law.B * (flops / per_token) ** -law.beta
        best = int(np.argmin(losses))
        row = {"flops": flops, "parameters": np.exp(n[best]), "tokens": flops / per_token[best], "loss": losses[best]}
        frontier.append({name: float(value) for name, value in row.items()})
    return frontier


def make_prediction(points: Sequence[Point], law: Law, laws: Sequence[Law], rung: Rung) -> dict[str, Any]:
    """Return what the law of the points predicts for a run, with the hash of the points and the time."""
    loss, low, high = predict(points, law, laws, rung.parameters, rung.tokens, confidence=CONFIDENCE)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "points_sha256": hash_points(points),
        "run": dataclasses.asdict(rung),
        "law": dataclasses.asdict(law),
        "loss": loss,
        "low": low,
        "high": high,
        "confidence": CONFIDENCE,
    }


def hash_points(points: Sequence[Point]) -> str:
    """Return the SHA-256 of what a law is fitted to."""
    return json_sha256([dataclasses.asdict(point) for point in points])


def compare(prediction: dict[str, Any], curve: Curve) -> dict[str, Any] | None:
    """Return what came out, beside the prediction. None: the run diverged."""
    if not curve.losses:
        return None
    loss = curve.losses[-1]
    error = loss / prediction["loss"] - 1
    return {
        "loss": loss,
        "relative_error": error,
        "within": abs(error) <= WITHIN,
        "inside_interval": prediction["low"] <= loss <= prediction["high"],
        "seconds": curve.seconds[-1],
    }


def _write(path: Path, value: dict[str, Any]) -> dict[str, Any]:
    write_whole(path, render_json(value, indent=1, ensure_ascii=False) + "\n")
    return value


def _write_plan(directory: Path, asked: dict[str, Any], plan: Plan) -> Plan:
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / PLAN, asked | {"plan": dataclasses.asdict(plan)})
    return plan


def _read_plan(directory: Path, experiment: Experiment, asked: dict[str, Any]) -> Plan | None:
    """Return the plan in a directory, None if there is none. Raises `UserError` if it is that of another ladder."""
    path = directory / PLAN
    if not is_there(path, "Give another --run-dir."):
        return None
    try:
        record = read_json(path, LARGEST_FILE)
        changed = differences(from_dict(Experiment, record["experiment"]), experiment)
        if record["minutes"] != asked["minutes"]:
            changed["minutes"] = record["minutes"], asked["minutes"]
        if record["data"] != asked["data"]:
            changed["the text"] = "another", "this one"
        rungs = [from_dict(Rung, rung) for rung in record["plan"]["rungs"]]
        plan = from_dict(Plan, record["plan"] | {"rungs": rungs})
    except (KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged: {e!r}. Give another --run-dir") from None
    if changed:
        fields = ", ".join(f"{name} {short(old)} -> {short(new)}" for name, (old, new) in changed.items())
        raise UserError(f"{directory} has another ladder: {fields}. Give another --run-dir, or what the ladder has")
    return plan


def _read_prediction(directory: Path, points: Sequence[Point]) -> dict[str, Any] | None:
    """Return the prediction in a directory, None if there is none. Raises `UserError` if it is of other points."""
    path = directory / PREDICTION
    if not is_there(path, "Give another --run-dir."):
        return None
    prediction = read_json(path, LARGEST_FILE)
    if not isinstance(prediction, dict) or prediction.get("points_sha256") != hash_points(points):
        raise UserError(
            f"{path} was made of other losses than those of the ladder's runs now: a prediction is not made twice. "
            "Restore the runs, or give another --run-dir"
        )
    return prediction
