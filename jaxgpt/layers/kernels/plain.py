"""Attention in plain JAX: `naive_attention` is the definition, and `plain_attention` computes the same faster on CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.layers.remat import save_in_remat

#: Causal attention by some kernel,
#: `(q_BTNH, k_BSKH, v_BSKH, *, segments_BT, scale, window, softcap, dropout, key) -> out_BTNH`
AttentionFn = Callable[..., jax.Array]

# From MIN_BLOCKED_T tokens on, queries are split into NUM_BLOCKS blocks. More blocks save little more and take longer
# to compile. Below MIN_BLOCKED_T, splitting costs as much as it saves.
NUM_BLOCKS, MIN_BLOCKED_T = 4, 256


def naive_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, scale: float, window: int | None, softcap: float | None
) -> jax.Array:
    """Compute causal softmax(q k * scale) v as it is defined. Arguments: see `plain_attention`. -> out_BTNH."""
    T, N = q_BTNH.shape[1:3]
    k_BSNH, v_BSNH = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k_BSKH, v_BSKH))  # N // K queries share a head
    scores_BNTS = cap_scores(scale * jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH), softcap)
    distance_TS = jnp.arange(T)[:, None] - jnp.arange(T)[None]  # from each query back to each key
    visible_TS = (distance_TS >= 0) & (distance_TS < (window or T))
    weights_BNTS = jax.nn.softmax(jnp.where(visible_TS[None, None], scores_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH)


def plain_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    segments_BT: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: jax.Array | None = None,
    causal: bool = True,
    key_segments_BS: jax.Array | None = None,
    mask_BNTS: jax.Array | None = None,
) -> jax.Array:
    """Compute softmax(q k * scale) v, each group of N // K query heads sharing a key/value head. -> out_BTNH.

    It computes the same as `naive_attention` in less time, and also takes documents, masks and dropout.
    Vaswani et al. 2017, arXiv:1706.03762. Grouped heads: Ainslie et al. 2023, arXiv:2305.13245.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values. Their head size may differ from H, and is the result's.
        segments_BT: int32, the document of each query: it attends to no other. None means one document per row.
        scale: factor of the scores. None means 1 / sqrt(H).
        window: tokens that each query attends to, itself included. None means all.
        softcap: c in c tanh(score / c). None means no cap.
        dropout: share of the attention weights to drop.
        key: the key of dropout. None means no dropout.
        causal: attend to the keys up to the query's position, where T and S are equal. False means to all keys.
        key_segments_BS: int32, the document of each key. None means segments_BT.
        mask_BNTS: bool, whether each query may attend to each key, besides what the other arguments say. Any axis may be
            1, as in `jax.nn.dot_product_attention`. Each query needs a key.
    """
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    G = N // K
    # Heads fold into the batch (M is B K, and Q is G T), so that each product is a batch of plain matrices: XLA on CPU
    # takes 3.3 ms for what costs 5.5 ms with the heads inside (B=12, T=64, N=4, H=32, forward and backward).
    q_MGTH = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G, T, H)
    k_MSH, v_MSH = (x.transpose(0, 2, 1, 3).reshape(B * K, S, -1) for x in (k_BSKH, v_BSKH))
    visible_TS = jnp.tril(jnp.ones((T, S), bool)) if causal else jnp.ones((T, S), bool)
    visible_TS = visible_TS if window is None else visible_TS & jnp.triu(jnp.ones((T, S), bool), 1 - window)
    visible_BTS = visible_TS[None]
    if segments_BT is not None:
        key_segments_BS = segments_BT if key_segments_BS is None else key_segments_BS
        visible_BTS = visible_BTS & (segments_BT[:, :, None] == key_segments_BS[:, None, :])
    mask_MGTS = None if mask_BNTS is None else jnp.broadcast_to(mask_BNTS, (B, N, T, S)).reshape(B * K, G, T, S)

    # A block of queries leaves out the keys after its last one: four blocks compute 5/8 of the scores.
    size = T // NUM_BLOCKS if causal and T >= MIN_BLOCKED_T and T % NUM_BLOCKS == 0 else T
    blocks = []
    for start in range(0, T, size):
        end = start + size
        read = slice(0 if window is None else max(0, start + 1 - window), end if causal else S)
        own = key if size == T or key is None else jax.random.fold_in(key, start)
        mask = None if mask_MGTS is None else mask_MGTS[:, :, start:end, read].reshape(B * K, G * size, -1)
        seen_BTS, q_MQH = visible_BTS[:, start:end, read], q_MGTH[:, :, start:end].reshape(B * K, G * size, H)
        keys_MSH, values_MSH = k_MSH[:, read], v_MSH[:, read]
        # The scores are float32 from the product on, whatever the inputs.
        scores_MQS = jnp.einsum("MQH,MSH->MQS", q_MQH, keys_MSH, preferred_element_type=jnp.float32)
        scores_MQS = cap_scores(scores_MQS * scale, softcap)
        visible_BQS = jnp.tile(seen_BTS, (1, G, 1))
        visible_MQS = visible_BQS if len(visible_BQS) == 1 else jnp.repeat(visible_BQS, K, axis=0)
        visible_MQS = visible_MQS if mask is None else visible_MQS & mask
        # finfo.min, not -inf: a row of -inf would give 0/0. Its softmax is an exact zero too.
        weights_MQS = jax.nn.softmax(jnp.where(visible_MQS, scores_MQS, jnp.finfo(jnp.float32).min), axis=-1)
        if dropout and own is not None:
            keep_MQS = jax.random.bernoulli(own, 1.0 - dropout, weights_MQS.shape)
            weights_MQS = jnp.where(keep_MQS, weights_MQS / (1.0 - dropout), 0.0)
        out_MQH = jnp.einsum("MQS,MSH->MQH", weights_MQS.astype(values_MSH.dtype), values_MSH)
        blocks.append(out_MQH.reshape(B * K, G, size, -1))
    out_MGTH = jnp.concatenate(blocks, axis=2)
    return save_in_remat(out_MGTH.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1))


def cap_scores(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap * tanh(scores / softcap). None means no cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
