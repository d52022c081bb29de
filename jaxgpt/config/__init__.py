"""Every option of jaxgpt: frozen dataclasses, validated at construction, to and from JSON.

One default, one place: nothing else in the package has a fallback for a field. The comment of a field is its help text
on the command line. All but `GPTConfig` is imported on first use, since layers need nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from jaxgpt.config.model import GPTConfig as GPTConfig

if TYPE_CHECKING:
    from jaxgpt.config.experiment import MAX_NEW_TOKENS as MAX_NEW_TOKENS
    from jaxgpt.config.experiment import DataConfig as DataConfig
    from jaxgpt.config.experiment import Experiment as Experiment
    from jaxgpt.config.experiment import LoraConfig as LoraConfig
    from jaxgpt.config.experiment import ObjectiveConfig as ObjectiveConfig
    from jaxgpt.config.experiment import OptimConfig as OptimConfig
    from jaxgpt.config.experiment import ParallelConfig as ParallelConfig
    from jaxgpt.config.experiment import TrainConfig as TrainConfig
    from jaxgpt.config.serialize import differences as differences
    from jaxgpt.config.serialize import from_dict as from_dict
    from jaxgpt.config.serialize import to_dict as to_dict

Precision = Literal["float32", "bfloat16", "int8"]  #: dtype of weights, and of keys and values, for sampling


def __getattr__(name: str) -> Any:
    home = "serialize" if name in ("differences", "from_dict", "to_dict") else "experiment"
    return getattr(import_module(f"jaxgpt.config.{home}"), name)
