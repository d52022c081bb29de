"""Which loss a trainer takes."""

import dataclasses
import types

import jax
import pytest

from jaxgpt.config import Experiment, GPTConfig, ParallelConfig
from jaxgpt.errors import UserError
from jaxgpt.layers.hooks import NO_SHARDING
from jaxgpt.loss import chunked_next_token_loss, fused_next_token_loss
from jaxgpt.parallel.mesh import MeshStrategy
from jaxgpt.parallel.strategy import SingleDevice
from jaxgpt.parallel.trainer import choose_head_loss


def experiment(width=768, **parallel):
    model = GPTConfig(vocab_size=16, block_size=8, n_layer=1, n_head=1, n_embd=width, logit_softcap=30.0)
    return Experiment(name="loss", model=model, parallel=ParallelConfig(**{"loss_chunk": 4} | parallel))


def on(device_kind, platform="tpu", hooks=NO_SHARDING):
    device = types.SimpleNamespace(platform=platform, device_kind=device_kind)
    return types.SimpleNamespace(devices=(device,), sharding_hooks=hooks)


def test_without_chunks_all_logits_are_in_memory():
    assert choose_head_loss(experiment(loss_chunk=None), on("TPU v6 lite")) is None
    assert choose_head_loss(experiment(loss_chunk=8), on("TPU v6 lite")) is None  # all of the context


@pytest.mark.parametrize(
    ("device", "width", "kernel", "expected"),
    [
        ("TPU v6 lite", 768, "auto", fused_next_token_loss),
        ("TPU v6 lite", 768, "xla", chunked_next_token_loss),
        ("TPU v6 lite", 1600, "auto", chunked_next_token_loss),  # a wide model has more products to repeat
        ("TPU v5 lite", 768, "auto", chunked_next_token_loss),  # its memory is faster for its arithmetic
        ("TPU v5 lite", 768, "fused", fused_next_token_loss),
        ("TPU v99", 768, "auto", chunked_next_token_loss),
    ],
)
def test_the_kernel_is_taken_where_it_pays(device, width, kernel, expected):
    found = choose_head_loss(experiment(width, loss_kernel=kernel), on(device))
    assert getattr(found, "func", found) is expected
    assert getattr(found, "keywords", {}) == ({} if expected is fused_next_token_loss else {"chunk": 4})


def test_the_kernel_is_refused_where_it_cannot_run():
    fused = experiment(loss_kernel="fused")
    with pytest.raises(UserError, match="loss_kernel=fused is not available here: the device is cpu. Use auto or xla"):
        choose_head_loss(fused, SingleDevice(jax.devices()[:1]))
    mesh = dataclasses.replace(fused, parallel=dataclasses.replace(fused.parallel, strategy="mesh"))
    with pytest.raises(UserError, match="it runs on one device or by pmap, not on a mesh"):
        choose_head_loss(mesh, on("TPU v6 lite", hooks=MeshStrategy(jax.devices()[:1]).sharding_hooks))
