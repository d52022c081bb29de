"""Causal attention by Google's splash kernel, which never writes the [T, S] scores to memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from jaxgpt.layers.kernels.plain import DEFAULT_SCORES, Scores

LANES = 128  # lanes of a TPU's vector register: the kernel's blocks of T and S are multiples of this


def why_not_splash(T: int, H: int, dtype: DTypeLike) -> str | None:
    """Return why `splash_attention` cannot attend over T tokens with heads of size H. None means that it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"it needs bfloat16 or float32 and dtype is {jnp.dtype(dtype)}"
    if H > 256:
        return f"head size {H} is above 256"
    if T < LANES:
        return f"{T} tokens are fewer than its smallest block, {LANES}"
    return None


def splash_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores = DEFAULT_SCORES,
    *,
    segments_BT: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Attend like `plain_attention`, block by block. -> out_BTNH.

    Google's TPU kernel that comes with JAX: FlashAttention (Dao et al. 2022, arXiv:2205.14135) over the blocks that
    the mask leaves. T and S are equal, and T is padded to a multiple of 128. Arrays have one dtype, bfloat16 or float32.
    Products have TPU precision. With `interpret` the kernel runs without a TPU, slowly, for tests.

    Raises NotImplementedError in a program that the compiler partitions over several TPUs, since it cannot partition a
    kernel: call this inside `jax.shard_map(..., check_vma=False)` or `jax.pmap`.
    """
    # Imported here, since it takes 0.1 s.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, N, H = q_BTNH.shape[1:]
    padding = -T % LANES
    scale = H**-0.5 if scores.scale is None else scores.scale
    square = (T + padding, T + padding)
    mask = masks.CausalMask(square)
    if scores.window is not None:
        mask = masks.LocalMask(square, (scores.window - 1, 0), 0)
    # Not cached between calls: its arrays belong to the trace in which they are made.
    kernel = kernels.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * N),
        attn_logits_soft_cap=scores.softcap,
        block_sizes=_block_sizes(T + padding, H),
        interpret=interpret,
        residual_checkpoint_name="attention",
    )

    # The kernel does not scale scores. In bfloat16 this rounds q once more, unless H is a power of 4, such as 64.
    q_BNTH, k_BKSH, v_BKSH = (_heads_first(x, padding) for x in (q_BTNH * scale, k_BSKH, v_BSKH))
    # Mapped over B. With the batch folded into the heads the compiler copies more: a layer of GPT-2 at B=8, T=1024
    # then spends 2.4 million cycles of a v5e around the kernel instead of 1.9.
    ids = None
    if segments_BT is not None:
        padded_BT = jnp.pad(segments_BT, ((0, 0), (0, padding)))
        ids = kernels.SegmentIds(q=padded_BT, kv=padded_BT)
    out_BNTH: Any = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, ids)
    return out_BNTH[:, :, :T].swapaxes(1, 2)


def _heads_first(x_BTNH: jax.Array, padding: int) -> jax.Array:
    """Return x_BNTH with T padded, by a transposition of [T, N H], which the compiler lets the product before write.

    Splitting N H first makes two copies, since H < 128 is padded to 128 in memory: a layer of GPT-2 at B=12, T=1024
    then moves 1.46 GB on a v6e, not 1.22. Padded keys come after every real query, so that the mask hides them. Padded
    queries are cut off.
    """
    B, T, N, _ = x_BTNH.shape
    x_BNHT = _gradient_by_rows(x_BTNH.reshape(B, T, -1)).swapaxes(1, 2).reshape(B, N, -1, T)
    return jnp.pad(x_BNHT, ((0, 0), (0, 0), (0, 0), (0, padding))).swapaxes(2, 3)


@jax.custom_vjp
def _gradient_by_rows(x_BTF: jax.Array) -> jax.Array:
    """Return x, with its gradient laid out in memory token by token.

    The kernel writes gradients as [B, N, T, H], and two products read each: for the weights and for the input. By
    default the compiler transposes it once for each. Transposed only once, a layer of GPT-2 at B=8, T=1024 takes 219 MB
    instead of 304, and 1.5 million cycles of a v5e around the kernel instead of 2.3.
    """
    return x_BTF


_gradient_by_rows.defvjp(
    lambda x_BTF: (x_BTF, None), lambda _, dx_BTF: (with_layout_constraint(dx_BTF, Layout((0, 1, 2))),)
)


def _block_sizes(T: int, H: int) -> Any:
    """Return the largest blocks that divide T, a multiple of 128, and compile for every TPU since v4."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    # A kernel has 16 MiB of scratch memory on v4 and v5e. Blocks of 2048 need 17 to 23 MiB, and blocks of 1024 with
    # heads of 160 or 256 need 18 MiB on v4.
    largest = 1024 if H <= 128 else 512
    block = max(rows for rows in range(LANES, largest + 1, LANES) if T % rows == 0)
    compute = max(rows for rows in range(LANES, 512 + 1, LANES) if block % rows == 0)
    # A last axis below 128 is padded to 128 in memory. Smaller heads are therefore passed as [H, T], which is also the
    # compiler's own layout: a layer of GPT-2 at B=8, T=1024 has 49 MiB of temporaries then, not 105 (plain: 579).
    layout = kernels.QKVLayout.SEQ_MINOR if H < LANES else kernels.QKVLayout.HEAD_DIM_MINOR
    return kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        use_fused_bwd_kernel=True,  # 5 products backward, not 7, for T // block partial sums of dq in memory
        q_layout=layout,
        k_layout=layout,
        v_layout=layout,
    )
