"""Qwen3-MoE: the zoo's mixture of experts in a modern block, and the weights of that family.

Question    Can a family that jaxgpt does not know be imported from a page, without a change of the package?
Reference   Qwen team 2025, arXiv:2505.09388; config.json and names of tensors as transformers 5 writes them.
Change      Every part of its architecture but the experts is Qwen3's, which jaxgpt reads. So `import_rules` takes
            that reader, and adds the fields of `MoEConfig`. `table` has the names of all tensors.
Command     python experiments/zoo/import_hf.py qwen3_moe DIR RUN_DIR, then jaxgpt sample RUN_DIR;
            jaxgpt train experiments/zoo/qwen3_moe.py
Expected    Logits equal to those of transformers up to 1e-4, for random weights.
Result      They are (tests/zoo/test_import_hf.py with transformers 5.24.0, 2026-11-25).
Verdict     Imported without a change of the package. Not studied: its parts have pages of their own.
"""

import dataclasses
from typing import Any

import base
import moe
from import_hf import Rule, same

import jaxgpt
from jaxgpt import UserError
from jaxgpt.hf.families import QWEN3

LAYER, OURS = "model.layers.{layer}.", "h_{layer}/"

table = [
    Rule("model.embed_tokens.weight", "wte/embedding", same),
    Rule("model.norm.weight", "ln_f/scale", same),
    Rule("lm_head.weight", "lm_head/kernel"),
    Rule(f"{LAYER}input_layernorm.weight", f"{OURS}ln_1/scale", same),
    Rule(f"{LAYER}post_attention_layernorm.weight", f"{OURS}ln_2/scale", same),
    Rule(f"{LAYER}self_attn.q_norm.weight", f"{OURS}attn/q_norm/scale", same),
    Rule(f"{LAYER}self_attn.k_norm.weight", f"{OURS}attn/k_norm/scale", same),
    Rule(f"{LAYER}self_attn.q_proj.weight", f"{OURS}attn/q/kernel"),
    Rule(f"{LAYER}self_attn.k_proj.weight", f"{OURS}attn/k/kernel"),
    Rule(f"{LAYER}self_attn.v_proj.weight", f"{OURS}attn/v/kernel"),
    Rule(f"{LAYER}self_attn.o_proj.weight", f"{OURS}attn/c_proj/kernel"),
    # The first layers may have an ordinary MLP.
    Rule(f"{LAYER}mlp.gate_proj.weight", f"{OURS}mlp/c_gate/kernel"),
    Rule(f"{LAYER}mlp.up_proj.weight", f"{OURS}mlp/c_fc/kernel"),
    Rule(f"{LAYER}mlp.down_proj.weight", f"{OURS}mlp/c_proj/kernel"),
    Rule(f"{LAYER}mlp.gate.weight", f"{OURS}mlp/router/kernel"),
    Rule(f"{LAYER}mlp.experts.{{expert}}.gate_proj.weight", f"{OURS}mlp/c_gate"),
    Rule(f"{LAYER}mlp.experts.{{expert}}.up_proj.weight", f"{OURS}mlp/c_fc"),
    Rule(f"{LAYER}mlp.experts.{{expert}}.down_proj.weight", f"{OURS}mlp/c_proj"),
]


def import_rules(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the architecture that a config.json of model_type qwen3_moe describes, and the table of its tensors."""
    dense = hf.get("mlp_only_layers") or []
    if hf.get("decoder_sparse_step", 1) != 1 or sorted(dense) != list(range(len(dense))):
        raise UserError(f"mlp_only_layers={dense}: only the first layers may have no experts, and no others in turn")
    config = moe.MoEConfig(
        **dataclasses.asdict(QWEN3.read(hf)),
        n_expert=hf.get("num_experts") or hf["num_local_experts"],  # the second in transformers 5
        top_k=hf["num_experts_per_tok"],
        expert_dim=hf["moe_intermediate_size"],
        normalise_top_k=hf.get("norm_topk_prob", False),
        n_dense=len(dense),
        balance=hf.get("router_aux_loss_coef", 0.001),
    )
    return {"config": config, "table": table}


model = dataclasses.replace(moe.experiment.model, activation="swiglu", n_kv_head=2, balance=0.001)
experiment = dataclasses.replace(base.experiment, name="zoo-qwen3-moe", model=model)

variants = {"baseline": base.experiment, "Qwen3-MoE": experiment}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
