"""What `jaxgpt plan` says of this machine, and how it searches; TPU slices are in tools/plan/test_slices.py."""

import dataclasses

import pytest

from jaxgpt.errors import UserError
from jaxgpt.experiment import Experiment, ParallelConfig, TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.limits import PEAKS, Peaks, attention_flops, train_flops_per_token
from jaxgpt.tools.plan import plan as plans
from jaxgpt.tools.plan.collectives import Collective
from jaxgpt.tools.plan.plan import DoesNotFit, format_plan, make_plan, parse_tokens
from tests.helpers import TINY

EXPERIMENT = Experiment(
    name="planned", model=dataclasses.replace(TINY, n_layer=1), train=TrainConfig(batch_size=8, steps=200)
)


@pytest.fixture(scope="module")
def here():
    return make_plan(EXPERIMENT, 11)


def test_this_machine(here):
    assert here.devices == 1 and here.device == "cpu" and here.fits
    assert here.parameters == 8 * (11 + 8) + 12 * 64 + 13 * 8 + 2 * 8  # embeddings, matrices, biases and norms, ln_f
    assert here.state_memory == 4 * (3 * here.parameters) + 4 * (3 + 2)  # and two moments; counters; the guard
    assert here.state_memory < here.memory < here.available
    assert here.total_tokens == 200 * 8 * TINY.block_size
    model = dataclasses.replace(TINY, n_layer=1)
    assert here.flops_per_token == train_flops_per_token(model, here.parameters)
    assert (
        here.executed_flops_per_token == here.flops_per_token - 6 * attention_flops(model) / 2
    )  # without masked scores


def test_what_is_unknown_has_no_line(here):
    """There is no table of CPUs: neither a time nor a rate is guessed, and the verdict says so."""
    assert "cpu" not in PEAKS
    assert here.step_seconds is here.tokens_per_second is here.hours is None
    verdict, *rows = format_plan(here, 1.2).splitlines()
    assert verdict.startswith("fits: ") and verdict.endswith("; its speed is unknown: no rates of cpu are on record")
    assert not any("unknown" in row for row in rows) and rows[-1] == "full run         12,800 tokens"


def test_the_bound_of_a_step(monkeypatch):
    """On a device of 1 GFLOP/s: the time is a count over a speed."""
    monkeypatch.setitem(PEAKS, "cpu", Peaks(flops=1e9, memory=2**40, memory_bandwidth=1e9))
    found = make_plan(EXPERIMENT, 11)
    tokens = 8 * TINY.block_size
    assert found.step_seconds == pytest.approx(found.executed_flops_per_token * tokens / 1e9)
    assert found.tokens_per_second == pytest.approx(tokens / found.step_seconds)
    assert found.hours == pytest.approx(200 * found.step_seconds / 3600)

    # The verdict first, the bounds last; both have the figures of the shortest time.
    monthly = dataclasses.replace(found, hours=100.0, devices=8)
    first, *_, step, rate, last = format_plan(monthly, 1.2).splitlines()
    said = "at least 4.2 days and 960 dollars at 1.2 dollars per device-hour"
    assert first.startswith("fits: 0.00 GiB of ") and first.endswith(f" per device; {said}")
    assert "at least" in step and rate.endswith(f"at most {found.tokens_per_second:,.0f}")
    assert last.endswith(f"12,800 tokens in {said}")


def test_tokens_are_counted_as_people_write_them():
    assert [parse_tokens(text) for text in ("10B", "1.5t", "300_000")] == [10**10, 15 * 10**11, 300_000]
    for text in ("10Q", "0", "-1B", "B", "1e9"):
        with pytest.raises(UserError, match="needs a number such as 10B"):
            parse_tokens(text)


def test_what_goes_between_slices_has_rows_of_its_own(here):
    found = (Collective(False, "all-reduce", 2, 5, 4000), Collective(True, "all-reduce", 2, 3, 3000))
    plan = format_plan(dataclasses.replace(here, exchanges=found))
    assert "collectives      5 x all-reduce over 2: 0.0 MB\nbetween slices   3 x all-reduce over 2: 0.0 MB\n" in plan


def test_what_does_not_fit_is_tried_otherwise(monkeypatch, here):
    """A device that only holds a micro-batch of 1 with remat dots, which is tried before remat full."""
    said, tried = [], []

    def compiled(experiment, trainer, topology):
        remat, micro = experiment.model.remat, trainer.split.micro_batch_size
        tried.append((remat, micro))
        if micro > {"none": 0, "dots": 1, "full": 2}[remat]:
            raise DoesNotFit("3.00 GiB")
        return dataclasses.replace(here, remat=remat, micro_batch_size=micro)

    monkeypatch.setattr(plans, "compile_plan", compiled)
    found = make_plan(EXPERIMENT, 11, say=said.append)
    assert (found.remat, found.micro_batch_size) == ("dots", 1)
    assert tried == [(remat, n) for remat in ("none", "dots") for n in (8, 4, 2, 1)]
    assert said[-1].startswith("remat dots, auto, fsdp=1, micro-batch 2: needs 3.00 GiB of ")


def test_the_search_splits_the_state_over_more_and_more_devices():
    experiment = dataclasses.replace(EXPERIMENT, model=GPTConfig(n_embd=96, n_head=2, remat="dots"))
    variants = [(v.model.remat, v.parallel.strategy, v.parallel.fsdp) for v in plans.iter_variants(experiment, 8)]
    assert variants == [
        *[(remat, "auto", 1) for remat in ("dots", "full")],
        *[(remat, "mesh", n) for n in (2, 4, 8) for remat in ("dots", "full")],
    ]
    slices = [v.parallel for v in plans.iter_variants(experiment, 8, 2)]
    assert [(p.strategy, p.fsdp, p.slices) for p in slices[2::2]] == [("mesh", 2, 2), ("mesh", 4, 2)]
    tensor = dataclasses.replace(experiment, parallel=ParallelConfig(strategy="mesh", tensor=2))
    assert len(list(plans.iter_variants(tensor, 8))) == 2  # how it is split is the user's choice already
