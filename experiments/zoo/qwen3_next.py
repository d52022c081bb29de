"""Qwen3-Next from pages of the zoo, with the weights of transformers: a new family without a change of the package.

Question    Are gated DeltaNet and the mixture of experts, put together, the model that others have trained?
Reference   Qwen3-Next, https://qwen.ai/blog?id=qwen3_next, September 2025; its code in transformers, models/qwen3_next.
Change      Three layers of four are `gated_deltanet.py`, each fourth attends, all MLPs are `moe.py`. New here: attention's
            output is multiplied by sigmoid(W x) before its projection. The table below names where each tensor goes;
            transformers packs q, k, v and gate, and b and a, key head by key head. Left out: its block for multi-token
            prediction, MLPs without experts in some layers, scaled rotations.
Command     python experiments/zoo/qwen3_next.py MODEL RUN_DIR imports a model. Without, it trains a small one, with many more parameters than the baseline.
Expected    Logits equal to transformers' to 1e-4 in float32.
Result      They are (tests/zoo/test_qwen3_next.py with transformers 5.24.0, 2026-11-25).
Verdict     Imported without a change of the package. Not studied: its parts have pages of their own.
"""

import dataclasses
import json
import sys

import base
import gated_deltanet
import import_hf
import jax
import moe
import numpy as np
from flax import linen as nn
from import_hf import Rule, same

import jaxgpt
from jaxgpt.hf.source import find_directory
from jaxgpt.layers import Attention
from jaxgpt.layers.block import Compute
from jaxgpt.layers.linear import Dense


class GatedAttention(Attention):
    """Attention whose output is gated, element by element, before its projection."""

    def setup(self) -> None:
        super().setup()
        self.gate = Dense(self.n_head * self.size, self.qkv_bias, kernel_init=self.kernel_init, dtype=self.dtype)

    def __call__(self, x_BTD, positions_BT=None, *, segments_BT=None, train: bool = False):
        """Attend, gate, and project the merged heads."""
        q_BTNH, k_BTKH, v_BTKH = self.project(x_BTD, positions_BT)
        documents = {"positions_BT": positions_BT, "segments_BT": segments_BT}
        out_BTNH = self.attend(q_BTNH, k_BTKH, v_BTKH, **documents, train=train)
        return self.merge_heads(out_BTNH * jax.nn.sigmoid(self.gate(x_BTD)).reshape(out_BTNH.shape), train)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(gated_deltanet.GatedDeltaNetConfig, moe.MoEConfig):
    """A GPT of recurrent layers, gated attention in every n-th, and experts."""

    def make_attention(self, layer: int, compute: Compute) -> nn.Module:
        attention = super().make_attention(layer, compute)
        if not isinstance(attention, Attention):
            return attention
        names = {field.name for field in dataclasses.fields(attention)} - {"parent", "name"}
        return GatedAttention(**{name: getattr(attention, name) for name in names})


def read_config(directory) -> Qwen3NextConfig:
    """Return the architecture that a config.json of transformers describes. Raises `UserError` if it is another."""
    theirs = json.loads((directory / "config.json").read_text())
    if missing := [name for name in NAMES.values() if name not in theirs]:
        raise jaxgpt.UserError(f"{directory}: config.json has no {', '.join(missing)}: this page knows Qwen3-Next only")
    n_layer, rope = theirs["num_hidden_layers"], theirs.get("rope_parameters") or theirs
    every = [*theirs.get("layer_types", ["linear_attention"] * 3), "full_attention"].index("full_attention") + 1
    kinds = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(n_layer)]
    needed = {"model_type": "qwen3_next", "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1}
    needed |= {"mlp_only_layers": [], "layer_types": kinds}
    for name, value in needed.items():
        if theirs.get(name, value) != value:
            raise jaxgpt.UserError(f"{directory}: {name}={theirs[name]!r}, and this page knows {value!r} only")
    if rope.get("rope_type", "default") != "default" or theirs.get("rope_scaling"):
        raise jaxgpt.UserError(f"{directory}: scaled rotations, {rope}, and this page knows plain ones only")
    rope_fraction = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 0.25))
    return Qwen3NextConfig(
        **{ours: theirs[name] for ours, name in NAMES.items()},
        **dict(attend_every=every, rope_theta=rope.get("rope_theta", 10_000.0), rope_fraction=rope_fraction),
        **dict(bias=False, norm="rmsnorm", norm_offset=True, activation="swiglu", position="rope", qk_norm=True),
        **dict(tie_embeddings=theirs.get("tie_word_embeddings", False), shared_gate=True, chunk=64),
    )


