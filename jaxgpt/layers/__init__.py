"""The layers of a GPT: linen modules over plain functions, independent of devices and files.

Letters that end the names of arrays and that einsum strings use, in the entire package:

    B batch           T query length    S key/value length    V vocabulary
    N query heads     K key/value heads G = N // K            H head size
    D width (n_embd)  F MLP hidden      L layers              U tokens of all rows in one axis, B T
    C chunks of T     X columns of a batch that is decoded    W beams
    M key/value heads of all rows, B K       Q queries that share a key/value head, G T
    P local devices   R rank of adapters, half of the elements that rope rotates, or rows of all beams, B W

A number for a letter is that size: x_BT1. A lower-case letter is a part of it: x_BtD is a chunk of x_BTD.
"""

from jaxgpt.layers.attention import Attention
from jaxgpt.layers.block import Block
from jaxgpt.layers.kernels.plain import plain_attention
from jaxgpt.layers.mlp import ACTIVATIONS, MLP
from jaxgpt.layers.norm import LayerNorm, RMSNorm, layer_norm, rms_norm
from jaxgpt.layers.position import Rope, rope, sinusoidal

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "Attention",
    "Block",
    "LayerNorm",
    "RMSNorm",
    "Rope",
    "layer_norm",
    "plain_attention",
    "rms_norm",
    "rope",
    "sinusoidal",
]
