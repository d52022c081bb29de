"""What is chosen for a device: by stand-ins for those that are not here."""

import itertools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jaxgpt.config import GPTConfig, TrainConfig
from jaxgpt.errors import UserError
from jaxgpt.parallel.device import (
    PEAKS,
    check_memory,
    compute_options,
    first_device,
    memory_of,
)
from jaxgpt.parallel.jax_setup import enable_compilation_cache
from tests.conftest import keep_compiled


def chosen(monkeypatch, platform, capability=None, model=None, **train):
    device = types.SimpleNamespace(platform=platform, device_kind=f"a {platform}", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    options = compute_options(model or GPTConfig(), TrainConfig(**train))
    assert str(jnp.dtype(options.dtype)) in options.reason and options.attention in options.reason
    return str(jnp.dtype(options.dtype)), options.attention


def test_by_device(monkeypatch):
    assert chosen(monkeypatch, "cpu") == ("float32", "plain")
    assert chosen(monkeypatch, "tpu") == ("bfloat16", "splash")
    assert chosen(monkeypatch, "tpu", model=GPTConfig(block_size=64)) == ("bfloat16", "plain")
    assert chosen(monkeypatch, "gpu", "9.0") == ("bfloat16", "cudnn")
    assert chosen(monkeypatch, "gpu", "7.5") == ("bfloat16", "plain")


def test_by_shape_and_dtype(monkeypatch):
    wide = GPTConfig(n_embd=256, n_head=1)
    assert chosen(monkeypatch, "gpu", "9.0", wide) == ("bfloat16", "cudnn")
    assert chosen(monkeypatch, "gpu", "8.0", wide) == ("bfloat16", "plain")
    assert chosen(monkeypatch, "gpu", "9.0", GPTConfig(n_embd=12, n_head=1)) == ("bfloat16", "plain")
    assert chosen(monkeypatch, "gpu", "9.0", dtype="float32") == ("float32", "plain")


def test_kernels_without_dropout_say_so(monkeypatch):
    device = types.SimpleNamespace(platform="tpu", device_kind="a tpu")
    options = compute_options(GPTConfig(dropout=0.1), TrainConfig(), device)
    assert options.reason.endswith("splash attention (plain in training: it cannot drop weights)")
    options = compute_options(GPTConfig(block_size=64), TrainConfig(), device)
    assert options.reason.endswith("plain attention (splash: 64 tokens are fewer than its smallest block, 128)")


def test_packed_conversations_want_a_kernel_that_keeps_them_apart(monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="a gpu", compute_capability="9.0")
    options = compute_options(GPTConfig(), TrainConfig(), gpu, is_packed=True)
    assert options.reason.endswith(
        "plain attention (cudnn: it cannot separate the conversations that are packed into a row)"
    )
    with pytest.raises(UserError, match="train.attention=cudnn is not available here: it cannot separate"):
        compute_options(GPTConfig(), TrainConfig(attention="cudnn"), gpu, is_packed=True)
    tpu = types.SimpleNamespace(platform="tpu", device_kind="a tpu")
    assert compute_options(GPTConfig(), TrainConfig(), tpu, is_packed=True).attention == "splash"


def test_what_is_named_is_taken_or_refused(monkeypatch):
    assert chosen(monkeypatch, "cpu", dtype="bfloat16", attention="xla") == ("bfloat16", "xla")
    with pytest.raises(UserError, match="train.attention=cudnn is not available here: the device is a cpu"):
        chosen(monkeypatch, "cpu", attention="cudnn")


CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
NVIDIA = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
AMD = types.SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942")


def test_a_kernel_that_was_named_for_another_device_gives_way():
    """Every record can be used on every device; what this one cannot do is replaced, and that is said."""
    kernels, dtypes = ("auto", "plain", "xla", "cudnn", "splash"), ("auto", "float32", "bfloat16")
    for device, attention, dtype in itertools.product((CPU, TPU, NVIDIA, AMD), kernels, dtypes):
        train = TrainConfig(attention=attention, dtype=dtype)
        found = compute_options(GPTConfig(), train, device, required=False)
        if attention in ("cudnn", "splash") and device is not {"cudnn": NVIDIA, "splash": TPU}[attention]:
            auto = compute_options(GPTConfig(), TrainConfig(dtype=dtype), device)
            assert (found.attention, found.dtype) == (auto.attention, auto.dtype)
            assert (
                f"{auto.attention} attention instead of {attention} (the device is {device.device_kind})"
                in found.reason
            )
            with pytest.raises(UserError, match=f"train.attention={attention} is not available here"):
                compute_options(GPTConfig(), train, device)
        elif (attention, dtype) == ("cudnn", "float32"):  # of a run that goes on in float32
            assert found.reason.endswith("plain attention instead of cudnn (it needs a 16-bit dtype, not float32)")
        else:
            assert found == compute_options(GPTConfig(), train, device) and attention in ("auto", found.attention)


def test_a_device_of_amd_is_not_one_of_nvidia():
    options = compute_options(GPTConfig(), TrainConfig(), AMD)
    assert options.reason == "bfloat16, plain attention (cudnn: the device is AMD Instinct MI300X)"


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no driver\nat all")], ids=["assertion", "runtime"])
def test_a_platform_that_is_not_there_is_told(monkeypatch, error):
    """JAX_PLATFORMS=cuda without CUDA ends in a bare AssertionError of JAX's."""

    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(
        UserError, match=r"no device \(JAX_PLATFORMS='cuda'\): no .*\. Set JAX_PLATFORMS=cpu to compute on the CPU"
    ):
        first_device()


def test_compiled_programs_are_the_users_alone(monkeypatch, tmp_path, private_cache):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("JAXGPT_CACHE", str(tmp_path))
    try:
        enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "xla")
        assert (tmp_path / "xla").stat().st_mode & 0o777 == 0o700
    finally:
        keep_compiled(private_cache)