NAMES = {
    **dict(vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers"),
    **dict(n_head="num_attention_heads", n_kv_head="num_key_value_heads", n_embd="hidden_size", head_dim="head_dim"),
    **dict(n_key_head="linear_num_key_heads", n_value_head="linear_num_value_heads", norm_eps="rms_norm_eps"),
    **dict(key_size="linear_key_head_dim", value_size="linear_value_head_dim", conv_size="linear_conv_kernel_dim"),
    **dict(n_expert="num_experts", top_k="num_experts_per_tok", normalise_top_k="norm_topk_prob"),
    **dict(expert_dim="moe_intermediate_size", shared_dim="shared_expert_intermediate_size"),
}


def make_table(c: Qwen3NextConfig) -> list[Rule]:
    """Return where each tensor goes."""

    def unpack(heads: int, *sizes: int):  # [heads (sizes), D] -> one matrix [D, heads size] for each size
        def convert(x):
            parts = np.split(x.reshape(heads, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
            return [part.reshape(-1, x.shape[1]).T for part in parts]

        return convert

    group = c.n_value_head // c.n_key_head
    qkvz = unpack(c.n_key_head, c.key_size, c.key_size, group * c.value_size, group * c.value_size)
    ba = unpack(c.n_key_head, group, group)
    table = [
        ("input_layernorm.weight", "ln_1/scale", same),
        ("post_attention_layernorm.weight", "ln_2/scale", same),
        ("self_attn.q_proj.weight", ("attn/q/kernel", "attn/gate/kernel"), unpack(c.n_head, c.head_dim, c.head_dim)),
        *((f"self_attn.{name}_proj.weight", f"attn/{name}/kernel", np.transpose) for name in "kv"),
        *((f"self_attn.{name}_norm.weight", f"attn/{name}_norm/scale", same) for name in "qk"),
        ("self_attn.o_proj.weight", "attn/c_proj/kernel", np.transpose),
        ("linear_attn.in_proj_qkvz.weight", tuple(f"attn/{part}/kernel" for part in "q k v gate".split()), qkvz),
        ("linear_attn.in_proj_ba.weight", ("attn/beta/kernel", "attn/decay/kernel"), ba),
        ("linear_attn.conv1d.weight", "attn/conv", lambda x: x[:, 0].T),
        ("linear_attn.dt_bias", "attn/decay_bias", same),
        ("linear_attn.A_log", "attn/log_rate", same),
        ("linear_attn.norm.weight", "attn/norm/scale", same),
        ("linear_attn.out_proj.weight", "attn/c_proj/kernel", np.transpose),
        ("mlp.gate.weight", "mlp/router/kernel", np.transpose),
        ("mlp.shared_expert_gate.weight", "mlp/shared_gate/kernel", np.transpose),
    ]
    for theirs, ours in (("gate", "c_gate"), ("up", "c_fc"), ("down", "c_proj")):
        table.append((f"mlp.shared_expert.{theirs}_proj.weight", f"mlp/shared/{ours}/kernel", np.transpose))
        table.append((f"mlp.experts.{{expert}}.{theirs}_proj.weight", f"mlp/{ours}", np.transpose))
    rules = [Rule("model.embed_tokens.weight", "wte/embedding", same), Rule("model.norm.weight", "ln_f/scale", same)]
    rules.append(Rule("lm_head.weight", "lm_head/kernel"))
    for theirs, ours, convert in table:
        ours = f"h_{{layer}}/{ours}" if isinstance(ours, str) else tuple(f"h_{{layer}}/{path}" for path in ours)
        rules.append(Rule(f"model.layers.{{layer}}.{theirs}", ours, convert))
    return rules


def read_model(name: str) -> tuple[Qwen3NextConfig, dict]:
    """Return the architecture and the parameters of a model of transformers."""
    config = read_config(find_directory(name))
    return config, import_hf.read_params(name, config, make_table(config), skip=r"mtp\..*")


model = Qwen3NextConfig(**dataclasses.asdict(base.experiment.model) | dict(activation="swiglu", norm_offset=True))
model = dataclasses.replace(model, attend_every=4, expert_dim=88, shared_dim=88, shared_gate=True, grouped="blocks")
experiment = dataclasses.replace(base.experiment, name="zoo-qwen3-next", model=model)
variants = {"baseline": base.experiment, "Qwen3-Next": experiment}

if __name__ == "__main__" and len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
    config, params = read_model(sys.argv[1])
    import_hf.write_run(sys.argv[1], sys.argv[2], params, config)
elif __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
