"""Choose the dtype and the attention kernel that a model computes with on a device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxgpt.errors import UserError
from jaxgpt.experiment import TrainConfig
from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, AttentionFn, plain_attention
from jaxgpt.model import GPTConfig
from jaxgpt.parallel.jax_setup import first_device

FUSED = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}  # the kernel that "auto" prefers, by JAX's platform


@functools.cache  # a model's kernel is always the same function, so that JAX finds its programs
def find_kernel(name: str) -> AttentionFn:
    """Return the attention kernel of that name. Only the module of this one is imported."""
    if name == "plain":
        return plain_attention
    if name == "native":
        from jaxgpt.layers.kernels.native.attention import native_attention

        return with_dropout(native_attention)
    if name == "splash":
        from jaxgpt.layers.kernels.splash import splash_attention

        return with_dropout(splash_attention)
    from jaxgpt.layers.kernels.cudnn import cudnn_attention

    return with_dropout(cudnn_attention)


def with_dropout(kernel: AttentionFn) -> AttentionFn:
    """Return a kernel whose place `plain_attention` takes where weights are dropped, which `kernel` cannot do."""

    @functools.wraps(kernel)
    def attend(q_BTNH, k_BSKH, v_BSKH, scores=DEFAULT_SCORES, *, segments_BT=None, key=None):
        if key is not None:
            return plain_attention(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT, key=key)
        return kernel(q_BTNH, k_BSKH, v_BSKH, scores, segments_BT=segments_BT)

    return attend


class ComputeOptions(NamedTuple):
    """The dtype and attention kernel that a model computes with on this machine."""

    dtype: DTypeLike  # dtype of activations and matrix products
    attention: str  # name of the kernel
    attention_fn: AttentionFn  # the kernel
    on_gpu: bool  # compute in the forms of `layers.gpu`
    reason: str  # dtype and kernel, and why the kernel was chosen


def compute_options(
    model: GPTConfig,
    train: TrainConfig,
    device: jax.Device | None = None,
    *,
    is_packed: bool = False,
    required: bool = True,
) -> ComputeOptions:
    """Choose float32 and plain attention on CPU, bfloat16 elsewhere, splash attention on TPU, cuDNN on Nvidia GPUs.

    On CPU XLA converts a bfloat16 product to float32 first. On GPU and TPU it is several times faster.

    device: the first by default. is_packed: rows hold several documents, between which there must be no attention.
    required: raise `UserError` if the device cannot run the named kernel. Otherwise choose as for "auto".
    """
    device = device or first_device()
    dtype, attention = train.dtype, train.attention
    if dtype == "auto":
        dtype = "float32" if device.platform == "cpu" else "bfloat16"
    refused = _why_not(attention, device, dtype, model, is_packed)
    if refused and required:
        raise UserError(f"train.attention={attention} is not available here: {refused}. Use auto or plain.")
    fused = FUSED.get(device.platform, "plain")
    passed_over = _why_not(fused, device, dtype, model, is_packed)
    if attention == "auto" or refused:
        attention = "plain" if passed_over else fused
    said = f" instead of {train.attention} ({refused})" if refused else ""
    if attention != "plain" and model.dropout:
        said += " (plain in training: it cannot drop weights)"
    elif attention == "plain" and passed_over and not refused:
        said += f" ({fused}: {passed_over})"
    return ComputeOptions(
        dtype=jnp.dtype(dtype),
        attention=attention,
        attention_fn=find_kernel(attention),
        on_gpu=FUSED.get(device.platform) == "cudnn",
        reason=f"{dtype}, {attention} attention{said}",
    )


def _why_not(kernel: str, device: jax.Device, dtype: str, model: GPTConfig, is_packed: bool) -> str | None:
    """Return why a device cannot run a kernel for a model. None means that it can."""
    if kernel == "native" and device.platform == "cpu":
        from jaxgpt.layers.kernels.native.build import why_not_native

        return why_not_native()
    if kernel == "splash" and device.platform == "tpu":
        from jaxgpt.layers.kernels.splash import why_not_splash

        return why_not_splash(model.block_size, model.shape.head_dim, dtype)
    if kernel in ("native", "splash"):
        return f"the device is {device.device_kind}"
    return _why_not_cudnn(device, dtype, model, is_packed) if kernel == "cudnn" else None


def _why_not_cudnn(device: jax.Device, dtype: str, model: GPTConfig, is_packed: bool) -> str | None:
    if model.attention_softcap is not None:
        return "it cannot cap scores (model.attention_softcap)"
    try:
        capability = float(getattr(device, "compute_capability", None) or "none")
    except ValueError:  # it has none, or comes from AMD, with a capability such as "gfx942"
        return f"the device is {device.device_kind}"
    largest_head = 256 if capability >= 9.0 else 128
    if capability < 8.0:
        return f"compute capability {capability} is below 8.0"
    if dtype != "bfloat16":
        return f"it needs a 16-bit dtype, not {dtype}"
    head_dim = model.shape.head_dim
    if head_dim % 8 or head_dim > largest_head:
        return f"head size {head_dim} is not a multiple of 8 up to {largest_head}"
    return "it cannot separate the conversations that are packed into a row" if is_packed else None
