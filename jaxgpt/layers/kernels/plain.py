"""Attention in plain JAX: the reference, and the fastest on CPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxgpt.layers.saved import save_in_remat

# Causal attention by some kernel:
# (q_BTNH, k_BSKH, v_BSKH, *, segments_BT, scale, window, softcap, dropout, key) -> out_BTNH
AttentionFn = Callable[..., jax.Array]

# From MIN_BLOCKED_T tokens on, queries are split into NUM_BLOCKS blocks. More blocks save little more and take longer
# to compile; below MIN_BLOCKED_T, splitting costs as much as it saves.
NUM_BLOCKS, MIN_BLOCKED_T = 4, 256


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
) -> jax.Array:
    """Compute softmax(q k * scale) v, each group of N // K query heads sharing a key/value head. -> out_BTNH.

    Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values; their head size may differ, and is that of the result.
        segments_BT: int32, the document of each query: it attends to no other. None means one document per row.
        scale: of the scores. None means 1 / sqrt(H).
        window: tokens that each query attends to, itself included. None means all.
        softcap: c in c tanh(score / c). None means no cap.
        dropout: share of the attention weights to drop.
        key: of dropout. None means no dropout.
        causal: attend to the keys up to the query's position, where T and S are equal. False means to all keys.
        key_segments_BS: int32, the document of each key. None means segments_BT.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    scale = H**-0.5 if scale is None else scale
    G = N // K
    # Heads fold into the batch, so that each product is a batch of plain matrices: XLA on CPU takes 3.3 ms for
    # what costs 5.5 ms with the heads inside (B=12, T=64, N=4, H=32, forward and backward).
    q_ = q_BTNH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B * K, G, T, H)
    k_, v_ = (x.transpose(0, 2, 1, 3).reshape(B * K, S, -1) for x in (k_BSKH, v_BSKH))
    visible_BTS = _visible(T, S, causal, window)[None]
    if segments_BT is not None:
        key_segments_BS = segments_BT if key_segments_BS is None else key_segments_BS
        visible_BTS = visible_BTS & (segments_BT[:, :, None] == key_segments_BS[:, None, :])

    # A block of queries leaves out the keys after its last one: four blocks compute 5/8 of the scores.
    size = T // NUM_BLOCKS if causal and T >= MIN_BLOCKED_T and T % NUM_BLOCKS == 0 else T
    blocks = []
    for start in range(0, T, size):
        end = start + size
        read = slice(0 if window is None else max(0, start + 1 - window), end if causal else S)
        own = key if size == T or key is None else jax.random.fold_in(key, start)
        scores = {"scale": scale, "softcap": softcap, "dropout": dropout, "key": own}
        blocks.append(
            _attend_block(q_[:, :, start:end], k_[:, read], v_[:, read], visible_BTS[:, start:end, read], **scores)
        )
    out = jnp.concatenate(blocks, axis=2)
    return save_in_remat(out.reshape(B, K, G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, N, -1))


def _visible(T: int, S: int, causal: bool, window: int | None) -> jax.Array:
    visible_TS = jnp.ones((T, S), bool)
    if causal:
        visible_TS = jnp.tril(visible_TS)
    if window is not None:
        visible_TS &= jnp.triu(jnp.ones((T, S), bool), 1 - window)
    return visible_TS


def _attend_block(
    q_: jax.Array,
    k_: jax.Array,
    v_: jax.Array,
    visible_BTS: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    dropout: float,
    key: jax.Array | None,
) -> jax.Array:
    """Attend queries [B K, G, T, H] to keys [B K, S, H]. visible_BTS: B may be 1. -> [B K, G, T, H]."""
    BK, G, T, H = q_.shape
    # float32 from the product on, whatever the inputs.
    scores = jnp.einsum("btH,bsH->bts", q_.reshape(BK, G * T, H), k_, preferred_element_type=jnp.float32)
    scores = cap_scores(scores * scale, softcap)
    visible = jnp.tile(visible_BTS, (1, G, 1))
    if len(visible) > 1:
        visible = jnp.repeat(visible, BK // len(visible), axis=0)
    # finfo.min, not -inf: a row of -inf would give 0/0. Its softmax is an exact zero too.
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    if dropout and key is not None:
        keep = jax.random.bernoulli(key, 1.0 - dropout, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout), 0.0)
    return jnp.einsum("bts,bsH->btH", weights.astype(v_.dtype), v_).reshape(BK, G, T, -1)


def cap_scores(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Return softcap * tanh(scores / softcap). None means no cap."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
