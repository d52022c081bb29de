"""A mixture of experts: each token passes through the few of many small MLPs that a router chooses for it.

Question    With the compute per token of one MLP, do eight experts of half its width, two for each token, learn more from
            the same tokens? And how much of that is left after the same time?
Reference   arXiv:1701.06538 (top-k gates); Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6 (balance loss); OLMoE,
            arXiv:2409.02060 (no token is dropped); DeepSeekMoE, arXiv:2401.06066 (shared expert).
Change      The MLP becomes a router in float32 and `n_expert` MLPs without biases, of which each token has `top_k`, whose
            probabilities weigh their outputs. A grouped product multiplies the rows of each expert by its matrix:
            `jax.lax.ragged_dot`, or blocks of rows of one expert, since on CPU ragged_dot multiplies every row by every
            expert. The MLPs have 4 times the baseline's parameters. Left out: noise, experts on several devices.
Command     jaxgpt study experiments/zoo/moe.py
Expected    0.01 to 0.03 better at equal tokens, and worse at equal seconds.
Result      At equal tokens moe -0.0335 ± 0.0088; no balance -0.0156 ± 0.0043, against 1.8287 (0.0053). At 15.6 s moe
            +0.1086 ± 0.0302; no balance +0.1203 ± 0.0367, against 1.8772 (0.0582). Eight seeds, one core of an AMD EPYC
            (family 25, AVX-512), 2026-11-25.
Verdict     Better at equal tokens, worse by the clock, as expected and as at d18. Without the balance loss less is
            gained.
"""

import dataclasses
from typing import Literal

import base
import jax
import jax.numpy as jnp
from flax import linen as nn

import jaxgpt
from jaxgpt import GPTConfig, UserError
from jaxgpt.config.validate import Count, NonNegativeFloat, NonNegativeInt, Size
from jaxgpt.layers.block import Compute
from jaxgpt.layers.linear import Dense
from jaxgpt.layers.mlp import ACTIVATIONS


def balance_loss(scores_UE: jax.Array, share_E: jax.Array) -> jax.Array:
    """Return E sum_e share_e mean_u(score_ue): 1 when all experts are used alike, E when one is used for all."""
    return scores_UE.shape[1] * jnp.sum(share_E * scores_UE.mean(axis=0))


