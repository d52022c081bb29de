"""The outside oracle: patches equal TransformerLens's, which reads the same weights."""

import importlib.util
import os

import chex
import numpy as np
import pytest

from jaxgpt.hf.source import open_source
from jaxgpt.hf.weights import read_params
from jaxgpt.interventions import patch
from jaxgpt.model import GPT
from tests.hf.peers import make_peer

# (place, TransformerLens's name of it)
PLACES = {
    "heads": "attn_head_out_by_pos",
    "queries": "attn_head_q_by_pos",
    "values": "attn_head_v_by_pos",
    "pattern": "attn_head_pattern_by_pos",
    "attention": "attn_out",
    "middle": "resid_mid",
    "mlp": "mlp_out",
}


def difference(logits_V):
    return logits_V[3] - logits_V[5]


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens") is None,
    reason="transformer-lens is not installed: run_each is the oracle",
)
@pytest.mark.filterwarnings("ignore")  # transformer_lens's own
@pytest.mark.parametrize("name, places", [("gpt2", PLACES), ("qwen3", ["heads", "attention", "mlp"])])
def test_patches_equal_transformer_lens(name, places, tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    from tokenizers import Tokenizer, models
    from transformer_lens import TransformerBridge, patching

    make_peer(name).save_pretrained(tmp_path)
    words, ends = (
        Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        dict(bos_token="a", eos_token="a", pad_token="a"),
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(tmp_path)
    source = open_source(str(tmp_path), "ids")
    model, params = GPT(source.config), read_params(source.tensors, source.family, source.config)
    into_T, source_T = np.random.default_rng(0).integers(0, 61, (2, 9))
    with torch.no_grad():
        peer = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
        peer.enable_compatibility_mode(no_processing=True)
        _, cache = peer.run_with_cache(torch.tensor(source_T[None]))
        for place in places:
            theirs = getattr(patching, f"get_act_patch_{PLACES[place]}")(
                peer, torch.tensor(into_T[None]), cache, lambda logits_BTV: difference(logits_BTV[0, -1])
            ).numpy()
            ours = patch(model, params, into_T, source_T, place, difference)
            theirs = theirs.swapaxes(1, 2) if place == "pattern" else theirs  # [L, N, T]
            chex.assert_trees_all_close(ours, theirs, rtol=0, atol=1e-4, custom_message=place)
            assert np.ptp(theirs) > 0.1
