"""Sample text from logits. This file has the options, which need no jax: how to draw a token, and when to end.

Letters in addition to the ones in `layers`: X columns of tokens, W beams, R rows of any kind, M = B T flattened tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from jaxgpt.config.validate import (
    LARGEST_SIZE,
    Interval,
    NonNegativeFloat,
    PositiveInt,
    check_count,
    check_fields,
    short,
)
from jaxgpt.errors import UserError

Precision = Literal["float32", "bfloat16", "int8"]  #: dtype of weights, and of keys and values, for sampling
MAX_NEW_TOKENS = 400  # default length of a sample
COLDEST = 1e-6  # lowest temperature: below it, rounding errors in the logits decide, and logits overflow
MAX_BIASES = 1024  # most biases in a request
Penalty = Annotated[float, Interval(ge=-2, le=2)]
BUCKET = 128  # tokens that the smallest cache has room for. Larger ones have twice, four times ... as many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the next token.

    They apply in transformers' order: penalties, biases, temperature, top_k, top_p, min_p. None leaves one out.

    >>> sampling = Sampling(temperature=0.8, top_p=0.9)
    """

    # divisor of the logits: below 1 is safer, above 1 bolder, 0 (below 1e-6) greedy. None means 1, or a run's
    # train.sample_temperature
    temperature: NonNegativeFloat | None = None
    # draw from the k most likely tokens (Fan et al. 2018, arXiv:1805.04833). None means from all
    top_k: PositiveInt | None = None
    # draw from the smallest set of tokens with this much probability (Holtzman et al. 2019, arXiv:1904.09751). None means from all
    top_p: Annotated[float, Interval(ge=0, le=1)] | None = None
    # draw from tokens at least this likely relative to the most likely (Nguyen et al. 2024, arXiv:2407.01082). None means from all
    min_p: Annotated[float, Interval(ge=0, le=1)] | None = None
    # above 1, tokens of prompt and completion become less likely (Keskar et al. 2019, arXiv:1909.05858). None means no penalty
    repetition_penalty: Annotated[float, Interval(ge=1e-6, le=1e6)] | None = None
    # subtracted from a token's logit for each time that the completion has it, as in OpenAI's interface. None means no penalty
    frequency_penalty: Penalty | None = None
    # subtracted once from the logit of each token that the completion has. None means no penalty
    presence_penalty: Penalty | None = None
    # pairs of a token id and what is added to its logit, -100 to 100: -100 bans it
    logit_bias: tuple[tuple[int, float], ...] = ()
    greedy: bool = False  # take the most likely token after penalties and biases, and ignore other filters

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.greedy or (self.temperature is not None and self.temperature < COLDEST)

    def __post_init__(self) -> None:
        """Check the fields."""
        check_fields(self)
        is_right = all(i >= 0 and -100 <= bias <= 100 for i, bias in self.logit_bias)
        if not is_right or not len(dict(self.logit_bias)) == len(self.logit_bias) <= MAX_BIASES:
            needed = f"needs at most {MAX_BIASES} ids of tokens, each once, and numbers from -100 to 100"
            raise UserError(f"logit_bias={short(self.logit_bias)}: {needed}")


FILTERS = tuple(field.name for field in dataclasses.fields(Sampling) if field.name != "greedy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Options of decoding that depend on neither the model nor the prompts. `UserError` for values out of range.

    >>> decoding = Decoding(max_new_tokens=100, sampling=Sampling(top_k=40))
    """

    max_new_tokens: PositiveInt  # most tokens of a completion, at least 1
    sampling: Sampling = dataclasses.field(default_factory=Sampling)  # how each token is drawn
    stop_tokens: Sequence[int] = ()  # ids. A completion ends before the first of them
    vocab_size: PositiveInt | None = None  # ids from this on, padding, are never drawn. None means no padding
    cache_dtype: Precision | None = None  # dtype of keys and values, int8 a quarter of float32. None means as the model
    bucket: PositiveInt = BUCKET  # tokens that the cache has room for, doubled as needed so that few lengths recompile
    logprobs: bool = False  # also return log-probabilities of generated and prompt tokens
    slots: PositiveInt | None = None  # prompts decoded together: another number may round otherwise. None means all
    grammar: Any = None  # a `Grammar` that each completion must match: see `compile_grammar`. None means any text

    def __post_init__(self) -> None:
        """Check the fields. Convert ids and counts to Python integers."""
        stop_tokens = tuple(check_count("stop_tokens", i, 0, LARGEST_SIZE) for i in self.stop_tokens)
        object.__setattr__(self, "stop_tokens", stop_tokens)
        check_fields(self)
