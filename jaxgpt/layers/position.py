"""How a token knows its place: fixed sines added to the embedding, or rotations of queries and keys.

Learned positions are an embedding like any other, and live in `model.py`.
"""

import jax
import jax.numpy as jnp


def sinusoidal(positions_BT: jax.Array, width: int) -> jax.Array:
    """Sines in the even columns, cosines in the odd, wavelengths from 2 pi to 20,000 pi tokens.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5. Returns x_BTD in float32; `width` is even.
    """
    # float32 throughout: bfloat16 rounds position 257 to 256.
    frequency_D2 = jnp.exp(-jnp.log(10_000.0) / width * jnp.arange(0, width, 2, dtype=jnp.float32))
    angle_BTD2 = positions_BT.astype(jnp.float32)[..., None] * frequency_D2[None, None]
    return jnp.stack([jnp.sin(angle_BTD2), jnp.cos(angle_BTD2)], axis=-1).reshape(*positions_BT.shape, width)


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Turn each pair (x_i, x_{i+H/2}) by `position / theta^(2i/H)` radians; a score then depends on distance alone.

    Su et al. 2021, arXiv:2104.09864, with the pairing of GPT-NeoX and Llama (halves, not neighbours).
    Length is kept, and so is x's dtype; H is even. B of the positions may be 1: the same for every row.
    """
    half = x_BTNH.shape[-1] // 2
    frequency_H2 = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1H2 = (positions_BT.astype(jnp.float32)[..., None] * frequency_H2[None, None])[:, :, None]
    sin, cos = jnp.sin(angle_BT1H2), jnp.cos(angle_BT1H2)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
