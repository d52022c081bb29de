"""What devices can do and what is chosen for them, with stand-ins for devices that are not here."""

import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxgpt.errors import UserError
from jaxgpt.experiment import TrainConfig
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.device import compute_options
from jaxgpt.parallel.jax_setup import first_device
from jaxgpt.parallel.limits import PEAKS, check_memory, memory_of


def device(platform, kind, capability=None):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


CPU, TPU, AMD = device("cpu", "cpu"), device("tpu", "TPU v5 lite"), device("gpu", "AMD Instinct MI300X", "gfx942")
NVIDIA, AMPERE, TURING = (device("gpu", f"NVIDIA {version}", version) for version in ("9.0", "8.0", "7.5"))
WIDE = {"n_embd": 256, "n_head": 1}


@pytest.mark.parametrize(
    ("device", "model", "train", "packed", "expected"),
    [
        (CPU, {}, {}, False, "float32, plain attention"),
        (TPU, {}, {}, True, "bfloat16, splash attention"),
        (TPU, {"dropout": 0.1}, {}, False, "splash attention (plain in training: it cannot drop weights)"),
        (TPU, {"block_size": 64}, {}, False, "(splash: 64 tokens are fewer than its smallest block, 128)"),
        (NVIDIA, WIDE, {}, False, "bfloat16, cudnn attention"),
        (NVIDIA, {}, {}, True, "(cudnn: it cannot separate the conversations that are packed into a row)"),
        (NVIDIA, {}, {"dtype": "float32"}, False, "plain attention (cudnn: it needs a 16-bit dtype, not float32)"),
        (AMPERE, WIDE, {}, False, "plain attention (cudnn: head size 256 is not a multiple of 8 up to 128)"),
        (TURING, {}, {}, False, "plain attention (cudnn: compute capability 7.5 is below 8.0)"),
        (AMD, {}, {}, False, "bfloat16, plain attention (cudnn: the device is AMD Instinct MI300X)"),
    ],
)
def test_what_is_chosen_and_why(device, model, train, packed, expected):
    options = compute_options(GPTConfig(**model), TrainConfig(**train), device, is_packed=packed)
    assert options.reason.endswith(expected)
    assert options.reason.startswith(f"{jnp.dtype(options.dtype)}, {options.attention} attention")


def test_a_kernel_that_is_named_is_taken_or_refused_or_gives_way():
    """Every record can be used on every device; what this one cannot do is replaced, and that is said."""
    with pytest.raises(UserError, match="train.attention=cudnn is not available here: it cannot separate"):
        compute_options(GPTConfig(), TrainConfig(attention="cudnn"), NVIDIA, is_packed=True)
    for device, attention in itertools.product((CPU, TPU, NVIDIA, AMD), ("auto", "plain", "cudnn", "splash")):
        train = TrainConfig(attention=attention)
        found = compute_options(GPTConfig(), train, device, required=False)
        if attention in ("cudnn", "splash") and device is not {"cudnn": NVIDIA, "splash": TPU}[attention]:
            auto = compute_options(GPTConfig(), TrainConfig(), device)
            assert (found.attention, found.dtype) == (auto.attention, auto.dtype)
            assert f"instead of {attention} (the device is {device.device_kind})" in found.reason
            with pytest.raises(UserError, match=f"train.attention={attention} is not available here"):
                compute_options(GPTConfig(), train, device)
        else:
            assert found == compute_options(GPTConfig(), train, device) and attention in ("auto", found.attention)


def test_a_platform_that_is_not_there_is_told(monkeypatch):
    """JAX_PLATFORMS=cuda without CUDA ends in a bare AssertionError of JAX's."""

    def devices():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(UserError, match=r"no device \(JAX_PLATFORMS='cuda'\): no .*\. Set JAX_PLATFORMS=cpu"):
        first_device()


@pytest.mark.parametrize(("spec", "held"), [(PartitionSpec(), 32), (PartitionSpec("devices"), 4)])
def test_a_state_is_counted_as_it_is_placed(monkeypatch, spec, held):
    """Of 32 bytes over 8 devices each holds all, or an eighth; with 10 of activations."""
    place = NamedSharding(AbstractMesh((8,), ("devices",)), spec)
    state, devices = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place), [object()] * 8
    monkeypatch.setattr("jaxgpt.parallel.limits.memory_of", lambda device: held + 10)
    check_memory(state, 10, devices)
    with pytest.raises(UserError, match="need at least 0.0 GiB on each of 8 devices, which have"):
        check_memory(state, 11, devices)


def test_xla_allocates_three_quarters_of_an_absent_gpu(monkeypatch):
    def memory_stats():
        raise jax.errors.JaxRuntimeError("MemoryStats is only supported for addressable PjRt devices")

    def memory(kind, platform="gpu"):
        return memory_of(types.SimpleNamespace(platform=platform, device_kind=kind, memory_stats=memory_stats))

    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    whole = PEAKS["NVIDIA H200"].memory
    assert memory("NVIDIA H200") == int(0.75 * whole) and memory("NVIDIA H20") is None
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert memory("NVIDIA H200") == int(0.9 * whole) and memory("TPU v5 lite", "tpu") == 16 * 2**30
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match="XLA_CLIENT_MEM_FRACTION"):
        memory("NVIDIA H200")
