"""DeepSeek V2 and V3: latent attention and a mixture of experts in one model, and the weights of both families.

Question    Are two entries of the zoo together a family, with the logits that transformers computes from its weights?
Reference   arXiv:2405.04434, section 2.2.2 (V2: groups); arXiv:2412.19437, equations 12 to 16 (V3: sigmoid scores, and a
            bias for the choice alone); YaRN: arXiv:2309.00071, section 3.2.
Change      mla.py and moe.py, and what they lack: a token's experts are those of the `top_group` best of `n_group` groups,
            V3's scores, and YaRN's wavelengths. Left out: V3's rule that moves an expert's bias by its load, its
            prediction of a second token, FP8.
Command     python experiments/zoo/import_hf.py deepseek DIR RUN_DIR; jaxgpt study experiments/zoo/deepseek.py
Expected    Logits equal up to 1e-4, for random weights. At this size, a loss between those of mla.py and moe.py.
Result      They are (tests/zoo/test_import_hf.py with transformers 5.24.0, 2026-11-25).
Verdict     Imported without a change of the package. Not studied: its parts have pages of their own.
"""

import dataclasses
import functools
from typing import Any, Literal

import base
import jax
import jax.numpy as jnp
import mla
import moe
import numpy as np
import qwen3_moe
from flax import linen as nn
from import_hf import Rule, same
from yarn import Yarn, read_rope

import jaxgpt
from jaxgpt import UserError
from jaxgpt.config.validate import Count
from jaxgpt.hf.family import always, fields, never
from jaxgpt.layers.block import Compute
from jaxgpt.layers.position import Rope


