"""Every option of jaxgpt: frozen dataclasses, validated where they are made, to and from JSON.

One default, one place: nothing else in the package has a fallback for a field. The comment behind a field is
its help text on the command line.
"""

from typing import Literal

from jaxgpt.config.experiment import (
    MAX_NEW_TOKENS,
    NO_LORA,
    DataConfig,
    Experiment,
    LoraConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from jaxgpt.config.model import GPTConfig
from jaxgpt.config.serialize import differences, from_dict, to_dict

Precision = Literal["float32", "bfloat16", "int8"]  # of weights and of keys and values when sampling

__all__ = [
    "MAX_NEW_TOKENS",
    "NO_LORA",
    "DataConfig",
    "Experiment",
    "GPTConfig",
    "LoraConfig",
    "OptimConfig",
    "ParallelConfig",
    "Precision",
    "TrainConfig",
    "differences",
    "from_dict",
    "to_dict",
]
