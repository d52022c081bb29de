"""Studies: the statistics against scipy's, the runs against runs by hand, and what cannot be compared."""

import dataclasses
import json
import math

import numpy as np
import pytest

from jaxgpt.config.words import replace_fields
from jaxgpt.errors import Diverged, UserError
from jaxgpt.loss import ObjectiveConfig
from jaxgpt.parallel.jax_setup import device_name
from jaxgpt.runs.metrics import read_metrics
from jaxgpt.statistics import holm_levels
from jaxgpt.tools import grid, study
from jaxgpt.tools.grid import Curve, read_curve
from jaxgpt.tools.study import check_comparable, compare, compare_losses, run_study, slug
from jaxgpt.training import fit
from tests.helpers import tiny_experiment


def test_verdicts():
    losses = {
        "first": [3.0, 3.1, 3.2],
        "same": [3.01, 3.08, 3.21],
        "better": [2.9, 3.0, 3.1],
        "worse": [3.2, 3.31, 3.4],
        "lost": [3.0, None, 3.0],
        "half lost": [3.0, 3.1, 3.4],
    }
    rows = {row.variant: row for row in compare_losses({"tokens": losses})["tokens"]}
    assert [rows[name].verdict for name in losses] == [
        "the first",
        "no more than noise",
        "better",
        "worse",
        "1 of 3 diverged",
        "seeds disagree: 3.0000 to 3.4000",
    ]
    assert rows["first"].difference is None and rows["first"].deviation == pytest.approx(0.1)
    assert rows["better"].difference == pytest.approx(-0.1) and rows["better"].margin == pytest.approx(0, abs=1e-9)
    assert rows["lost"].mean is None and rows["half lost"].mean is None and rows["half lost"].margin is None
    one = compare_losses({"tokens": {"a": [1.0], "b": [0.5]}})["tokens"]
    assert one[1].verdict == "one seed: no interval" and one[1].difference == -0.5 and one[0].deviation is None
    failed = compare_losses({"tokens": {"a": [1.0, 1.1], "b": [0.5, math.nan]}})["tokens"]
    assert failed[1].verdict == "1 of 2 failed"
    none = compare_losses({"tokens": {"a": [None, 2.0], "b": [2.0, 2.1]}})["tokens"]
    assert none[1].verdict == "the first: 1 of 2 diverged" and none[1].difference is None


def make_losses(rng, variants, seeds, *, noise, gap=0.0, shared=0.5):
    """Return losses of a study with a standard deviation of 0.01 over the seeds.

    noise: distribution with a variance of 1.
    gap: difference of the last variant, in standard deviations.
    shared: fraction of the variance that runs with the same seed share.
    """
    names = [str(i) for i in range(variants + 1)]
    x = np.sqrt(shared) * rng.normal(size=seeds) + np.sqrt(1 - shared) * noise((variants + 1, seeds))
    x[-1] += gap
    tables = {"tokens": 2 + 0.01 * x, "seconds": 2 + 0.01 * x + 0.002 * noise(x.shape)}
    return {axis: dict(zip(names, losses.tolist(), strict=True)) for axis, losses in tables.items()}


def test_an_interval_excludes_zero_exactly_if_the_verdict_is_better_or_worse():
    rng = np.random.default_rng(0)
    kinds = set()
    for _ in range(50):
        found = compare_losses(make_losses(rng, 3, 5, noise=rng.standard_normal, gap=3))
        tested = [row for rows in found.values() for row in rows if row.margin is not None]
        for table in found.values():  # each has half of the error, so that none depends on the other
            p_values = [row.p_value for row in table[1:]]
            assert [row.level for row in table[1:]] == pytest.approx(holm_levels(p_values, 0.025))
        for row in tested:
            excludes = abs(row.difference) > row.margin
            assert excludes == (row.verdict in ("better", "worse")) == (row.p_value <= row.level)
            kinds.add((row.verdict, row.level > 0.051 / len(tested)))
    assert {("worse", True), ("worse", False), ("no more than noise", True), ("no more than noise", False)} <= kinds


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_nothing_is_found_where_nothing_differs_and_two_standard_deviations_are(tails):
    """Five variants that do nothing, and one with a gap, which no seed effect makes easier to see, with eight seeds."""
    rng = np.random.default_rng(0)

    def noise(shape):
        return rng.standard_normal(shape) if tails == "normal" else rng.standard_t(3, shape) / np.sqrt(3)

    def find_any(variants, seeds, **made):
        """Return the fraction of studies with a verdict in any table."""
        found = [compare_losses(make_losses(rng, variants, seeds, noise=noise, **made)) for _ in range(500)]
        return np.mean([any(row.verdict in ("better", "worse") for row in x["tokens"] + x["seconds"]) for x in found])

    assert find_any(5, 5) <= 0.06
    assert find_any(1, 8, gap=2.0, shared=0.0) >= 0.8


def test_all_are_compared_where_the_shortest_ends():
    def make(fast):
        slow = Curve(tokens=[100, 200, 400], seconds=[10, 20, 40], losses=[3.0, 2.0, 1.0])
        return {"slow": [slow], "fast": [Curve(tokens=[100, 300], seconds=fast, losses=[2.5, 1.5])]}

    found = compare(make([5, 15]))
    assert found["tokens"].at == 300 and found["seconds"].at == 15
    assert [row.losses for row in found["tokens"].rows] == [[1.5], [1.5]]
    assert [row.losses for row in found["seconds"].rows] == [[2.5], [1.5]]


@pytest.fixture(scope="module")
def variants(text_file):
    e = tiny_experiment(text_file, steps=4, eval_every=2)
    return {"as it is": e, "wider": replace_fields(e, {"model.n_embd": 16})}


