"""Does a scaling law that is fitted to small runs predict the loss of a run with ten times the compute?

Question    how does the loss depend on parameters N and tokens D, and what will a larger run reach? The prediction is
            written down before that run is trained.
Reference   Hoffmann et al. 2022 (arXiv:2203.15556), approach 3: L(N, D) = E + A / N^alpha + B / D^beta, with the least
            sum of Huber losses of log L. Besiroglu et al. 2024 (arXiv:2404.10102): a sum and not a mean, all starts run
            to convergence, intervals by a bootstrap over the runs.
Models      three or four widths of an experiment's architecture, with heads of one size, equal depth, and learning rates
            by muP; four horizons of each, every one with its own complete schedule. The speed is measured first. The
            largest grid of runs is chosen that fits, with its test run, into the minutes, whose longest runs see each
            token at most once, and whose largest model has ten tokens per parameter.
Command     python experiments/scaling_laws.py quickstart --data.path mytext.txt [--minutes 30] [--run-dir DIR] [--json]
            The first word is an experiment, as for `jaxgpt train`, whose fields are options too. The same command resumes
            the runs in DIR (default: runs/scale/NAME), which `jaxgpt scale` of version 0.2.0 may have begun.
Result      DIR/plan.json; prediction.json, written once; scale.json and scale.png. docs/scaling.md explains them. LOG.md,
            2026-11-23, "scaling laws of two texts", has two predictions and what was measured.
"""

import dataclasses
import datetime
import functools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxgpt import GPT, Experiment, UserError, configure_jax, fit
from jaxgpt.cli.console import report_errors, say
from jaxgpt.cli.experiment_file import load_experiment
from jaxgpt.cli.options import parse
from jaxgpt.config.serialize import differences, from_dict, to_dict
from jaxgpt.config.validate import PositiveFloat
from jaxgpt.data.dataset import open_data
from jaxgpt.errors import Preempted
from jaxgpt.files import Result, json_sha256, read_json, render_json, write_whole
from jaxgpt.parallel.limits import train_flops_per_token
from jaxgpt.runs.code import find_class_in
from jaxgpt.statistics import CONFIDENCE
from jaxgpt.tools.grid import Curve, format_table, train_or_resume

# The law and its fit. Letters: P points, K terms of the law.

