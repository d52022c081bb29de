"""The strategy that a configuration asks for, on the devices that are there."""

from collections.abc import Sequence

import jax
import optax

from jaxgpt.config import NO_LORA, LoraConfig, ParallelConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.parallel.mesh import mesh
from jaxgpt.parallel.pmap import pmap
from jaxgpt.parallel.single import single
from jaxgpt.parallel.strategy import Strategy


def choose_strategy(
    config: ParallelConfig,
    model: GPT,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,
    *,
    lora: LoraConfig = NO_LORA,
) -> Strategy:
    """devices: None: all there are; a topology's, to compile for them. Raises `UserError` where they do not fit."""
    name = config.strategy
    if name == "auto":
        name = "single" if (jax.device_count() if devices is None else len(devices)) == 1 else "pmap"
    if name != "mesh" and (config.data, config.fsdp, config.tensor) != (-1, 1, 1):
        raise UserError(
            f"parallel.data={config.data}, fsdp={config.fsdp}, tensor={config.tensor} need --parallel.strategy mesh, not {config.strategy}"
        )
    if name == "single":
        if devices is None and jax.process_count() > 1:
            raise UserError(f"parallel.strategy=single with {jax.process_count()} processes: take pmap or mesh")
        return single(model, optimizer, devices, lora=lora)
    if name == "pmap":
        return pmap(model, optimizer, devices, lora=lora)
    return mesh(model, optimizer, devices, config=config, lora=lora)
