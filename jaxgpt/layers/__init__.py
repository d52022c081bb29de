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

from jaxgpt.layers.attention import Attention as Attention
from jaxgpt.layers.block import Block as Block
from jaxgpt.layers.kernels.plain import plain_attention as plain_attention
from jaxgpt.layers.mlp import ACTIVATIONS as ACTIVATIONS
from jaxgpt.layers.mlp import MLP as MLP
from jaxgpt.layers.norm import LayerNorm as LayerNorm
from jaxgpt.layers.norm import RMSNorm as RMSNorm
from jaxgpt.layers.norm import layer_norm as layer_norm
from jaxgpt.layers.norm import rms_norm as rms_norm
from jaxgpt.layers.position import Rope as Rope
from jaxgpt.layers.position import rope as rope
from jaxgpt.layers.position import sinusoidal as sinusoidal
