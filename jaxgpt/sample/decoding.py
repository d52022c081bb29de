"""The options of decoding, as one value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import numpy as np

from jaxgpt.config import Precision
from jaxgpt.config.validate import LARGEST_SIZE, check_count
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.filters import Sampling

BUCKET = 128  # tokens that the smallest cache has room for; larger ones have twice, four times ... as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of decoding that depend on neither the model nor the prompts: see `generate`.

    Raises `UserError` for values out of range.
    """

    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_tokens: Sequence[int] = ()
    vocab_size: int | None = None
    cache_dtype: Precision | None = None
    bucket: int = BUCKET
    logprobs: bool = False
    slots: int | None = None

    def __post_init__(self) -> None:
        """Check the fields; convert ids and counts to Python's."""
        for name in ("max_new_tokens", "vocab_size", "bucket", "slots"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_count(name, value))
        stop_tokens = tuple(check_count("stop_tokens", i, 0, LARGEST_SIZE) for i in self.stop_tokens)
        object.__setattr__(self, "stop_tokens", stop_tokens)
        if self.cache_dtype not in (None, *get_args(Precision)):
            raise UserError(f"cache_dtype={self.cache_dtype!r}: needs one of {', '.join(get_args(Precision))}")

    def known_ids(self, model: GPT) -> int:
        """Return the number of ids that may be drawn: the smaller of `vocab_size` and the model's."""
        known = model.config.vocab_size
        assert known is not None, "a model with parameters has one"
        return known if self.vocab_size is None else min(known, self.vocab_size)


def pad_stop_tokens(stop_tokens: Sequence[int]) -> np.ndarray:
    """Pad ids with -1, which is never drawn, to one of few lengths, so that another stop token rarely recompiles."""
    padding = next_bucket(4, len(stop_tokens)) - len(stop_tokens)
    return np.array([*stop_tokens, *[-1] * padding], np.int32)


def next_bucket(least: int, wanted: int) -> int:
    """Return the first of `least`, 2 `least`, 4 `least` ... that is at least `wanted`."""
    while least < wanted:
        least *= 2
    return least
