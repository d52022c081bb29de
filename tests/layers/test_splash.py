"""The TPU kernel against the plain one: its program by interpretation here, its compilation by the TPU's compiler."""

import chex
import jax
import jax.numpy as jnp
import pytest

from jaxgpt.layers.kernels.plain import Scores, plain_attention
from jaxgpt.layers.kernels.splash import splash_attention, why_not_splash
from tests.helpers import FLOAT32_REORDERED, check_command, needs, out_and_gradients

# Numbers of 8 bits, as large as 4, rounded at other places (q once scaled, weights before the division by their sum).
BFLOAT16_ROUNDED = dict(rtol=0.02, atol=0.04)


# One ends within a block; T is padded.
DOCUMENTS_BT = jnp.asarray([[1] * 90 + [2] * 60 + [3] * 40 + [0] * 10, [1] * 200], jnp.int32)


def compare(B, T, N, K, H, dtype, **how):
    """(splash's output and three gradients, the plain kernel's), which all have the shape and dtype of the inputs."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [jax.random.normal(key, (B, T, n, H), dtype) for key, n in zip(keys, (N, K, K), strict=True)]
    ours = out_and_gradients(splash_attention, *inputs, interpret=True, **how)
    theirs = out_and_gradients(plain_attention, *inputs, **how)
    chex.assert_trees_all_equal_shapes_and_dtypes(ours, theirs)
    return jax.tree.map(lambda x: x.astype(jnp.float32), (ours, theirs))


@pytest.mark.parametrize(
    ("B", "T", "N", "K", "H", "how"),
    [
        pytest.param(1, 1152, 2, 1, 8, {}, marks=pytest.mark.slow),  # 3 x 3 blocks, of which the mask leaves 6
        (1, 384, 4, 2, 16, {"scores": Scores(softcap=2.0, scale=0.2, window=300)}),
        (2, 200, 2, 1, 16, {"segments_BT": DOCUMENTS_BT, "scores": Scores(window=50)}),
    ],
)
def test_splash_is_attention(B, T, N, K, H, how):
    chex.assert_trees_all_close(*compare(B, T, N, K, H, jnp.float32, **how), **FLOAT32_REORDERED)


def test_in_bfloat16_to_its_precision():
    chex.assert_trees_all_close(*compare(2, 128, 4, 2, 64, jnp.bfloat16), **BFLOAT16_ROUNDED)


def test_why_not():
    assert why_not_splash(1024, 64, "bfloat16") is None
    assert why_not_splash(1024, 512, "bfloat16") == "head size 512 is above 256"
    assert why_not_splash(1024, 64, "float16") == "it needs bfloat16 or float32 and dtype is float16"


COMPILE = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxgpt.layers.kernels.splash import splash_attention

def both_ways(q, k, v, dout, segments=None):
    out, pull_back = jax.vjp(lambda q, k, v: splash_attention(q, k, v, segments_BT=segments), q, k, v)
    return out, *pull_back(dout)

devices = get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
spec = PartitionSpec("data", None, "heads")
x = jax.ShapeDtypeStruct((4, 1024, 12, 64), jnp.bfloat16, sharding=NamedSharding(mesh, spec))
x_each = jax.ShapeDtypeStruct((4, 1, 1024, 12, 64), jnp.bfloat16)
sharded = jax.jit(jax.shard_map(both_ways, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
mapped = jax.pmap(both_ways, devices=devices)
packed = jax.ShapeDtypeStruct((4, 1, 1024), jnp.int32)
for lowered in (
    sharded.lower(x, x, x, x),
    mapped.lower(x_each, x_each, x_each, x_each),
    mapped.lower(x_each, x_each, x_each, x_each, packed),
):
    compiled = lowered.compile()
    text = compiled.as_text()
    print(
        text.count('custom_call_target="tpu_custom_call"'),
        any(name in text for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")),
        compiled.memory_analysis().temp_size_in_bytes < 12 * 1024 * 1024 * 4 / 2,
    )
try:
    jax.jit(both_ways).lower(x, x, x, x)
except NotImplementedError:
    print("refused")
"""


@pytest.mark.slow
@needs("libtpu", "tpu")
def test_compiles_for_four_tpus(tmp_path):
    """GPT-2 124M's attention: two kernels on each, no communication, not half the memory of the float32 scores; with
    several documents in a row as well.

    Without shard_map the compiler refuses to split a kernel. In a process of its own, for libtpu stays in the one that loads it.
    """
    environment = {
        "JAX_PLATFORMS": "cpu",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # with the next two: look for no TPU, ask no server for one
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # beside another process that compiles: no TPU is opened
    }
    done = check_command("-c", COMPILE, cwd=tmp_path, deadline=120, **environment)
    assert done.stdout.splitlines() == ["2 False True"] * 3 + ["refused"], done.stderr
