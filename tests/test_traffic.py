"""The page of traffic: what it counts in compiled programs, against arithmetic."""

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import script

traffic = script("benchmarks/traffic")


def compiled(f, *shapes):
    return jax.jit(f).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()


def test_flops_of_a_convolution():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))

    text = compiled(convolve, (2, 10, 3), (4, 3, 5)).as_text()
    assert traffic.count_products(text) == 2 * 2 * 7 * 4 * 3 * 5


def test_a_scan_counts_as_often_as_it_runs_and_reads_each_layer_once():
    def f(x_BD, w_LDD):
        return jax.lax.scan(lambda x_BD, w_DD: (jnp.tanh(x_BD @ w_DD), None), x_BD, w_LDD)[0]

    L, B, D = 9, 16, 256
    shapes = (B, D), (L, D, D)
    text = compiled(f, *shapes).as_text()
    gradient = compiled(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), *shapes)
    assert traffic.count_products(text) == 2 * L * B * D * D
    assert traffic.count_products(gradient.as_text()) == 6 * L * B * D * D
    # At least once; at most, a slice copied out and read again. The whole stack in every iteration would be 9 times.
    assert 1 <= traffic.read_traffic(text).bytes_accessed / (4 * L * D * D) <= 3.5


FMHA = """ROOT %attend = (bf16[2,12,1024,64]{3,1,2,0}, f32[2,12,1024]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"algorithm": {"tuning_knobs": {"17": "1"}}, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "12", "1024", "1024"], "tuple_shapes": []}, "mask_type": "CAUSAL", "sliding_window_length": 0}}"""


@pytest.mark.parametrize(
    ("old", "new", "products", "pairs"),
    [
        ("", "", 2, 1024 * 1025 / 2),
        ("fmhaSoftmax", "fmhaSoftmaxBackward", 5, 1024 * 1025 / 2),
        ('length": 0', 'length": 256', 2, 256 * 257 / 2 + 768 * 256),
        ('"CAUSAL"', '"NO_MASK"', 2, 1024 * 1024),
    ],
)
def test_cudnns_attention_states_its_shape(old, new, products, pairs):
    call = FMHA.replace(old, new) if old else FMHA
    text = f"HloModule jit_f\n\nENTRY %main (q: bf16[2,1024,12,64]) -> f32[] {{\n  %q = bf16[2,1024,12,64]{{3,2,1,0}} parameter(0)\n  {call}\n}}\n"
    assert traffic.count_products(text) == products * 2 * 2 * 12 * 64 * pairs
    backward = "Backward" in new
    found = traffic.read_traffic(text)
    assert found.kernels == {f"cuDNN attention {'backward' if backward else 'forward'}": 1}
    q = 2 * 2 * 1024 * 12 * 64
    assert found.bytes_accessed == 4 * q + 4 * 2 * 12 * 1024


def test_kernels_take_the_longer_of_their_two_times():
    """In turn they take at least the longer sum, and at most both."""
    text = compiled(lambda a, b: jax.nn.gelu(a @ b).sum(), (256, 512), (512, 128)).as_text()
    found, flops = traffic.read_traffic(text), traffic.count_products(text)
    assert flops == 2 * 256 * 512 * 128
    by_memory, by_products = found.serial_seconds(1e30, 1e9), found.serial_seconds(1e9, 1e30)
    assert (by_memory, by_products) == pytest.approx((found.bytes_accessed / 1e9, flops / 1e9))
    assert max(by_memory, by_products) <= found.serial_seconds(1e9, 1e9) <= by_memory + by_products
