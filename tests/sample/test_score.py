import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.sample import score
from tests.helpers import TINY, apply, make_model


def test_each_token_given_those_before_it_and_at_least_half_a_window():
    model, params = make_model(TINY)
    C = TINY.block_size
    texts = [np.random.default_rng(n).integers(0, 11, n).tolist() for n in (3, C, C + 1, C + 2, 5 * C + 3)]
    for text, got in zip(texts, score(model, params, texts), strict=True):
        assert len(got) == len(text) and np.isnan(got[0])
        first = 0
        for i in range(1, len(text)):
            if i - first > C:  # the window that scores token i begins half a context later
                first += C // 2
            window = text[first:i]
            padded = jnp.array([window + [0] * (C - len(window))])
            logprobs_V = jax.nn.log_softmax(apply(model, params, padded)[0, len(window) - 1])
            np.testing.assert_allclose(got[i], logprobs_V[text[i]], rtol=1e-4, atol=1e-4)


def test_little_and_nothing():
    model, params = make_model(dataclasses.replace(TINY, block_size=1))
    none, one, three = score(model, params, [[], [5], [5, 1, 2]])
    assert len(none) == 0 and np.isnan(one).all() and np.isfinite(three[1:]).all()
    with pytest.raises(UserError, match="text 0 has ids from 3 to 11"):
        score(model, params, [[3, 11]])
