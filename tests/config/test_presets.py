"""Built-in experiments of any depth."""

import pytest

from jaxgpt.errors import UserError
from jaxgpt.presets import depth, find_preset, quickstart


def total(experiment):
    return experiment.train.steps * experiment.train.batch_size * experiment.model.block_size


def test_all_sizes_follow_from_the_depth():
    small, large = depth(2), depth(4)
    assert find_preset("depth:4") == large and find_preset("quickstart") == quickstart() and find_preset("x.py") is None
    m = large.model
    assert (m.n_layer, m.n_embd, m.n_head, m.mup_base_width) == (4, 256, 4, small.model.n_embd)
    for experiment, parameters in ((small, 12 * 2 * 128**2), (large, 12 * 4 * 256**2)):
        assert total(experiment) == pytest.approx(20 * parameters, rel=0.01)
    assert total(depth(2, tokens_per_parameter=5.0)) == pytest.approx(5 * 12 * 2 * 128**2, rel=0.01)
    for name in ("learning_rate", "muon_learning_rate"):
        assert getattr(small.optim, name) == getattr(large.optim, name) == getattr(quickstart().optim, name)


def test_decay_averages_over_a_share_of_the_steps_that_falls_with_tokens_per_parameter():
    def share(experiment):
        return 1 / (experiment.optim.muon_learning_rate * experiment.optim.weight_decay * experiment.train.steps)

    assert all(0.5 <= share(depth(n)) / share(depth(4)) <= 2 for n in (2, 12))
    assert 5 <= share(depth(4)) / share(depth(4, tokens_per_parameter=2000)) <= 20


@pytest.mark.parametrize("tokens", [0, float("nan"), 1e20])
def test_tokens_that_will_not_do(tokens):
    with pytest.raises(UserError, match="tokens to train on: needs 1 to 1e19"):
        depth(2, tokens=tokens)
