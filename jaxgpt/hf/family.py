"""A family of models: its two tables, and how they are read in either direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxgpt.config import GPTConfig
from jaxgpt.hf.config_rules import Aspect
from jaxgpt.hf.weight_rules import Row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    model_type: str  # transformers' name for it, in config.json
    architecture: str  # transformers' class
    base: str  # prefix of all tensors but the output matrix, which checkpoints of the bare body leave out
    aspects: tuple[Aspect, ...]
    rows: tuple[Row, ...]
    masks: tuple[str, ...] = ()  # ends of names of tensors that hold no weights: older checkpoints have them

    def read(self, hf: dict[str, Any]) -> GPTConfig:
        """The architecture that a config.json describes. Raises `UserError` for what our layers cannot be."""
        said: dict[str, Any] = {}
        for aspect in self.aspects:
            said |= aspect.read(hf)
        if said.get("sliding_window") is None:  # rotations of layers that there are not
            said.pop("rope_local_theta", None)
        return GPTConfig(**said)

    def write(self, config: GPTConfig) -> dict[str, Any]:
        """The config.json of an architecture, without what concerns the tokenizer."""
        said: dict[str, Any] = {"model_type": self.model_type, "architectures": [self.architecture]}
        for aspect in self.aspects:
            said |= aspect.write(config.explicit())
        return said

    def tensors(self, config: GPTConfig, shapes: dict[str, tuple[int, ...]]) -> Iterator[Row]:
        """The rows for this model's parameters, each with its layer. shapes: of our parameters, by path."""
        for row in self.rows:
            for layer in range(config.n_layer) if "{}" in row.theirs else (0,):
                ours = tuple(path.format(layer) for path in row.ours)
                if ours[0] in shapes:
                    yield Row(ours, row.theirs.format(layer), row.layout)
