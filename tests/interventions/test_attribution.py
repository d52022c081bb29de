"""Direct logit attribution: the contributions sum to the difference of the logits, and each is its part's."""

import dataclasses

import chex
import numpy as np
import pytest

from jaxgpt.config import GPTConfig
from jaxgpt.errors import UserError
from jaxgpt.interventions import logit_attribution, run
from tests.interventions.test_edits import CONFIGS, SIZE, TOKENS, make

PRE = {
    **{name: config for name, config in CONFIGS.items() if config.norm_position == "pre"},
    "offset": dataclasses.replace(CONFIGS["gqa"], norm_offset=True, scan_layers=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "parallel" else ()) for name in PRE]
)
def test_contributions_sum_to_the_difference_of_the_logits(name):
    model, params = make(PRE[name])
    found = logit_attribution(model, params, TOKENS[0], 3, 5)
    logits_V = run(model, params, TOKENS[:1]).logits_BTV[0, -1]
    chex.assert_trees_all_close(found.total(), logits_V[3] - logits_V[5], atol=1e-4, rtol=1e-4)
    assert found.heads_LN.shape == (2, 4) and found.mlps_L.shape == found.biases_L.shape == (2,)
    assert all(np.abs(x).max() > 1e-3 for x in (found.embedding, found.heads_LN, found.mlps_L))


def test_a_head_contributes_what_its_rows_of_the_projection_write():
    model, params = make(CONFIGS["gpt2"])
    found = logit_attribution(model, params, TOKENS[0], 3, 5)
    read = run(model, params, TOKENS[:1], read=["h_0/heads", "h_1/stream"]).activations
    written_D = read["h_0/heads"][0, -1, 2] @ params["h_0"]["attn"]["c_proj"]["kernel"][8:12]  # head 2 of size 4
    normed_D = (written_D - written_D.mean()) / read["h_1/stream"][0, -1].std() * params["ln_f"]["scale"]
    rows_VD = params["wte"]["embedding"]
    chex.assert_trees_all_close(found.heads_LN[0, 2], normed_D @ (rows_VD[3] - rows_VD[5]), rtol=1e-4)


def test_what_does_not_decompose_is_one_clear_line():
    for config in (CONFIGS["sandwich"], GPTConfig(**SIZE, norm_position="post"), GPTConfig(**SIZE, logit_softcap=9.0)):
        with pytest.raises(UserError, match="the logits are not a sum of what each part writes; needs 'pre' and None"):
            logit_attribution(*make(config), TOKENS[0], 3, 5)
    with pytest.raises(UserError, match="tokens 3 and 23: needs 0 to 22"):
        logit_attribution(*make(CONFIGS["gpt2"]), TOKENS[0], 3, 23)
