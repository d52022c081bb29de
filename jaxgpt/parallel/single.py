"""One device: jit, with the state's memory handed from step to step."""

from collections.abc import Sequence

import jax
import optax
from jax.sharding import SingleDeviceSharding

from jaxgpt.config import NO_LORA, LoraConfig
from jaxgpt.model import GPT
from jaxgpt.parallel.strategy import Strategy, abstract_batch, initial, placed


def single(
    model: GPT,
    optimizer: optax.GradientTransformation,
    devices: Sequence[jax.Device] | None = None,
    *,
    lora: LoraConfig = NO_LORA,
) -> Strategy:
    """On the first device."""
    device = (devices or jax.local_devices())[0]
    place = SingleDeviceSharding(device)
    init, shapes = initial(model, optimizer, lora)
    return Strategy(
        name="one device",
        devices=(device,),
        shards=1,
        init=jax.jit(init, out_shardings=place),
        state=placed(shapes, place),
        step=lambda step: jax.jit(step, donate_argnums=0),
        evaluate=jax.jit,
        batch=lambda B, T: abstract_batch((B, T), place),
    )
