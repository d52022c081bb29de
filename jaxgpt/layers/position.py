"""Positions of tokens: fixed sines added to the embedding, or rotations of queries and keys.

Learned positions are an ordinary embedding, in `model.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def positions_from_segments(segments_BT: jax.Array) -> jax.Array:
    """Return the position of each token in its document, int32. A document is a run of equal numbers."""
    index_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1])[None], segments_BT.shape)
    first_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return index_BT - jax.lax.cummax(jnp.where(first_BT, index_BT, 0), axis=1)


def sinusoidal(positions_BT: jax.Array, width: int) -> jax.Array:
    """Return sines in the even columns and cosines in the odd, with wavelengths from 2 pi to 20,000 pi tokens.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5. Returns x_BTD in float32. `width` must be even.
    """
    # float32 throughout: bfloat16 rounds position 257 to 256.
    frequency_D2 = jnp.exp(-jnp.log(10_000.0) / width * jnp.arange(0, width, 2, dtype=jnp.float32))
    angle_BTD2 = positions_BT.astype(jnp.float32)[..., None] * frequency_D2[None, None]
    return jnp.stack([jnp.sin(angle_BTD2), jnp.cos(angle_BTD2)], axis=-1).reshape(*positions_BT.shape, width)


class Rope(NamedTuple):
    """Wavelengths of the rotations, and how many elements of a head they apply to."""

    size: int  # elements of each head that are rotated, from the first on: even
    theta: float  # base: the longest wavelength is 2 pi theta tokens
    scaling: str = "none"  # "none", "linear", "llama3" or "longrope": see `frequencies`
    factor: float = 1.0  # factor of the wavelengths that are scaled
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_context / this are scaled
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_context / this are kept
    original_context: int = 8192  # llama3, longrope: length of the context in pre-training, in tokens
    divisors: tuple[float, ...] = ()  # longrope: what the frequency of each pair is divided by
    magnitude: float = 1.0  # factor of what is rotated

    def frequencies(self) -> jax.Array:
        """Return radians per token of each pair, [size / 2] in float32: theta^(-2i/size), scaled for longer contexts.

        "linear" (Chen et al. 2023, arXiv:2306.15595) divides all by factor. "llama3" (Llama 3.1's, in Grattafiori et
        al. 2024, arXiv:2407.21783) divides those with less than low_freq_factor turns in the original context,
        keeps those above high_freq_factor, and blends between. "longrope" (arXiv:2402.13753) divides each by its own number.
        """
        half = self.size // 2
        frequency = self.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        if self.scaling == "linear":
            return frequency / self.factor
        if self.scaling == "longrope":
            return frequency / jnp.array(self.divisors, jnp.float32)
        if self.scaling == "llama3":
            turns = self.original_context * frequency / (2 * jnp.pi)
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            kept = jnp.clip(kept, 0.0, 1.0)
            return kept * frequency + (1.0 - kept) * frequency / self.factor
        return frequency


def rope(x_BTNH: jax.Array, positions_BT: jax.Array, rotation: Rope) -> jax.Array:
    """Rotate each pair (x_i, x_{i+size/2}) of the first `size` elements by `position * frequency_i` radians.

    Scores then depend on distances only. Su et al. 2021, arXiv:2104.09864, with the pairing of GPT-NeoX and Llama: halves.
    Weights of files that pair neighbours are reordered when they are read (layout "pairs" in `hf.family`). The result has
    x's dtype. B of the positions may be 1: the same for every row.
    """
    angle_BT1R = (positions_BT.astype(jnp.float32)[..., None] * rotation.frequencies()[None, None])[:, :, None]
    sin, cos = jnp.sin(angle_BT1R), jnp.cos(angle_BT1R)
    if rotation.magnitude != 1.0:
        sin, cos = rotation.magnitude * sin, rotation.magnitude * cos
    turned, rest = x_BTNH[..., : rotation.size], x_BTNH[..., rotation.size :]
    x1, x2 = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x_BTNH.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