@pytest.fixture(scope="module")
def studied(variants, tmp_path_factory):
    directory, told = tmp_path_factory.mktemp("study") / "s", []
    return directory, run_study(variants, directory, seeds=2, say=told.append), told


@pytest.mark.slow
def test_a_study_is_its_runs(variants, studied, tmp_path):
    directory, found, told = studied
    by_hand = replace_fields(variants["wider"], {"train.seed": 1, "train.sample_tokens": 0})
    run = fit(by_hand, tmp_path / "run", progress=False)
    last = [line["val_loss"] for line in read_metrics(run.directory / "metrics.jsonl") if "val_loss" in line][-1]
    assert found.tokens.rows[1].losses[1] == last and found.tokens.at == 4 * 4 * 8
    assert [line.split(":")[0] for line in told] == [f"seed {s}, {v}" for s in (0, 1) for v in variants]
    assert (directory / "as-it-is/seed-1/experiment.json").exists()
    written = [json.loads((directory / name).read_text()) for name in ("study.json", "study-seconds.json")]
    assert written[0] | written[1] == dataclasses.asdict(found) and written[1].keys() == {"seconds", "devices"}
    assert found.devices == [device_name()]
    assert "| as it is |" in str(found) and "over 2 seeds" in str(found) and "| wider |" in str(found)


def test_seconds_are_those_of_the_steps(variants, tmp_path):
    """By their rates, whatever compilation took; what is validated between two lines lies between."""
    lines = [
        {"step": 1, "tokens": 32, "tokens_per_second": None, "seconds": 60.0},
        {"step": 2, "tokens": 64, "tokens_per_second": 32.0, "seconds": 61.0},
        {"step": 3, "val_loss": 2.0},
        {"step": 4, "tokens": 128, "tokens_per_second": 16.0, "seconds": 99.0},
        {"step": 4, "val_loss": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_curve(tmp_path, variants["as it is"])
    assert found == Curve(tokens=[96, 128], seconds=[2 + 2, 2 + 4], losses=[2.0, 1.0])


@pytest.mark.slow
def test_a_study_goes_on_where_it_was_left(variants, studied, monkeypatch):
    directory, found, _ = studied
    calls = []
    monkeypatch.setattr(grid, "fit", lambda e, place, **how: calls.append(place) or fit(e, place, **how))
    assert run_study(variants, directory, seeds=2) == found and calls == []
    more = run_study(variants, directory, seeds=3)
    assert [place.parent.name for place in calls] == ["as-it-is", "wider"] and more.seeds == 3
    assert more.tokens.rows[0].losses[:2] == found.tokens.rows[0].losses
    longer = {name: replace_fields(e, {"train.steps": 6}) for name, e in variants.items()}
    with pytest.raises(UserError, match="another configuration: train.steps 4 -> 6"):
        run_study(longer, directory, seeds=1)


@pytest.mark.parametrize("change", [{"data.tokenizer": "byte"}, {"train.eval_tokens": 5}], ids=str)
def test_what_shares_no_metric(variants, change):
    first = variants["as it is"]
    with pytest.raises(UserError, match=f"variants 'a' and 'b' do not share a metric: {next(iter(change))} is"):
        check_comparable({"a": first, "b": replace_fields(first, change)})


class Errors(ObjectiveConfig):
    unit = "share of wrong answers"


def test_the_unit_of_the_losses(variants, tmp_path, monkeypatch):
    """A share of errors has no spread from which seeds disagree, and is not compared with nats."""
    first = variants["as it is"]
    errors = dataclasses.replace(first, objective=Errors())
    with pytest.raises(
        UserError, match="they validate in nats per token and share of wrong answers.*the same kind of objective"
    ):
        check_comparable({"a": first, "b": errors})
    shares = zip((0.2, 0.2, 0.5, 0.5), "aabb", strict=True)  # two seeds of each, on two machines
    curves = [Curve(tokens=[64], seconds=[1.0], losses=[share], device=device) for share, device in shares]
    monkeypatch.setattr(study, "train_grid", lambda *_, **how: curves)
    found = run_study({"a": errors, "b": errors}, tmp_path, seeds=2)
    assert [row.mean for row in found.tokens.rows] == [pytest.approx(0.35)] * 2
    assert "validation loss (share of wrong answers) at equal tokens, 64 tokens, over 2 seeds" in str(found)
    assert str(found).endswith("took part, which round sums differently: a, b")


@pytest.mark.slow
def test_weights_bring_their_tokenizer_to_a_comparison(variants, studied, tmp_path, monkeypatch):
    """Whatever is named beside them: losses per token of another one are not compared with theirs."""
    begun = {"train.init_from": str(studied[0] / "as-it-is/seed-0"), "model.block_size": 32}
    named = replace_fields(variants["as it is"], begun | {"data.tokenizer": "byte"})
    nothing = replace_fields(variants["as it is"], {"data.tokenizer": "byte"})
    calls = []

    def fit_none(experiment, place, **how):
        calls.append(place)
        raise Diverged("nothing was trained")

    monkeypatch.setattr(grid, "fit", fit_none)
    with pytest.raises(UserError, match="'nothing' and 'weights' do not share a metric: .*tokenizer_sha256"):
        run_study({"nothing": nothing, "weights": named}, tmp_path, seeds=1)
    assert calls == []
    begun = replace_fields(variants["as it is"], begun)
    run_study({"nothing": variants["as it is"], "weights": begun}, tmp_path, seeds=1)
    assert len(calls) == 2


def test_what_is_no_study(variants):
    first = variants["as it is"]
    with pytest.raises(UserError, match=r"variants '\.\.', 'Study\.json' have no directory"):
        check_comparable({"a": first, "..": first, "Study.json": first})
    assert slug("pre-norm, with warm-up") == "pre-norm-with-warm-up"
