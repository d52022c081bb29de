"""jaxgpt: a GPT laboratory in JAX.

Names are loaded when first used, so that importing jaxgpt imports neither jax nor a backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxgpt.cli.train import run_experiment as run_experiment
    from jaxgpt.data.dataset import DataConfig as DataConfig
    from jaxgpt.errors import UserError as UserError
    from jaxgpt.experiment import Experiment as Experiment
    from jaxgpt.experiment import ParallelConfig as ParallelConfig
    from jaxgpt.experiment import TrainConfig as TrainConfig
    from jaxgpt.lora import LoraConfig as LoraConfig
    from jaxgpt.loss import ObjectiveConfig as ObjectiveConfig
    from jaxgpt.model import GPT as GPT
    from jaxgpt.model import GPTConfig as GPTConfig
    from jaxgpt.optim import OptimConfig as OptimConfig
    from jaxgpt.parallel.jax_setup import configure_jax as configure_jax
    from jaxgpt.run import Run as Run
    from jaxgpt.run import load as load
    from jaxgpt.sample import Decoding as Decoding
    from jaxgpt.sample import Sampling as Sampling
    from jaxgpt.sample.engine import Generated as Generated
    from jaxgpt.sample.engine import generate as generate
    from jaxgpt.sample.engine import stream as stream
    from jaxgpt.sample.quantize import for_decoding as for_decoding
    from jaxgpt.sample.score import Score as Score
    from jaxgpt.sample.score import score as score
    from jaxgpt.tools.xray.xray import xray as xray
    from jaxgpt.training import fit as fit

    __version__: str

_NAMES = {  # by the module that they come from
    "cli.train": "run_experiment",
    "data.dataset": "DataConfig",
    "errors": "UserError",
    "experiment": "Experiment ParallelConfig TrainConfig",
    "lora": "LoraConfig",
    "loss": "ObjectiveConfig",
    "model": "GPT GPTConfig",
    "optim": "OptimConfig",
    "parallel.jax_setup": "configure_jax",
    "run": "Run load",
    "sample": "Decoding Sampling",
    "sample.engine": "Generated generate stream",
    "sample.quantize": "for_decoding",
    "sample.score": "Score score",
    "tools.xray.xray": "xray",
    "training": "fit",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("jaxgpt")
    if name not in _HOME:
        raise AttributeError(f"module 'jaxgpt' has no attribute {name!r}")
    return getattr(import_module(f"jaxgpt.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
