"""Logical names of parameters' axes. Which devices lie along them is for `parallel.sharding` to say.

embed    D, the width of the residual stream          vocab    V
heads    N H or K H, the heads side by side           mlp      F
layers   L, where `scan_layers` stacks the blocks
"""

from typing import Any

from flax import linen as nn


def named(init: nn.initializers.Initializer, *axes: str | None) -> Any:
    """The initialiser of a parameter with these axes. linen puts what it makes into a box, which `GPT.init` opens."""
    return nn.with_logical_partitioning(init, axes)
