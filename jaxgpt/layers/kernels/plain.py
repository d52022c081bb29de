"""Attention in plain JAX, and `Scores`, which all kernels take."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# From MIN_BLOCKED_T tokens on, queries are split into NUM_BLOCKS blocks. More blocks save little more and take longer
# to compile. Below MIN_BLOCKED_T, splitting costs as much as it saves.
NUM_BLOCKS, MIN_BLOCKED_T = 4, 256


class Scores(NamedTuple):
    """The numbers that turn products of queries and keys into attention weights."""

    scale: float | None = None  #: factor of the scores. None means 1 / sqrt(H)
    window: int | None = None  #: tokens that each query attends to, itself included. None means all
    softcap: float | None = None  #: c in c tanh(score / c). None means no cap
    dropout: float = 0.0  #: share of the attention weights to drop


DEFAULT_SCORES = Scores()
#: A causal kernel, `(q_BTNH, k_BSKH, v_BSKH, scores, *, segments_BT, key) -> out_BTNH`
AttentionFn = Callable[..., jax.Array]


def plain_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    scores: Scores = DEFAULT_SCORES,
    *,
    segments_BT: jax.Array | None = None,
    key: jax.Array | None = None,
    causal: bool = True,
    mask_BNTS: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q k * scale) v, each group of N // K query heads sharing a key/value head. -> out_BTNH.

    Vaswani et al. 2017, arXiv:1706.03762. Grouped heads: Ainslie et al. 2023, arXiv:2305.13245.

    Args:
        q_BTNH, k_BSKH, v_BSKH: queries, keys and values. The result has the head size of the values, which may differ from H.
        scores: scale, window, cap and dropout of the scores.
        segments_BT: int32, the document of each token: it attends to no other. None means one per row.
        key: the key of dropout. None means no dropout.
        causal: attend to the keys up to the query's position, where T and S are equal. False means to all keys.
        mask_BNTS: bool, whether each query may attend to each key, besides what the other arguments say. Any axis may be
            1, as in `jax.nn.dot_product_attention`. Each query needs a key.
    """
    (B, T, N, _), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    visible_BNTS = find_visible(T, S, scores.window, segments_BT=segments_BT, causal=causal)
    if mask_BNTS is not None:
        visible_BNTS = visible_BNTS & mask_BNTS
    v_MSH = _fold_heads(v_BSKH)
    # A block of queries leaves out the keys after its last one: four blocks compute 5/8 of the scores.
    size = T // NUM_BLOCKS if causal and T >= MIN_BLOCKED_T and T % NUM_BLOCKS == 0 else T
    blocks = []
    for start in range(0, T, size):
        end = start + size
        first = 0 if scores.window is None else max(0, start + 1 - scores.window)
        read = slice(first, end if causal else S)
        own = key if size == T or key is None else jax.random.fold_in(key, start)
        seen_BNTS = visible_BNTS[:, :, start:end, read]
        q_BtNH, k_BsKH = q_BTNH[:, start:end], k_BSKH[:, read]
        weights_BNTS = attention_weights(q_BtNH, k_BsKH, scores, seen_BNTS, own)
        weights_MQS = weights_BNTS.astype(v_MSH.dtype).reshape(B * K, N // K * size, -1)
        out_MQH = jnp.einsum("MQS,MSH->MQH", weights_MQS, v_MSH[:, read])
        blocks.append(out_MQH.reshape(B, N, size, -1))
    return checkpoint_name(jnp.concatenate(blocks, axis=2).swapaxes(1, 2), "attention")


def find_visible(
    T: int, S: int, window: int | None, *, segments_BT: jax.Array | None = None, causal: bool = True
) -> jax.Array:
    """Return whether each query may attend to each key, visible_B1TS. B is 1 without segments."""
    all_TS = jnp.ones((T, S), bool)
    visible_TS = jnp.tril(all_TS) if causal else all_TS
    if window is not None:
        visible_TS = visible_TS & jnp.triu(all_TS, 1 - window)
    if segments_BT is None:
        return visible_TS[None, None]
    return visible_TS[None, None] & (segments_BT[:, None, :, None] == segments_BT[:, None, None, :])


def attention_weights(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    scores: Scores,
    visible_BNTS: jax.Array,
    key: jax.Array | None = None,
) -> jax.Array:
    """Return the weights of the keys, weights_BNTS in float32. Axes B and N of what is visible may be 1.

    Heads fold into the batch (M is B K, and Q is G T). XLA on CPU takes 3.3 ms for what costs 5.5
    with the heads inside: B=12, T=64, N=4, H=32, forward and backward.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    G = N // K
    scale = H**-0.5 if scores.scale is None else scores.scale
    q_MQH, k_MSH = _fold_heads(q_BTNH).reshape(B * K, G * T, H), _fold_heads(k_BSKH)
    # The scores are float32 from the product on, whatever the inputs.
    scores_MQS = jnp.einsum("MQH,MSH->MQS", q_MQH, k_MSH, preferred_element_type=jnp.float32)
    scores_MQS = cap_scores(scores_MQS * scale, scores.softcap)
    if visible_BNTS.shape[1] > 1:
        visible_MQS = jnp.broadcast_to(visible_BNTS, (B, N, T, S)).reshape(scores_MQS.shape)
    else:
        visible_MQS = jnp.tile(visible_BNTS[:, 0], (1, G, 1))
        if len(visible_BNTS) > 1:
            visible_MQS = jnp.repeat(visible_MQS, K, axis=0)
    # finfo.min, not -inf: a row of -inf would give 0/0. Its softmax is an exact zero too.
    scores_MQS = jnp.where(visible_MQS, scores_MQS, jnp.finfo(jnp.float32).min)
    weights_MQS = jax.nn.softmax(scores_MQS, axis=-1)
    if key is not None and scores.dropout:
        keep_MQS = jax.random.bernoulli(key, 1.0 - scores.dropout, weights_MQS.shape)
        weights_MQS = jnp.where(keep_MQS, weights_MQS / (1.0 - scores.dropout), 0.0)
    return weights_MQS.reshape(B, N, T, S)


def _fold_heads(x_BSKH: jax.Array) -> jax.Array:
    """Return x_MSH, in which heads are folded into the batch."""
    B, S, K, _ = x_BSKH.shape
    return x_BSKH.swapaxes(1, 2).reshape(B * K, S, -1)


def cap_scores(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap * tanh(scores / softcap). None means no cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
