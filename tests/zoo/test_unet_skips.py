"""experiments/zoo/unet_skips.py: which output is added where."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.errors import UserError
from tests.helpers import FLOAT32_REORDERED, TINY, import_pages, make_model

(page,) = import_pages("zoo", "unet_skips")

CONFIG = page.UNetConfig(**dataclasses.asdict(TINY) | dict(n_layer=5, norm="rmsnorm"))


@pytest.mark.parametrize("n_layer", [2, 5])
def test_what_enters_an_early_block_is_added_to_the_output_of_its_late_counterpart(n_layer):
    model, params = make_model(dataclasses.replace(CONFIG, n_layer=n_layer))
    bound = model.bind({"params": params})

    def run(block, x):  # numbers in place of blocks
        return x * 2.0 + float(bound.h.index(block))

    out = bound.run_blocks(jnp.ones((1, 1, 1)), run, None)
    w, x = np.asarray(params["skip"]), [1.0]
    if n_layer == 2:
        expected = (2 * (2 * 1.0 + 0) + 1) + w[0] * 1.0
    else:
        for layer in (0, 1, 2):
            x.append(2 * x[-1] + layer)
        after_3 = 2 * x[3] + 3 + w[1] * x[1]
        expected = 2 * after_3 + 4 + w[0] * x[0]
    np.testing.assert_allclose(out[0, 0, 0], expected, **FLOAT32_REORDERED)


def test_weights_start_at_one_and_one_block_for_all_is_refused():
    model = dataclasses.replace(CONFIG, n_layer=2).make_model()
    fresh = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    assert fresh["skip"].tolist() == [1.0]
    for refused in (dict(scan_layers=True), dict(n_layer=1)):
        with pytest.raises(UserError, match="different layers"):
            dataclasses.replace(CONFIG, **refused)