def place(experts_R: jax.Array, E: int, block: int) -> tuple[jax.Array, jax.Array]:
    """Return a place for each row, with rows of one expert adjacent, and the groups' sizes, multiples of `block`."""
    # Instead of sorting, count the earlier rows of the same expert.
    chosen_RE = jax.nn.one_hot(experts_R, E, dtype=jnp.int32)
    earlier_R = jnp.sum((jnp.cumsum(chosen_RE, axis=0) - 1) * chosen_RE, axis=1)
    sizes_E = -(-chosen_RE.sum(axis=0) // block) * block
    return (jnp.cumsum(sizes_E) - sizes_E)[experts_R] + earlier_R, sizes_E


def run_experts(
    x_UD: jax.Array, weights_UC: jax.Array, experts_UC: jax.Array, kernels: dict[str, jax.Array], act: str, grouped: str
) -> jax.Array:
    """Return the weighted sum over each token's experts, x_UD. Rows R are tokens times choices; M has padding as well."""
    (U, D), C, E = x_UD.shape, experts_UC.shape[1], len(kernels["c_fc"])
    R = U * C
    block = min(32, max(1, R // E)) if grouped == "blocks" else 1
    M = R if block == 1 else (R // block + E) * block
    place_R, sizes_E = place(experts_UC.reshape(-1), E, block)
    x_MD = jnp.zeros((M, D), x_UD.dtype).at[place_R].set(jnp.repeat(x_UD, C, axis=0))
    expert = jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(0, M, block), side="right").clip(0, E - 1)  # of blocks

    def multiply(x: jax.Array, name: str) -> jax.Array:
        kernels_EDF = kernels[name].astype(x.dtype)
        if grouped == "ragged_dot":
            return jax.lax.ragged_dot(x, kernels_EDF, sizes_E)
        return jnp.einsum("bMD,bDF->bMF", x.reshape(M // block, block, -1), kernels_EDF[expert]).reshape(M, -1)

    h_MF = multiply(x_MD, "c_fc")
    h_MF = ACTIVATIONS[act](multiply(x_MD, "c_gate")) * h_MF if "c_gate" in kernels else ACTIVATIONS[act](h_MF)
    return jnp.einsum("UCD,UC->UD", multiply(h_MF, "c_proj")[place_R].reshape(U, C, D), weights_UC.astype(x_UD.dtype))


class MoE(nn.Module):
    """A router, its experts and, with `shared_dim`, an MLP for all tokens: x_BTD -> x_BTD."""

    config: "MoEConfig"
    compute: Compute

    def setup(self) -> None:
        """Create them."""
        c = self.config
        E, D, F, init = c.n_expert, c.n_embd, c.expert_dim or c.explicit().mlp_dim // c.top_k, c.make_kernel_init()
        self.router, self.drop = Dense(E, use_bias=False, kernel_init=init), nn.Dropout(c.dropout)
        kernels = {name: self.param(name, init, (E, D, F)) for name in ("c_fc", "c_gate")[: 1 + c.gated]}
        self.kernels = kernels | {"c_proj": self.param("c_proj", c.make_residual_init(), (E, F, D))}
        if c.shared_dim:
            self.shared = GPTConfig.make_mlp(dataclasses.replace(c, mlp_dim=c.shared_dim), 0, self.compute)
            self.shared_gate = Dense(1, use_bias=False) if c.shared_gate else None

    def route(self, x_UD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the probabilities of all experts, and the weights and numbers of each token's: _UE, _UC and _UC."""
        scores_UE = jax.nn.softmax(self.router(x_UD.astype(jnp.float32)))
        weights_UC, experts_UC = jax.lax.top_k(scores_UE, self.config.top_k)
        total_U1 = weights_UC.sum(axis=-1, keepdims=True) if self.config.normalise_top_k else 1.0
        return scores_UE, weights_UC / total_U1, experts_UC

    def __call__(self, x_BTD: jax.Array, *, train: bool = False) -> jax.Array:
        """Return the experts' outputs. Sow the balance loss, and each expert's share of the choices."""
        c, x_UD = self.config, x_BTD.reshape(-1, x_BTD.shape[-1])
        scores_UE, weights_UC, experts_UC = self.route(x_UD)
        share_E = jax.nn.one_hot(experts_UC, c.n_expert).mean(axis=(0, 1))
        self.sow("losses", "balance", c.balance * balance_loss(scores_UE, share_E))
        for e in range(c.n_expert):
            self.sow("metrics", f"expert_{e}", share_E[e])
        choices = (c.expert_scale * weights_UC, experts_UC)
        out_UD = run_experts(x_UD.astype(self.compute.dtype), *choices, self.kernels, c.activation, c.grouped)
        out_BTD = self.drop(out_UD.reshape(x_BTD.shape), deterministic=not train)
        if c.shared_dim:
            gate_BT1 = 1.0 if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(x_BTD))
            out_BTD = out_BTD + gate_BT1 * self.shared(x_BTD, train=train)
        return out_BTD


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """A GPT whose MLPs are mixtures of experts. mlp_dim is the hidden width that each token uses."""

    has_cache = True
    n_expert: Count = 8  # experts per layer
    top_k: Count = 2  # experts for each token
    expert_dim: Size | None = None  # hidden width of an expert; None: mlp_dim / top_k
    normalise_top_k: bool = True  # weights of a token's experts sum to 1
    expert_scale: NonNegativeFloat = 1.0  # factor of the experts' weighted sum
    shared_dim: NonNegativeInt = 0  # hidden width of an MLP for all tokens; 0: none
    shared_gate: bool = False  # multiply its output by a sigmoid of the token
    n_dense: NonNegativeInt = 0  # first layers, whose MLPs stay as they are
    balance: NonNegativeFloat = 0.01  # factor of the balance loss, in nats for each layer
    grouped: Literal["ragged_dot", "blocks"] = "ragged_dot"  # the grouped products; blocks are faster on CPU

    def __post_init__(self) -> None:
        """Check the fields."""
        super().__post_init__()
        if self.top_k > self.n_expert:
            raise UserError(f"top_k={self.top_k} exceeds n_expert={self.n_expert}: a token cannot use an expert twice")
        if self.scan_layers and self.n_dense:
            raise UserError(f"scan_layers=True, n_dense={self.n_dense}: scanned layers are alike; take n_dense=0")

    def make_mlp(self, layer: int, compute: Compute) -> nn.Module:
        """Return a mixture of experts; in the first n_dense layers an MLP."""
        return super().make_mlp(layer, compute) if layer < self.n_dense else MoE(self, compute)


experiment = dataclasses.replace(
    base.experiment, name="zoo-moe", model=MoEConfig(**dataclasses.asdict(base.experiment.model), grouped="blocks")
)

no_balance = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, balance=0.0))
variants = {"baseline": base.experiment, "moe": experiment, "no balance": no_balance}

if __name__ == "__main__":
    jaxgpt.run_experiment(experiment)