@pytest.mark.parametrize(("spec", "held"), [(PartitionSpec(), 32), (PartitionSpec("devices"), 4)])
def test_a_state_is_counted_as_it_is_placed(monkeypatch, spec, held):
    """Of 32 bytes over 8 devices each holds all, or an eighth; with 10 of activations."""
    place = NamedSharding(AbstractMesh((8,), ("devices",)), spec)
    state, devices = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=place), [object()] * 8
    monkeypatch.setattr("jaxgpt.parallel.device.memory_of", lambda device: held + 10)
    check_memory(state, 10, devices)
    with pytest.raises(UserError, match="need at least 0.0 GiB on each of 8 devices, which have"):
        check_memory(state, 11, devices)


class Absent:
    """A device of a topology, which is not attached."""

    def __init__(self, kind: str, platform: str):
        self.device_kind, self.platform = kind, platform

    def memory_stats(self):
        raise jax.errors.JaxRuntimeError("MemoryStats is only supported for addressable PjRt devices")


def test_xla_allocates_three_quarters_of_an_absent_gpu(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    h200, v5e = Absent("NVIDIA H200", "gpu"), Absent("TPU v5 lite", "tpu")
    whole = PEAKS["NVIDIA H200"].memory
    assert memory_of(h200) == int(0.75 * whole) and memory_of(v5e) == 16 * 2**30
    assert memory_of(Absent("NVIDIA H20", "gpu")) is None
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert memory_of(h200) == int(0.9 * whole) and memory_of(v5e) == 16 * 2**30
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    with pytest.raises(UserError, match="are set, but JAX takes one of them"):
        memory_of(h200)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(UserError, match="XLA_CLIENT_MEM_FRACTION='most': needs a number above 0, at most 1"):
        memory_of(h200)


def test_a_system_that_does_not_tell_its_memory(monkeypatch):
    """As Windows, where training is not checked against it."""
    monkeypatch.delattr("os.sysconf")
    assert memory_of(jax.devices()[0]) is None
