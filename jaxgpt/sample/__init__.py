"""From logits to text.

Letters beside those of `layers`: X columns of tokens, W beams, R rows of any kind, M = B T flattened tokens, G tokens of a
draft.
"""

from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import Generated, generate, stream
from jaxgpt.sample.quantize import for_decoding
from jaxgpt.sample.score import score
from jaxgpt.sample.speculative import speculate

__all__ = ["Generated", "Sampling", "for_decoding", "generate", "score", "speculate", "stream"]
