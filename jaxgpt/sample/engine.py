"""Continuous batching, without a cache: every token reads its whole sequence again. A placeholder of the real engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt.config import Precision
from jaxgpt.model import GPT
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.prompts import truncate_prompts

MAX_TOP = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: Sequence[int]  # ids, 1 to block_size
    key: jax.Array  # of all draws: see `sample.prompts.prompt_keys`
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_tokens: Sequence[int] = ()  # the completion ends before the first of these
    top_logprobs: int | None = None  # None: no log-probabilities. 0 to MAX_TOP: of each token and so many alternatives
    source: Sequence[int] | None = None  # for a model with an encoder, the ids that it reads


class Piece(NamedTuple):
    """New tokens of the request in a slot, without the stop token."""

    slot: int
    tokens: list[int]
    logprobs: list[float]  # of each token, in nats, before temperature and filters; empty unless requested
    top: list[list[tuple[int, float]]]  # of each token, the most probable (id, logprob), best first
    finish: str | None  # "stop": a stop token was drawn; "length": no token is left; None: unfinished


class Engine:
    """Slots, and the requests in them."""

    def __init__(
        self,
        model: GPT,
        params: dict,
        *,
        slots: int,
        vocab_size: int | None = None,
        cache_dtype: Precision | None = None,
        prefix_bytes: int = 0,
    ):
        """Start with free slots."""
        self.model, self.params, self.slots, self.vocab_size = model, params, slots, vocab_size
        self._running: dict[int, tuple[Request, list[int]]] = {}

    @property
    def num_free(self) -> int:
        """Return the number of slots without a request."""
        return self.slots - len(self._running)

    def warm_up(self) -> None:
        """Compile the model."""

    def submit(self, request: Request) -> int:
        """Put a request into a free slot."""
        truncate_prompts(self.model, [request.prompt])
        slot = next(n for n in range(self.slots) if n not in self._running)
        self._running[slot] = request, list(request.prompt)
        return slot

    def step(self, burst: int = 8) -> list[Piece]:
        """Draw up to `burst` tokens in each slot."""
        return [self._decode(slot, burst) for slot in list(self._running)]

    def cancel(self, slot: int) -> None:
        """Free a slot."""
        del self._running[slot]

    def cached_tokens(self, slot: int) -> int:
        """Return 0: nothing is cached."""
        return 0

    def _decode(self, slot: int, burst: int) -> Piece:
        request, ids = self._running[slot]
        tokens, logprobs, top, finish, window = [], [], [], None, self.model.config.block_size
        while finish is None and len(tokens) < burst:
            padded_1T = np.array([[*ids, *[0] * (window - len(ids))]], np.int32)
            logits_1V = _logits(self.model, self.params, padded_1T, np.int32(len(ids) - 1))[:, : self.vocab_size]
            key = jax.random.fold_in(request.key, len(ids) - len(request.prompt))
            seen_1V = jnp.zeros(logits_1V.shape, bool).at[0, np.array(ids)].set(True)
            token = int(request.sampling.draw(logits_1V, key[None], seen_1V)[0])
            if token in request.stop_tokens:
                finish = "stop"
                break
            tokens.append(token)
            ids.append(token)
            if request.top_logprobs is not None:
                row_V = np.asarray(jax.nn.log_softmax(logits_1V)[0])
                logprobs.append(float(row_V[token]))
                best = np.argsort(-row_V, kind="stable")[: request.top_logprobs]
                top.append([(int(i), float(row_V[i])) for i in best])
            if len(ids) - len(request.prompt) == request.max_new_tokens or len(ids) > window:
                finish = "length"
        if finish:
            del self._running[slot]
        return Piece(slot, tokens, logprobs, top, finish)


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: GPT, params: dict, ids_1T: jax.Array, last: jax.Array) -> jax.Array:
    x_1TD: Any = model.apply({"params": params}, ids_1T, method="hidden_states")
    logits_11V: Any = model.apply({"params": params}, x_1TD[:, last][:, None], method="unembed")
    return logits_11V[:, 0]
