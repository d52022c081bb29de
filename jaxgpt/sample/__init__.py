"""From logits to text."""

from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import Generated, generate

__all__ = ["Generated", "Sampling", "generate"]
