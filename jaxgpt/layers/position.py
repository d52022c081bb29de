"""How a token knows its place: fixed sines added to the embedding, or rotations of queries and keys.

Learned positions are an embedding like any other, and live in `model.py`.
"""

import jax
import jax.numpy as jnp


def sinusoidal(positions_T: jax.Array, width: int) -> jax.Array:
    """Sines in the even columns, cosines in the odd, wavelengths from 2 pi to 20,000 pi tokens.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5. Returns x_TD in float32; `width` is even.
    """
    # float32 throughout: bfloat16 rounds position 257 to 256.
    frequency_D2 = jnp.exp(-jnp.log(10_000.0) / width * jnp.arange(0, width, 2, dtype=jnp.float32))
    angle_TD2 = positions_T.astype(jnp.float32)[:, None] * frequency_D2[None]
    return jnp.stack([jnp.sin(angle_TD2), jnp.cos(angle_TD2)], axis=-1).reshape(-1, width)


def rope(x_BTNH: jax.Array, positions_T: jax.Array, theta: float) -> jax.Array:
    """Turn each pair (x_i, x_{i+H/2}) by `position / theta^(2i/H)` radians; a score then depends on distance alone.

    Su et al. 2021, arXiv:2104.09864, with the pairing of GPT-NeoX and Llama (halves, not neighbours).
    Length is kept, and so is x's dtype; H is even. The last two axes are heads and head size.
    """
    half = x_BTNH.shape[-1] // 2
    frequency_H2 = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_TH2 = positions_T.astype(jnp.float32)[:, None] * frequency_H2[None]
    angle_1T1H2 = angle_TH2[None, :, None]
    sin, cos = jnp.sin(angle_1T1H2), jnp.cos(angle_1T1H2)
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
