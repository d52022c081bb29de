"""How a batch is laid out and computed changes nothing: order, packing, padding, accumulation."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxgpt.batch import Batch
from jaxgpt.model import GPTConfig
from tests.helpers import import_pages, make_model

distillation, dpo, grpo = import_pages("post", "distillation", "dpo", "grpo")

SAME = 1e-6  # relative: float32 sums of a hundred terms, in another order
PAIRS, T, LONGER = 16, 24, 40
CONFIG = GPTConfig(vocab_size=13, block_size=LONGER, n_layer=1, n_head=2, n_embd=8, position="rope")
MODEL, PARAMS = make_model(CONFIG)
KEY = jax.random.key(0)
EXTRAS = ("advantages_BT", "old_logprobs_BT", "reference_logprobs_BT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taught(distillation.DistillationConfig):
    def _load_teacher(self, student):
        return make_model(student, seed=7)


OBJECTIVES = {
    "dpo": dpo.DPOConfig(beta=0.3, label_smoothing=0.1),
    "ipo": dpo.DPOConfig(loss="ipo", normalise_length=True),
    **{f"grpo {x}": grpo.GRPOConfig(normalise=x, kl=0.1, max_tokens=9) for x in ("sequence", "token", "constant")},
    "distillation": Taught(direction="reverse", top_k=4),
}


def draw_pairs() -> list:
    """Pairs of texts of 3 to 6 inputs: (inputs, targets, mask, extras...) of each, arrays of one length."""
    rng = np.random.default_rng(0)

    def text(size):
        ids, prompt = rng.integers(0, 13, size + 1), rng.integers(1, size)
        extras = rng.normal(size=(3, size)) - [[0.0], [2.5], [2.5]]  # two of them are logarithms
        return ids[:-1], ids[1:], np.arange(size) >= prompt, *extras

    return [[text(int(size)) for size in rng.integers(3, 7, 2)] for _ in range(PAIRS)]


def lay_out(rows: list[list[int]], length: int) -> Batch:
    """The batch in which each row has these pairs, and padding of any value up to its length."""
    pairs, kinds = draw_pairs(), (np.int32, np.int32, bool, *[np.float32] * 3)
    arrays = [
        np.full((len(rows), length), fill, kind) for fill, kind in zip((5, -1, False, 7, 7, 7), kinds, strict=True)
    ]
    segments = np.zeros((len(rows), length), np.int32)
    for row, members in enumerate(rows):
        at = 0
        for number, text in enumerate((text for member in members for text in pairs[member]), 1):
            here = slice(at, at + len(text[0]))
            segments[row, here], at = number, here.stop
            for array, values in zip(arrays, text, strict=True):
                array[row, here] = values
    return Batch(*arrays[:3], segments, dict(zip(EXTRAS, arrays[3:], strict=True)))


PACKED = [[n, n + 8] for n in range(8)]
LAYOUTS = {
    "another order": lay_out([[n + 8, n] for n in (3, 1, 7, 0, 5, 2, 6, 4)], T),
    "not packed": lay_out([[n] for n in range(PAIRS)], T),
    "padded": lay_out([*PACKED, []], LONGER),
}


@functools.cache
def learn(name: str, layout: str | None = None, accumulate: int = 1) -> tuple:
    """(The mean loss and the means of metrics, their gradient)."""
    loss = OBJECTIVES[name].make_loss(MODEL)
    batch = lay_out(PACKED, T) if layout is None else LAYOUTS[layout]

    @jax.jit
    def of(params, micro):
        def summed(params):
            total, count, metrics = loss(params, micro, KEY)
            return total, (total, count, metrics)

        return jax.grad(summed, has_aux=True)(params)[::-1]

    turns = [jax.tree.map(lambda x, n=n: x[n], batch.micro_batches(accumulate)) for n in range(accumulate)]
    (total, count, metrics), gradient = jax.tree.map(lambda *x: sum(x), *[of(PARAMS, turn) for turn in turns])
    return jax.tree.map(lambda x: np.asarray(x / count), ({"loss": total} | metrics, gradient))


def assert_same(found, expected):
    """Relative to the largest number of the tree, which is that of a loss or of its gradient."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=SAME * largest)


@pytest.mark.parametrize("change", [*LAYOUTS, "accumulated"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_layout_of_a_batch_changes_nothing(name, change):
    found = learn(name, accumulate=4) if change == "accumulated" else learn(name, change)
    for ours, expected in zip(found, learn(name), strict=True):
        assert_same(ours, expected)
    assert all(np.abs(x).max() > 0 for x in found[0].values())
