"""Low-rank adapters."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxgpt.config.validate import PositiveFloat, Size, check_fields
from jaxgpt.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters (arXiv:2106.09685). With a rank, only they are trained, on the weights of train.init_from."""

    rank: Size | None = None  # rank of the adapters; None: no adapters, all parameters are trained
    alpha: PositiveFloat = 16.0  # an adapter's output is multiplied by alpha / rank
    # matrices of a block with an adapter: q, k, v, c_fc, c_gate, c_proj (of attention and of the MLP)
    targets: tuple[str, ...] = ("q", "v")
    # how the frozen matrices of the blocks are kept in training; int8: a quarter of float32's memory, rounded once, and
    # the adapters learn on the rounded ones, which `sample` and `export` use as well (arXiv:2305.14314 has 4 bits)
    frozen: Literal["float32", "int8"] = "float32"

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        if not self.targets:
            raise UserError("lora.targets is empty: name matrices that shall have adapters, such as q v")
