"""The strategy that a configuration asks for, or a run can be resumed with, on the devices that are there."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

from jaxgpt.config import NO_LORA, Experiment, LoraConfig, ParallelConfig
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.parallel.mesh import mesh
from jaxgpt.parallel.pmap import pmap
from jaxgpt.parallel.single import single
from jaxgpt.parallel.strategy import Share, Strategy, share


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


def choose_layout(
    experiment: Experiment,
    model: GPT,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,
    *,
    recorded: Experiment | None = None,
) -> tuple[Strategy, Share, str | None]:
    """Return the strategy, the shares of a batch, and how they differ from the recorded ones, in words or None.

    recorded: see `make_trainer`. Raises `UserError` where they do not fit the devices.
    """
    parallel = experiment.parallel
    choices = [parallel]
    if recorded is not None and _layout(parallel) == _layout(recorded.parallel):
        choices += alternatives(parallel, jax.device_count() if devices is None else len(devices))
    errors: list[UserError] = []
    for choice in choices:
        try:
            strategy = choose_strategy(choice, model, optimizer, devices, lora=experiment.lora)
            shares = share(experiment.train.batch_size, strategy.shards, choice)
        except UserError as e:
            errors.append(e)
            continue
        instead = (
            f"{strategy.name} instead of the recorded strategy, which does not fit here: {errors[0]}"
            if errors
            else None
        )
        return strategy, shares, instead
    raise errors[0]


def _layout(config: ParallelConfig) -> tuple[str, int, int, int]:
    return config.strategy, config.data, config.fsdp, config.tensor


def alternatives(config: ParallelConfig, devices: int) -> list[ParallelConfig]:
    """Return what to try on other devices: sharded as before over those there are, then auto, then one device."""
    found = []
    if config.strategy == "mesh" and devices > 1:
        rest: dict[str, Any] = {"data": -1} if config.fsdp == 1 else {"data": 1, "fsdp": -1}
        found = [dataclasses.replace(config, **rest, tensor=tensor) for tensor in (max(config.tensor, 1), 1)]
    names = ("auto", "single")
    return found + [dataclasses.replace(config, strategy=name, data=-1, fsdp=1, tensor=1) for name in names]