class DeepSeekMoE(moe.MoE):
    """A mixture of experts with V2's scores or V3's, and groups of experts."""

    def setup(self) -> None:
        """Create V3's bias as well."""
        super().setup()
        if self.config.scores == "sigmoid":
            self.router_bias = self.param("router_bias", nn.initializers.zeros, (self.config.n_expert,))

    def route(self, x_UD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the scores of all experts as shares, and the weights and numbers of each token's: _UE, _UC and _UC."""
        c, logits_UE, is_v3 = self.config, self.router(x_UD.astype(jnp.float32)), self.config.scores == "sigmoid"
        scores_UE = jax.nn.sigmoid(logits_UE) if is_v3 else jax.nn.softmax(logits_UE)
        choice_UE = scores_UE + self.router_bias[None] if is_v3 else scores_UE
        if c.n_group > 1:  # a group is as good as its best expert, in V3 as its best two
            grouped = choice_UE.reshape(len(x_UD), c.n_group, -1)
            best = jax.lax.top_k(jax.lax.top_k(grouped, 1 + is_v3)[0].sum(axis=-1), c.top_group)[1]
            is_open = jax.nn.one_hot(best, c.n_group, dtype=bool).any(axis=1)
            choice_UE = jnp.where(is_open[..., None], grouped, -jnp.inf).reshape(choice_UE.shape)
        experts_UC = jax.lax.top_k(choice_UE, c.top_k)[1]
        weights_UC = jnp.take_along_axis(scores_UE, experts_UC, axis=1)
        weights_UC /= weights_UC.sum(axis=1, keepdims=True) + 1e-20 if c.normalise_top_k else 1.0
        return scores_UE / scores_UE.sum(axis=1, keepdims=True), weights_UC, experts_UC


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekConfig(mla.MLAConfig, moe.MoEConfig):
    """DeepSeek's architecture."""

    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the experts: V2's or V3's
    n_group: Count = 1  # groups of experts
    top_group: Count = 1  # groups from which a token's experts are
    yarn: bool = False  # rope by YaRN, with rope_factor, rope_original_context, rope_low_freq_factor and _high_

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        size, rest = divmod(self.n_expert, self.n_group)
        if rest or self.top_group > self.n_group or self.top_k > self.top_group * size:
            said = f"n_expert={self.n_expert}, n_group={self.n_group}, top_group={self.top_group}, top_k={self.top_k}"
            raise UserError(f"{said}: needs groups of one size, and enough experts in top_group of them")

    def make_rope(self, window: int | None) -> Rope | None:
        """Return the rotation."""
        return Yarn(*(super().make_rope(window) or ())) if self.yarn else super().make_rope(window)

    def make_mlp(self, layer: int, compute: Compute) -> nn.Module:
        """Return a mixture of experts; in the first n_dense layers an MLP."""
        return super().make_mlp(layer, compute) if layer < self.n_dense else DeepSeekMoE(self, compute)


CONFIG_RULES = (
    fields(vocab_size="vocab_size", block_size="max_position_embeddings", n_layer="num_hidden_layers"),
    fields(n_head="num_attention_heads", n_embd="hidden_size", mlp_dim="intermediate_size", kv_rank="kv_lora_rank"),
    fields(
        rope_dim="qk_rope_head_dim", head_dim="qk_nope_head_dim", value_dim="v_head_dim", top_k="num_experts_per_tok"
    ),
    fields(n_expert="n_routed_experts", expert_dim="moe_intermediate_size", expert_scale="routed_scaling_factor"),
    fields(tie_embeddings=("tie_word_embeddings", False), n_dense=("first_k_dense_replace", 0)),
    fields(q_rank=("q_lora_rank", None)),
    never(attention_bias=False, mlp_bias=False, hidden_act="silu", rms_norm_eps=1e-6),
    always(bias=False, norm="rmsnorm", norm_eps=1e-6, activation="swiglu", position="rope"),
)


def import_rules(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the architecture that a config.json describes, the table of its tensors, and the names of those not used."""
    is_v3, read = hf["model_type"] == "deepseek_v3", read_rope(hf)
    for rule in CONFIG_RULES:
        read |= rule.read(hf)
    read["shared_dim"] = (hf.get("n_shared_experts") or 0) * read["expert_dim"]
    read |= {"scores": "sigmoid" if is_v3 else "softmax", "normalise_top_k": is_v3 and hf["norm_topk_prob"]}
    has_groups = is_v3 or hf.get("topk_method") == "group_limited_greedy"
    read |= {"n_group": hf["n_group"], "top_group": hf["topk_group"]} if has_groups else {}
    R, is_interleaved = read["rope_dim"], not is_v3 or hf.get("rope_interleave", True)

    def rotated(x: np.ndarray, heads: int) -> np.ndarray:  # neighbours turn together: with us, halves do
        x_NXD = x.reshape(heads, -1, x.shape[-1])
        order = np.arange(R).reshape(-1, 2).T.ravel() if is_interleaved else np.arange(R)
        return np.concatenate([x_NXD[:, :-R], x_NXD[:, -R:][:, order]], axis=1).reshape(x.shape).T

    a, b, shared = "model.layers.{layer}.self_attn.", "h_{layer}/attn/", "model.layers.{layer}.mlp.shared_experts."
    queries = functools.partial(rotated, heads=read["n_head"])
    table = [
        Rule(f"{a}q_proj.weight", f"{b}q/kernel", queries),
        Rule(f"{a}q_a_proj.weight", f"{b}q_down/kernel"),
        Rule(f"{a}q_a_layernorm.weight", f"{b}q_norm/scale", same),
        Rule(f"{a}q_b_proj.weight", f"{b}q/kernel", queries),
        Rule(f"{a}kv_a_proj_with_mqa.weight", f"{b}kv_down/kernel", functools.partial(rotated, heads=1)),
        Rule(f"{a}kv_a_layernorm.weight", f"{b}kv_norm/scale", same),
        Rule(f"{a}kv_b_proj.weight", f"{b}kv_up"),
        Rule("model.layers.{layer}.mlp.gate.e_score_correction_bias", "h_{layer}/mlp/router_bias", same),
        Rule(f"{shared}gate_proj.weight", "h_{layer}/mlp/shared/c_gate/kernel"),
        Rule(f"{shared}up_proj.weight", "h_{layer}/mlp/shared/c_fc/kernel"),
        Rule(f"{shared}down_proj.weight", "h_{layer}/mlp/shared/c_proj/kernel"),
        *qwen3_moe.table,  # the other names are the same
    ]
    skip = rf"model\.layers\.{read['n_layer']}\..*"  # V3's prediction of a second token is a layer after the last
    return {"config": DeepSeekConfig(**read), "table": table, "skip": skip}


model = DeepSeekConfig(
    **dataclasses.asdict(mla.experiment.model), shared_dim=64, expert_dim=96, n_dense=1, grouped="blocks"
)
experiment = dataclasses.replace(base.experiment, name="zoo-deepseek", model=model)

variants = {"baseline": base.experiment, "deepseek": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