DELTA = 1e-3  # difference of log L at which the Huber loss turns from square to absolute
RESAMPLES = 200
LEAST_POINTS = 6  # one more than the unknowns
# Of the unknowns: a term of less than e^-12 nats is as good as none, and a resample may leave an exponent undetermined.
LEAST, MOST = np.array([-12.0, -12.0, -12.0, 0.01, 0.01]), np.array([12.0, 12.0, 12.0, 3.0, 3.0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A trained run: its parameters (all of them, as Hoffmann et al. count), training tokens, FLOPs, and final loss."""

    parameters: int
    tokens: int
    flops: float
    loss: float  # validation, in nats per token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Law:
    """Loss in nats per token by parameters N and tokens D: E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    alpha: float
    B: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss of a model with this many parameters after this many tokens."""
        return self.E + self.A * parameters**-self.alpha + self.B * tokens**-self.beta

    @property
    def parameters_exponent(self) -> float:
        """Return a of the compute-optimal N ~ C^a; the tokens grow as C^(1 - a)."""
        return self.beta / (self.alpha + self.beta)


def centre(points: Sequence[Point]) -> tuple[float, float, np.ndarray]:
    """Return the means of log N and log D, and (log N, log D) around them with log L, [3, P].

    Around the means, the logs of the terms and the exponents depend less on each other.
    """
    n_P, d_P, y_P = np.log([(p.parameters, p.tokens, p.loss) for p in points]).T
    return float(n_P.mean()), float(d_P.mean()), np.stack([n_P - n_P.mean(), d_P - d_P.mean(), y_P])


def minimise(start: np.ndarray, centred_3P: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the unknowns with the least sum of Huber losses, and this sum.

    The unknowns are the logs of the three terms at the mean of the points, alpha and beta.
    """
    from scipy.optimize import least_squares  # scipy is a dependency of jax

    n_P, d_P, y_P = centred_3P

    def log_terms(x: np.ndarray) -> np.ndarray:
        return np.stack([x[0] - x[3] * n_P, x[1] - x[4] * d_P, np.full_like(n_P, x[2])], -1)

    def errors(x: np.ndarray) -> np.ndarray:
        return np.logaddexp.reduce(log_terms(x), -1) - y_P

    def gradients(x: np.ndarray) -> np.ndarray:
        terms_PK = log_terms(x)
        shares_PK = np.exp(terms_PK - np.logaddexp.reduce(terms_PK, -1, keepdims=True))
        return np.concatenate([shares_PK, -shares_PK[:, :2] * np.stack([n_P, d_P], -1)], -1)

    exact = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-12)
    inside = np.clip(start, LEAST + 1e-6, MOST - 1e-6)
    found = least_squares(
        errors, inside, gradients, bounds=(LEAST, MOST), loss="huber", f_scale=DELTA, max_nfev=500, **exact
    )
    return found.x, float(found.cost)


def to_law(unknowns: np.ndarray, mean_n: float, mean_d: float) -> Law:
    a, b, e, alpha, beta = map(float, unknowns)
    return Law(E=math.exp(e), A=math.exp(a + alpha * mean_n), alpha=alpha, B=math.exp(b + beta * mean_d), beta=beta)


def fit_law(points: Sequence[Point]) -> Law:
    """Return the law with the least loss over all starts. points: at least `LEAST_POINTS`, over several N and D."""
    mean_n, mean_d, centred_3P = centre(points)
    n_P, d_P, y_P = centred_3P
    found = []
    for alpha in (0.1, 0.5, 1.0):
        for beta in (0.1, 0.5, 1.0):
            # For given exponents the law is linear in its three factors.
            terms_PK = np.stack([np.exp(-alpha * n_P), np.exp(-beta * d_P), np.ones_like(y_P)], -1)
            factors_K = np.linalg.lstsq(terms_PK / np.exp(y_P)[:, None], np.ones_like(y_P), rcond=None)[0]
            start = np.array([*np.log(np.maximum(factors_K, 1e-2)), alpha, beta])
            found.append(minimise(start, centred_3P))
    return to_law(min(found, key=lambda each: each[1])[0], mean_n, mean_d)


def resample_laws(points: Sequence[Point], law: Law, *, count: int = RESAMPLES, seed: int = 0) -> list[Law]:
    """Return the laws of resamples of the runs, drawn with replacement, each fitted from the given law on."""
    mean_n, mean_d, centred_3P = centre(points)
    logs = [math.log(law.A) - law.alpha * mean_n, math.log(law.B) - law.beta * mean_d, math.log(law.E)]
    start = np.array([*logs, law.alpha, law.beta])
    drawn = np.random.default_rng(seed).integers(len(points), size=(count, len(points)))
    return [to_law(minimise(start, centred_3P[:, row])[0], mean_n, mean_d) for row in drawn]


def relative_errors(points: Sequence[Point], law: Law) -> list[float]:
    """Return (measured - fitted) / fitted of each point."""
    return [p.loss / law.loss(p.parameters, p.tokens) - 1 for p in points]


def noise(points: Sequence[Point], law: Law) -> float:
    """Return the relative standard deviation of a run from the law, with the degrees of freedom that are left."""
    return float(np.sqrt(np.square(relative_errors(points, law)).sum() / (len(points) - 5)))


def interval(samples: Sequence[float] | np.ndarray, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the quantiles that leave (1 - confidence) / 2 on either side."""
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def predict(
    points: Sequence[Point], law: Law, laws: Sequence[Law], parameters: int, tokens: int
) -> tuple[float, float, float]:
    """Return the predicted loss of a run, and its interval, from the spread of the resampled laws and of single runs."""
    spread = np.random.default_rng(1).normal(0.0, noise(points, law), len(laws))
    low, high = interval(np.array([x.loss(parameters, tokens) for x in laws]) * np.exp(spread))
    return law.loss(parameters, tokens), low, high


# Sizes of the architecture, and how fast each trains here.

EVAL_TOKENS = 2**17  # most tokens of the one validation in each run
TIMED_STEPS = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """One width of an experiment's architecture."""

    experiment: Experiment  # with its vocabulary size
    parameters: int
    flops_per_token: float

    @property
    def tokens_per_step(self) -> int:
        return self.experiment.train.batch_size * self.experiment.model.block_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """Time on this machine, in seconds."""

    overhead: float  # seconds for compilation, reading data and saving in each run
    per_token: float  # seconds of training


def smallest_n_head(experiment: Experiment) -> int:
    """Return the fewest heads with which all sizes of the architecture are whole numbers. Other sizes are multiples."""
    model = experiment.model
    sizes = (model.n_embd, model.n_kv_head or model.n_head, model.mlp_dim or model.n_head)
    return model.n_head // math.gcd(model.n_head, *sizes)


def make_size(experiment: Experiment, n_head: int, vocab_size: int) -> Size:
    """Return the experiment with another width: more or fewer heads of the same size, at the same depth.

    Maximal update parametrisation (`GPTConfig.mup_base_width`) lets one learning rate serve all of them.
    n_head: a multiple of `smallest_n_head`.
    """
    model = experiment.model
    scaled = {
        name: size if size is None else size * n_head // model.n_head
        for name, size in (("n_embd", model.n_embd), ("n_kv_head", model.n_kv_head), ("mlp_dim", model.mlp_dim))
    }
    base = model.mup_base_width or model.n_embd
    wider = dataclasses.replace(model, vocab_size=vocab_size, n_head=n_head, mup_base_width=base, **scaled)
    shapes = jax.eval_shape(GPT(wider).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))
    parameters = sum(x.size for x in jax.tree.leaves(shapes["params"]))
    flops = train_flops_per_token(wider, parameters)
    return Size(experiment=dataclasses.replace(experiment, model=wider), parameters=parameters, flops_per_token=flops)


def with_horizon(experiment: Experiment, steps: int, seed: int = 0) -> Experiment:
    """Return the experiment with a complete schedule of that many steps, and one validation at its end.

    seed: added to the experiment's.
    """
    warmup = min(experiment.optim.warmup(steps), steps // 10)
    train = dataclasses.replace(
        experiment.train,
        steps=steps,
        seed=experiment.train.seed + seed,
        eval_every=steps,
        eval_tokens=min(experiment.train.eval_tokens or EVAL_TOKENS, EVAL_TOKENS),
        log_every=min(experiment.train.log_every, max(1, steps // 8)),
        sample_tokens=0,
    )
    return dataclasses.replace(
        experiment, train=train, optim=dataclasses.replace(experiment.optim, warmup_steps=warmup)
    )


def measure_speed(size: Size) -> Speed:
    """Train a few steps in a temporary directory."""
    short = with_horizon(size.experiment, TIMED_STEPS)
    short = dataclasses.replace(short, train=dataclasses.replace(short.train, eval_tokens=size.tokens_per_step))
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        stepping = train_or_resume(short, Path(directory) / "run", fit).seconds[-1]
    overhead = time.monotonic() - began - stepping
    return Speed(overhead=overhead, per_token=stepping / (TIMED_STEPS * size.tokens_per_step))


# The plan: the grid of runs, and the test run.

TEST_COMPUTE = 10  # FLOPs of the test run / those of the largest run of the grid
HORIZONS = 4  # token counts of each size, each GROWTH times the one before
SIZES = 4  # at most; each has about STEP times the width of the one before
GROWTH, STEP = 1.75, 1.5
LEAST_TOP = 3  # width of the smallest grid's largest size, in smallest widths: with less there are not three sizes
# Of the shortest runs. Before it, models learn what any size can learn, and the law is off by percents.
LEAST_STEPS, LEAST_TOKENS = 150, 150_000
# Least tokens per parameter of the largest run of a grid with more than LEAST_TOP smallest widths. About 20 are optimal
# (Hoffmann et al.). Far fewer, and the test run would memorise its text, of which the law knows nothing.
RATIO = 10
# Up to 4 epochs, repeated tokens are nearly as good as new ones (arXiv:2305.16264). The grid has at most one.
MOST_EPOCHS = 4
MOST_SEEDS = 4  # of each run of the grid, if data and not minutes limit its size: noise limits the prediction
RESERVE = 0.1  # share of the minutes for measuring speed, fitting, and a machine that slows down
WITHIN = 0.01  # relative error of a prediction that holds


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridRun:
    """A run to train: a width, a horizon and a seed."""

    n_head: int
    width: int
    parameters: int
    steps: int
    seed: int
    tokens: int
    flops: float
    epochs: float  # over the training split
    seconds: float  # estimated

    @property
    def directory(self) -> str:
        """Return the path of its run directory in the directory of the grid."""
        return f"width-{self.width}/steps-{self.steps}/seed-{self.seed}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The runs of the grid, and what the test run may take, as in plan.json."""

    rungs: tuple[GridRun, ...]
    data_tokens: int  # of the training split
    test_flops: float
    test_seconds: float  # estimated, at the FLOP/s of the largest size


def make_plan(
    unit: int, size_of: Callable[[int], Size], measure: Callable[[Size], Speed], *, minutes: float, data_tokens: int
) -> Plan:
    """Plan the largest grid that fits, with its test run, into the minutes and into one epoch of the data.

    Args:
        unit: heads of the smallest size.
        size_of: returns the size with that many heads.
        measure: measures the speed of a size on this machine.
        minutes: for all runs.
        data_tokens: tokens of the training split.

    Raises:
        UserError: the smallest grid takes longer, or more data.
    """
    shortest = max(LEAST_STEPS * size_of(unit).tokens_per_step, LEAST_TOKENS)
    least = math.ceil(shortest * GROWTH ** (HORIZONS - 1))
    if least > data_tokens:
        smaller = "" if shortest == LEAST_TOKENS else f", or a batch of less than {shortest // LEAST_STEPS:,} tokens"
        raise UserError(
            f"the training split has {data_tokens:,} tokens, the grid needs {least:,}: its shortest runs have "
            f"{shortest:,}, its longest {GROWTH ** (HORIZONS - 1):.1f} times as many, all of them new. Give more "
            f"text{smaller}"
        )
    budget = 60 * minutes * (1 - RESERVE)
    probe = size_of(LEAST_TOP * unit)
    probed = measure(probe)

    def sizes_below(top: int) -> list[Size]:
        return [size_of(n * unit) for n in sorted({max(1, round(top / STEP**i)) for i in range(SIZES)})]

    def guess(size: Size) -> Speed:
        return dataclasses.replace(probed, per_token=probed.per_token * size.flops_per_token / probe.flops_per_token)

    top = LEAST_TOP
    while (tokens := RATIO * size_of((top + 1) * unit).parameters) <= data_tokens:
        if longest_horizon(list(map(guess, sizes_below(top + 1))), budget) < max(least, tokens):
            break
        top += 1
    while True:
        sizes = sizes_below(top)
        speeds = [probed if size is probe else measure(size) for size in sizes]
        longest = min(longest_horizon(speeds, budget), data_tokens)
        if longest >= least or top == LEAST_TOP:
            break
        top -= 1
    if longest < least:
        fixed, per_token = costs(speeds)
        needed = math.ceil((fixed + per_token * least) / (1 - RESERVE) / 60)
        widths = ", ".join(str(size.experiment.model.n_embd) for size in sizes)
        raise UserError(
            f"--minutes {minutes:g}: the smallest grid here, widths {widths} and {shortest:,} to {least:,} tokens, "
            f"takes about {needed} minutes with its test run: give --minutes {needed}"
        )
    seeds = max((n for n in range(1, MOST_SEEDS + 1) if longest_horizon(speeds, budget, n) >= longest), default=1)
    steps = int(longest) / sizes[0].tokens_per_step
    horizons = [int(steps / GROWTH**i) for i in reversed(range(HORIZONS))]
    runs = [
        make_run(size, steps, seed, data_tokens, overhead(speed), speed.per_token)
        for seed in range(seeds)
        for size, speed in zip(sizes, speeds, strict=True)
        for steps in horizons
    ]
    # The test run will be wider, and shorter.
    fixed, per_token = overhead(speeds[-1]), speeds[-1].per_token
    test = make_run(sizes[-1], TEST_COMPUTE * horizons[-1], 0, data_tokens, fixed, per_token)
    return Plan(rungs=tuple(runs), data_tokens=data_tokens, test_flops=test.flops, test_seconds=test.seconds)


def costs(speeds: Sequence[Speed], seeds: int = 1) -> tuple[float, float]:
    """Return the seconds of grid and test run that are fixed, and those per token of the longest horizon.

    The test run is taken for one of the largest size, which computes as fast.
    """
    horizons = sum(GROWTH**-i for i in range(HORIZONS))
    fixed = seeds * HORIZONS * sum(map(overhead, speeds)) + overhead(speeds[-1])
    per_token = seeds * horizons * sum(speed.per_token for speed in speeds)
    return fixed, per_token + TEST_COMPUTE * speeds[-1].per_token


def overhead(speed: Speed) -> float:
    """Return the seconds of a run besides its steps. Validation takes a third of training."""
    return speed.overhead + speed.per_token * EVAL_TOKENS / 3


def longest_horizon(speeds: Sequence[Speed], budget: float, seeds: int = 1) -> float:
    """Return the tokens of the longest horizon if all runs take `budget` seconds."""
    fixed, per_token = costs(speeds, seeds)
    return (budget - fixed) / per_token


def make_run(size: Size, steps: int, seed: int, data_tokens: int, fixed: float, per_token: float) -> GridRun:
    """Return a run of this size, which takes `fixed` seconds and `per_token` more for each token."""
    tokens = steps * size.tokens_per_step
    return GridRun(
        n_head=size.experiment.model.n_head,
        width=size.experiment.model.n_embd,
        parameters=size.parameters,
        steps=steps,
        seed=seed,
        tokens=tokens,
        flops=tokens * size.flops_per_token,
        epochs=tokens / data_tokens,
        seconds=fixed + tokens * per_token,
    )


def choose_test(plan: Plan, law: Law, unit: int, size_of: Callable[[int], Size]) -> GridRun:
    """Return the run of `plan.test_flops` with the least fitted loss.

    Both its parameters and its tokens are at least those of the grid's largest run, which leaves neither of them more
    than ten times as many; its tokens are at most `MOST_EPOCHS` epochs.
    """
    top, choices = plan.rungs[-1], []
    for n_head in range(top.n_head, TEST_COMPUTE * top.n_head + 1, unit):
        size = size_of(n_head)
        steps = round(plan.test_flops / (size.flops_per_token * size.tokens_per_step))
        tokens = steps * size.tokens_per_step
        if tokens < top.tokens:
            break
        if tokens <= MOST_EPOCHS * plan.data_tokens:
            choices.append(make_run(size, steps, 0, plan.data_tokens, plan.test_seconds, 0.0))
    return min(choices, key=lambda run: law.loss(run.parameters, run.tokens))


# All of it.

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
    """Train or resume the grid, fit its law, write the prediction, train the test run, and compare.

    Args:
        experiment: its width is the reference of the learning rate; its steps are not used.
        directory: directory of all runs. A plan and a prediction that it has are read, never written again.
        minutes: for all runs together.
        say: receives the plan, and a line of text for each run.
        fit_one: trains a run as `jaxgpt.fit` does.
        measure: measures the speed of a size.

    Returns:
        "plan", "points" with the errors of the fit, "law", "intervals", "frontier", "prediction" and "result", as
        written to scale.json.

    Raises:
        UserError: the experiment cannot be scaled, the grid does not fit, or the directory has another one.
    """
    if experiment.train.init_from is not None:
        raise UserError(f"train.init_from={experiment.train.init_from!r} fixes the size: train from random parameters")
    if experiment.data.is_packed:
        raise UserError("scaling laws need a text, not conversations")
    dataset = open_data(experiment.data, block_size=experiment.model.block_size, vocab_size=experiment.model.vocab_size)
    vocab_size = experiment.model.vocab_size or dataset.tokenizer.vocab_size
    size_of = functools.cache(lambda n_head: make_size(experiment, n_head, vocab_size))
    unit = smallest_n_head(experiment)
    asked = {"experiment": to_dict(experiment), "minutes": minutes, "data": dataset.fingerprint}
    plan = read_plan(directory, experiment, asked)
    if plan is None:
        plan = make_plan(unit, size_of, measure, minutes=minutes, data_tokens=len(dataset.train))
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / PLAN, asked | {"plan": dataclasses.asdict(plan)})
    say(format_plan(plan))

    def train(run: GridRun, place: str) -> Curve:
        sized = with_horizon(size_of(run.n_head).experiment, run.steps, run.seed)
        curve = train_or_resume(sized, directory / place, fit_one)
        result = f"{curve.losses[-1]:.4f} after {curve.seconds[-1]:.1f} s" if curve.losses else "diverged"
        say(f"width {run.width}, {run.tokens:,} tokens: {result}")
        return curve

    trained = [(run, train(run, run.directory)) for run in plan.rungs]
    finite = [(run, curve.losses[-1]) for run, curve in trained if curve.losses]
    if len(finite) < LEAST_POINTS:
        raise UserError(
            f"{len(finite)} of {len(trained)} runs did not diverge, a fit needs {LEAST_POINTS}: lower "
            "--optim.learning-rate, and give another --run-dir"
        )
    points = [Point(parameters=r.parameters, tokens=r.tokens, flops=r.flops, loss=loss) for r, loss in finite]
    law = fit_law(points)
    laws = resample_laws(points, law)
    prediction = read_prediction(directory, points)
    if prediction is None:
        run = choose_test(plan, law, unit, size_of)
        loss, low, high = predict(points, law, laws, run.parameters, run.tokens)
        prediction = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "points_sha256": hash_points(points),
            "run": dataclasses.asdict(run),
            "law": dataclasses.asdict(law),
            "loss": loss,
            "low": low,
            "high": high,
            "confidence": CONFIDENCE,
        }
        write_json(directory / PREDICTION, prediction)
    say(format_prediction(prediction))
    test = from_dict(GridRun, prediction["run"])
    curve, result = train(test, "test"), None
    if curve.losses:
        error = curve.losses[-1] / prediction["loss"] - 1
        result = {
            "loss": curve.losses[-1],
            "relative_error": error,
            "within": abs(error) <= WITHIN,
            "inside_interval": prediction["low"] <= curve.losses[-1] <= prediction["high"],
            "seconds": curve.seconds[-1],
        }
    names = ("E", "alpha", "beta", "parameters_exponent")
    errors = relative_errors(points, law)
    found = {
        "plan": dataclasses.asdict(plan),
        "points": [
            dataclasses.asdict(point)
            | {"width": run.width, "seed": run.seed, "epochs": run.epochs, "relative_error": error}
            for point, (run, _), error in zip(points, finite, errors, strict=True)
        ],
        "law": dataclasses.asdict(law),
        "parameters_exponent": law.parameters_exponent,
        "intervals": {name: interval([getattr(x, name) for x in laws]) for name in names},
        "noise": noise(points, law),
        "largest_error": max(errors, key=abs),
        "frontier": find_frontier(law, [*(run for run, _ in finite), test]),
        "prediction": prediction,
        "result": result,
    }
    source = Path(experiment.data.path or experiment.data.corpus).name
    plot_scaling(found, law, directory / PLOT, f"{experiment.name}, {source}")
    write_json(directory / SCALE, found)
    return found


def find_frontier(law: Law, runs: Sequence[GridRun], count: int = 25) -> list[dict[str, float]]:
    """Return the compute-optimal parameters and tokens, and their loss by the law, from the least FLOPs to the most.

    The FLOPs per token of sizes between those of the runs are interpolated.
    """
    log_n, log_per_token = np.log(sorted({(run.parameters, run.flops / run.tokens) for run in runs})).T
    n = np.linspace(log_n[0], log_n[-1], 500)
    per_token, frontier = np.exp(np.interp(n, log_n, log_per_token)), []
    for flops in np.geomspace(min(run.flops for run in runs), max(run.flops for run in runs), count):
        losses = law.loss(np.exp(n), flops / per_token)
        best = int(np.argmin(losses))
        row = {"flops": flops, "parameters": np.exp(n[best]), "tokens": flops / per_token[best], "loss": losses[best]}
        frontier.append({name: float(value) for name, value in row.items()})
    return frontier


def hash_points(points: Sequence[Point]) -> str:
    """Return the SHA-256 of what a law is fitted to."""
    return json_sha256([dataclasses.asdict(point) for point in points])


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_whole(path, render_json(value, indent=1, ensure_ascii=False) + "\n")


def read_plan(directory: Path, experiment: Experiment, asked: dict[str, Any]) -> Plan | None:
    """Return the plan in a directory, None if there is none. Raises `UserError` if it is of other runs."""
    path = directory / PLAN
    if not path.exists():
        return None
    record = read_json(path, LARGEST_FILE)
    recorded = from_dict(Experiment, record["experiment"], find_class=find_class_in(experiment))
    changed = differences(recorded, experiment)
    if record["minutes"] != asked["minutes"]:
        changed["minutes"] = record["minutes"], asked["minutes"]
    if record["data"] != asked["data"]:
        changed["the text"] = "another", "this one"
    if changed:
        fields = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise UserError(f"{directory} has another grid: {fields}. Give another --run-dir, or what that grid has")
    return from_dict(Plan, record["plan"] | {"rungs": [from_dict(GridRun, run) for run in record["plan"]["rungs"]]})


def read_prediction(directory: Path, points: Sequence[Point]) -> dict[str, Any] | None:
    """Return the prediction in a directory, None if there is none. Raises `UserError` if it is of other points."""
    path = directory / PREDICTION
    if not path.exists():
        return None
    prediction = read_json(path, LARGEST_FILE)
    if prediction.get("points_sha256") != hash_points(points):
        raise UserError(
            f"{path} was made of other losses than those of the runs now: a prediction is not made twice. "
            "Restore the runs, or give another --run-dir"
        )
    return prediction


# Words, tables and a plot.


def format_plan(plan: Plan) -> str:
    """Return a plan as a table in Markdown."""
    rows = [
        [
            str(x.width),
            f"{x.parameters:,}",
            f"{x.tokens:,}",
            f"{x.epochs:.2f}",
            f"{x.flops:.2e}",
            f"{x.seconds / 60:.1f}",
        ]
        for x in plan.rungs
        if not x.seed
    ]
    most = f"at most {MOST_EPOCHS}"
    rows.append(["test run", "", "", most, f"{plan.test_flops:.2e}", f"{plan.test_seconds / 60:.1f}"])
    table = format_table(["width", "parameters", "tokens", "epochs", "FLOPs", "minutes"], rows)
    total = (sum(x.seconds for x in plan.rungs) + plan.test_seconds) / 60
    seeds = 1 + max(x.seed for x in plan.rungs)
    return f"{table}\nseeds of each run of the grid: {seeds}; about {total:.0f} minutes in all"


def format_prediction(prediction: dict[str, Any]) -> str:
    """Return a prediction as a sentence."""
    run = prediction["run"]
    return (
        f"prediction, {prediction['date']}: {prediction['loss']:.4f} ({prediction['low']:.4f} to "
        f"{prediction['high']:.4f}) for width {run['width']}, {run['parameters']:,} parameters and {run['tokens']:,} "
        f"tokens ({run['epochs']:.1f} epochs), {run['flops']:.2e} FLOPs"
    )


def format_scale(found: dict[str, Any]) -> str:
    """Return the result of `run_scale` as a table in Markdown and sentences."""
    law, within, result = found["law"], found["intervals"], found["result"]
    rows = [
        [
            str(x["width"]),
            f"{x['parameters']:,}",
            f"{x['tokens']:,}",
            f"{x['flops']:.2e}",
            f"{x['loss']:.4f}",
            f"{x['relative_error']:+.2%}",
        ]
        for x in found["points"]
    ]
    table = format_table(["width", "parameters", "tokens", "FLOPs", "loss", "error of the fit"], rows)
    values = {name: law[name] for name in ("alpha", "beta", "E")} | {
        "parameters_exponent": found["parameters_exponent"]
    }
    exponents = ", ".join(
        f"{'optimal N ~ C^a, a' if name == 'parameters_exponent' else name} {value:.3f} "
        f"({within[name][0]:.3f} to {within[name][1]:.3f})"
        for name, value in values.items()
    )
    fitted = f"L = {law['E']:.3f} + {law['A']:.3g} / N^{law['alpha']:.3f} + {law['B']:.3g} / D^{law['beta']:.3f}"
    measured = (
        "the test run diverged"
        if result is None
        else f"measured: {result['loss']:.4f}, {result['relative_error']:+.2%} from the prediction: "
        f"{'within' if result['within'] else 'not within'} {WITHIN:.0%}, "
        f"{'inside' if result['inside_interval'] else 'outside'} the interval"
    )
    return f"{table}\n\n{fitted}; {exponents}\n{format_prediction(found['prediction'])}\n{measured}"


def plot_scaling(found: dict[str, Any], law: Law, path: Path, title: str) -> None:
    """Plot losses over compute and over tokens, the fit, the prediction and the run that tested it, to a PNG file."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    red, prediction, result = "#c0392b", found["prediction"], found["result"]
    run, loss = prediction["run"], prediction["loss"]
    sizes = sorted({x["parameters"] for x in found["points"]})
    colours = matplotlib.colormaps["viridis"](np.linspace(0.85, 0.1, len(sizes)))
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(title)
    compute, tokens = figure.subplots(1, 2, sharey=True)
    of_test = [] if run["parameters"] in sizes else [(run["parameters"], red)]
    for parameters, colour in [*zip(sizes, colours, strict=True), *of_test]:
        points = [x for x in found["points"] if x["parameters"] == parameters]
        one = (points or [run])[0]
        reach = np.geomspace(min(x["tokens"] for x in found["points"]) / 1.2, run["tokens"] * 1.3, 100)
        label, style = f"width {one['width']}, {parameters:,} parameters", "-" if points else "--"
        for axes, field, scale in ((compute, "flops", one["flops"] / one["tokens"]), (tokens, "tokens", 1.0)):
            axes.plot(reach * scale, law.loss(parameters, reach), style, color=colour, linewidth=1, label=label)
            axes.plot([x[field] for x in points], [x["loss"] for x in points], "o", color=colour)
    frontier = [[x[name] for x in found["frontier"]] for name in ("flops", "loss")]
    compute.plot(*frontier, color="black", linewidth=4, alpha=0.2, label="compute-optimal")
    bars = [[loss - prediction["low"]], [prediction["high"] - loss]]
    predicted = f"predicted: {loss:.4f} ({prediction['low']:.4f} to {prediction['high']:.4f})"
    for axes, field in ((compute, "flops"), (tokens, "tokens")):
        x = [run[field]]
        axes.errorbar(x, [loss], yerr=bars, fmt="_", color="black", capsize=5, markersize=12, label=predicted, zorder=3)
        if result is not None:
            measured = f"measured: {result['loss']:.4f} ({result['relative_error']:+.2%})"
            axes.plot(x, [result["loss"]], "*", color=red, markersize=11, label=measured)
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    compute.set(xlabel="training FLOPs", ylabel="validation loss (nats per token)")
    tokens.set(xlabel="training tokens")
    tokens.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    tokens.xaxis.set_major_formatter(lambda x, _: f"{x / 1e6:g}M")
    compute.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)


def scale(*, minutes: PositiveFloat = 30.0, run_dir: str | None = None, experiment: Experiment) -> Result:
    """Fit a scaling law to small runs, and test what it predicts of a larger one.

    Args:
        minutes: training time of all runs together
        run_dir: directory of the runs, resumed if it exists. None means runs/scale/NAME
    """
    configure_jax()
    place = Path(run_dir or f"runs/scale/{experiment.name}")
    try:
        found = run_scale(experiment, place, minutes=minutes, say=say)
    except Preempted as e:
        raise Preempted(f"{str(e).partition(' To continue')[0]} Run the same command to resume.") from None
    return Result(found, format_scale(found))


def main() -> None:
    """Run the command line. Exit status 2: the user's mistake, in a line; 1: interrupted."""
    words = sys.argv[1:]
    named = words.pop(0) if words and not words[0].startswith("-") else "quickstart"
    with report_errors():
        example = "python experiments/scaling_laws.py quickstart --minutes 30"
        parse(
            scale, words, "scaling_laws.py", operand="[EXPERIMENT]", example=example, experiment=load_experiment(named)
        )()


if __name__ == "__main__":
    main()
