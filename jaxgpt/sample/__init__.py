"""From logits to text. Here are the options, as values that need no jax: how to draw a token, and when to end.

Letters in addition to those of `layers`: X columns of tokens, W beams, R rows of any kind, M = B T flattened tokens,
G tokens of a draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, get_args

from jaxgpt.config import Precision
from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Interval,
    NonNegativeFloat,
    PositiveInt,
    check_count,
    check_fields,
)
from jaxgpt.errors import UserError

BUCKET = 128  # tokens that the smallest cache has room for; larger ones have twice, four times ... as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the next token.

    Filters apply in transformers' order: repetition penalty, temperature, top_k, top_p, min_p. None leaves one out.
    """

    # below 1 is safer, above 1 bolder, 0 (below 1e-6) greedy; None: 1, or a run's train.sample_temperature
    temperature: NonNegativeFloat | None = None
    # draw from the k most likely tokens (Fan et al. 2018, arXiv:1805.04833); None: from all
    top_k: PositiveInt | None = None
    # draw from the smallest set of tokens with this much probability (Holtzman et al. 2019, arXiv:1904.09751); None: from all
    top_p: Annotated[float, Interval(gt=0, le=1)] | None = None
    # draw from tokens at least this likely relative to the most likely (Nguyen et al. 2024, arXiv:2407.01082); None: from all
    min_p: Annotated[float, Interval(ge=0, le=1)] | None = None
    # above 1, tokens of prompt and completion become less likely (Keskar et al. 2019, arXiv:1909.05858); None: no penalty
    repetition_penalty: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = None
    greedy: bool = False  # take the most likely token after the penalty; other filters are ignored

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)


FILTERS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "greedy")


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
