"""The encoder-decoder of Vaswani et al. 2017, arXiv:1706.03762, built from GPT's blocks."""

from jaxgpt.encdec.model import EncoderDecoder

__all__ = ["EncoderDecoder"]
