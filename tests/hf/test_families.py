"""Each key of a config.json changes the configuration, is refused, or is known to be nothing to the logits.

Of dictionaries alone: that what is read gives transformers' logits is in test_parity.
"""

import importlib.util
import json

import numpy as np
import pytest

from jaxgpt.errors import UserError
from jaxgpt.hf.families import FAMILIES
from jaxgpt.hf.family import IGNORED
from tests.conftest import REPOSITORY
from tests.hf.peers import BODY, GPT2, LLAMA3, NEOX

SLIDING, FULL = "sliding_attention", "full_attention"
# A model of each family, with windows where it can have them.
MODELS = {
    "gpt2": GPT2,
    "llama": BODY,
    "mistral": BODY | dict(sliding_window=7),
    "qwen2": BODY | dict(use_sliding_window=True, sliding_window=9, max_window_layers=0),
    "qwen3": BODY | dict(use_sliding_window=True, sliding_window=9, max_window_layers=0, head_dim=12),
    "phi3": BODY | dict(sliding_window=7),
    "gemma": BODY | dict(head_dim=16),
    "gemma2": BODY | dict(head_dim=8, sliding_window=6),
    "gemma3_text": BODY | dict(head_dim=8, sliding_window=5),
    "gpt_neox": NEOX | dict(num_attention_heads=3),
    "olmo2": BODY,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}

# Another value of each key that some family reads.
OTHER = dict(
    vocab_size=67, n_embd=30, hidden_size=48, n_layer=3, num_hidden_layers=3, n_head=4, num_attention_heads=2,
    num_key_value_heads=1, head_dim=10, n_inner=44, intermediate_size=44, n_positions=64, max_position_embeddings=64,
    layer_norm_epsilon=0.1, layer_norm_eps=0.1, rms_norm_eps=0.1, tie_word_embeddings=True, attention_bias=True,
    mlp_bias=True, activation_function="relu", hidden_act="gelu_new", hidden_activation="silu", resid_pdrop=0.5,
    scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, use_parallel_residual=False,
    query_pre_attn_scalar=9, final_logit_softcapping=5.0, attn_logit_softcapping=5.0,
    rope_theta=50.0, rotary_emb_base=50.0, rope_local_base_freq=50.0, rotary_pct=1.0, partial_rotary_factor=0.67,
    rope_scaling=LINEAR, rope_parameters={"rope_theta": 50.0}, original_max_position_embeddings=64,
    sliding_window=3, sliding_window_pattern=2, layer_types=[FULL, FULL], use_sliding_window=False, max_window_layers=2,
    is_causal=False, is_encoder_decoder=True, use_bidirectional_attention=True, add_cross_attention=True,
    attention_chunk_size=3, per_layer_config={"0": {"sliding_window": 3}}, kv_sharing_modes=["reuse", None],
    pruned_heads={"0": [1]},
)  # fmt: skip
# Where that is what a family has anyhow, or what it says otherwise.
TIED = dict(tie_word_embeddings=False)
WHOLE = dict(layer_types=[SLIDING, FULL])
OTHER_OF = {
    "gpt2": TIED | WHOLE,
    "llama": WHOLE,
    "gemma": TIED | WHOLE | dict(hidden_act="silu"),
    "gemma2": TIED | dict(layer_types=[SLIDING, SLIDING]),
    "gemma3_text": TIED | dict(rope_parameters={FULL: {"rope_theta": 50.0}}),
    "gpt_neox": WHOLE | dict(attention_bias=False, num_attention_heads=1),
    "olmo2": WHOLE,
}
# With what a key is looked at, where it is not otherwise.
BESIDE = dict(original_max_position_embeddings=dict(rope_scaling=LLAMA3))


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_read_is_honoured_or_refused(kind):
    family, others = FAMILIES[kind], OTHER | OTHER_OF.get(kind, {})
    for key in [key for rule in family.config_rules for key in rule.keys]:
        model = MODELS[kind] | BESIDE.get(key, {})
        try:
            assert family.read(model | {key: others[key]}) != family.read(model), key
        except UserError as e:
            assert key in str(e), (key, e)
        assert key not in IGNORED


def test_what_transformers_writes_is_known():
    """tests/golden has the config.json of models of each family, as version 5 has saved them."""
    with np.load(REPOSITORY / "tests" / "golden" / "families.npz", allow_pickle=False) as file:
        saved = [json.loads(str(file[name])) for name in file if name.endswith("/config")]
    assert {hf["model_type"] for hf in saved} == set(FAMILIES)
    for hf in saved:
        assert FAMILIES[hf["model_type"]].unknown_keys(hf) == []
    hf = FAMILIES["gemma2"].write(FAMILIES["gemma2"].read(MODELS["gemma2"] | dict(query_pre_attn_scalar=9)))
    assert type(hf["query_pre_attn_scalar"]) is int  # transformers wants no float
    assert FAMILIES["llama"].unknown_keys(
        BODY | {"_model_name_or_path": "x", "new": 1, "off": False, "none": None, "use_cache": True}
    ) == ["new"]


THETA = {"rope_theta": 500.0}
OLD_LINEAR = {"type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("llama", dict(rope_parameters=OLD_LINEAR | THETA), dict(rope_theta=500.0, rope_factor=4.0)),
        # As an export has it, with the scaling of a longer context added in the older spelling.
        ("llama", dict(rope_parameters=dict(rope_type="default") | THETA, rope_scaling=OLD_LINEAR) | THETA,
         dict(rope_theta=500.0, rope_factor=4.0)),
        ("llama", dict(rope_scaling=LLAMA3, original_max_position_embeddings=16), dict(rope_original_context=16)),
        ("gemma3_text", dict(rope_parameters={FULL: LINEAR | THETA}),
         dict(rope_theta=500.0, rope_factor=4.0, rope_local_theta=10_000.0)),
        ("gpt_neox", dict(rope_parameters=dict(partial_rotary_factor=1.0) | THETA, rotary_emb_base=50.0),
         dict(rope_theta=500.0, rope_fraction=1.0)),
        # What cannot be computed, or is incomplete.
        ("llama", dict(rope_parameters=dict(rope_type="default") | THETA, rope_scaling={"type": "yarn"}), "rope_type='yarn'"),
        ("gemma3_text", dict(rope_parameters={SLIDING: LINEAR}), "rope_parameters scale"),
        # transformers reads none of it: it looks for the two kinds of layers.
        ("gemma3_text", dict(rope_parameters=LINEAR | THETA), FULL),
        # Windows.
        ("gemma3_text", dict(sliding_window=None, layer_types=[SLIDING, FULL]), "give the size of a window"),
        ("gemma2", dict(num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL]), "layer_types has no period"),
        # GELU is the exact one, but for the first Gemma.
        ("gemma", dict(hidden_act="gelu"), dict(activation="geglu_tanh")),
        ("gemma2", dict(hidden_act="gelu", hidden_activation="gelu"), dict(activation="geglu")),
    ],
)  # fmt: skip
def test_values_are_read_as_transformers_5_reads_them_or_refused(kind, said, expected):
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            FAMILIES[kind].read(MODELS[kind] | said)
    else:
        config = FAMILIES[kind].read(MODELS[kind] | said)
        assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_what_transformers_has_is_known():
    """A field that a new version adds is read here, refused, or put among those that are ignored."""
    from transformers import AutoConfig

    for kind, family in FAMILIES.items():
        assert family.unknown_keys(dict.fromkeys(AutoConfig.for_model(kind).to_dict(), 1)) == [], kind
