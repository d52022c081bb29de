"""experiments/zoo/alibi.py: the bias as it is defined, causality, cached decoding, options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import import_pages

(alibi,) = import_pages("zoo", "alibi")


@pytest.mark.parametrize("n_head", [2, 8, 16])
def test_slopes_are_those_of_bloom(n_head):
    torch, bloom = pytest.importorskip("torch"), pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias_N1S = bloom.build_alibi_tensor(torch.ones(1, 4), n_head, torch.float32).numpy()
    np.testing.assert_allclose(alibi.alibi_slopes(n_head)[:, None] * jnp.arange(4)[None], bias_N1S[:, 0], rtol=1e-6)


def test_scores_have_the_bias():
    """Against the definition, with positions that restart in a second document and exceed 256."""
    q_BTNH, k_BSKH = jax.random.normal(jax.random.key(0), (2, 1, 6, 4, 3))
    positions_T = np.array([300, 301, 302, 0, 1, 2])
    extended = alibi.extend_queries(q_BTNH, 0.5), alibi.extend_keys(k_BSKH, jnp.asarray(positions_T)[None])
    scores_NTS, plain_NTS = (
        0.5 * np.einsum("TNH,SNH->NTS", *(np.asarray(x[0], np.float64) for x in pair))
        for pair in (extended, (q_BTNH, k_BSKH))
    )
    bias_NTS = -(4.0 ** -np.arange(1.0, 5)[:, None, None]) * (positions_T[:, None] - positions_T)
    # Up to what all keys of a query share, which softmax ignores.
    difference_NTS = scores_NTS - plain_NTS - bias_NTS
    np.testing.assert_allclose(difference_NTS, np.broadcast_to(difference_NTS[:, :, :1], (4, 6, 6)), atol=1e-4)
