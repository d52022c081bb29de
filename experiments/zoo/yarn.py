"""YaRN: rotations for contexts longer than those of pre-training.

Peng et al. 2023, arXiv:2309.00071, section 3.2. As in DeepSeek's models, the scores of attention are scaled as well.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxgpt import UserError
from jaxgpt.layers.position import Rope


class Yarn(Rope):
    """Rotations that are as they were if they turn often in the original context, and slower by `factor` if they do not."""

    def frequencies(self) -> jax.Array:
        """Return radians per token of each pair: between high_freq_factor and low_freq_factor turns, a mixture of both."""

        def find(turns: float) -> float:  # the pair, not a whole number, that makes so many turns
            return self.size * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        pair = jnp.arange(self.size // 2, dtype=jnp.float32)
        first, last = max(math.floor(find(self.high_freq_factor)), 0), math.ceil(find(self.low_freq_factor))
        slow = jnp.clip((pair - first) / max(min(last, self.size - 1) - first, 0.001), 0.0, 1.0)
        return self.theta ** (-2.0 * pair / self.size) * (slow / self.factor + 1.0 - slow)


def read_rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration with `yarn` and `score_scale` that a config.json describes."""
    turns = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind, mscale = turns.get("rope_type", turns.get("type", "default")), turns.get("mscale_all_dim")
    theta = {"rope_theta": float(turns.get("rope_theta", hf.get("rope_theta", 10_000.0)))}
    if kind == "default":
        return theta
    if kind != "yarn" or not mscale or mscale != turns.get("mscale"):
        raise UserError(f"{turns}: needs the default rope, or YaRN's with mscale equal to mscale_all_dim")
    return theta | {
        "yarn": True,
        "rope_factor": float(turns["factor"]),
        "rope_original_context": turns["original_max_position_embeddings"],
        "rope_low_freq_factor": float(turns.get("beta_slow") or 1),
        "rope_high_freq_factor": float(turns.get("beta_fast") or 32),
        "score_scale": (0.1 * mscale * math.log(turns["factor"]) + 1.0) ** 2,
    }
