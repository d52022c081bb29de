"""Continuous batching: requests enter and leave the slots of one decoding state at any time.

Of a request everything is data, the programs are those of `sample.state`, and no row of a batch depends on another:
a request gives the same bits whatever else runs. The engine has no threads of its own; one thread calls it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.config import Precision
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample.filters import Sampling, SamplingRows
from jaxgpt.sample.prefill import (
    Chunk,
    PrefixStore,
    allocate_cache,
    cache_columns,
    chunk_size,
    encode_source,
    split_chunks,
)
from jaxgpt.sample.prompts import check_prompt, pad_source
from jaxgpt.sample.state import (
    NO_STOP,
    DecodeState,
    Drawn,
    Rows,
    allocate_rows,
    decode,
    has_unbounded_positions,
    insert,
    prefill,
    release,
)

BURST = 64  # most tokens that one call of `decode` draws in each slot
MAX_STOPS = 8  # stop tokens of a request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue."""

    prompt: Sequence[int]  # ids, 1 to block_size
    key: jax.Array  # of all draws: see `sample.prompts.prompt_keys`
    max_new_tokens: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_tokens: Sequence[int] = ()  # the completion ends before the first of these
    top_logprobs: int | None = None  # alternatives of each token, 0 to MAX_TOP. None: no log-probabilities
    source: Sequence[int] | None = None  # for a model with an encoder, the ids that it reads


class Piece(NamedTuple):
    """New tokens of the request in a slot, without the stop token."""

    slot: int
    tokens: list[int]
    logprobs: list[float]  # of each token, in nats, before temperature and filters; empty unless requested
    top: list[list[tuple[int, float]]]  # of each token, the most probable (id, logprob), best first
    finish: str | None  # "stop": a stop token was drawn; "length": no token is left; None: unfinished


@dataclasses.dataclass
class _Slot:
    """A request that is being read or decoded."""

    request: Request
    tokens: list[int]  # prompt and completion
    left: int  # tokens still to draw
    first: int = 0  # the token at position 0

    @property
    def drawn(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class Engine:
    """Slots of a decoding state, and the requests in them."""

    def __init__(
        self,
        model: GPT,
        params: dict,
        *,
        slots: int,
        vocab_size: int | None = None,
        cache_dtype: Precision | None = None,
        columns: int | None = None,
        source_columns: int | None = None,
        max_stops: int = MAX_STOPS,
        prefix_bytes: int = 0,
        slides: bool = False,
    ):
        """Allocate the state.

        Args:
            model: a GPT or an encoder-decoder; with `params`, see `for_decoding`.
            params: its parameters.
            slots: requests that are decoded together.
            vocab_size: ids from it on are never drawn. None means all may be.
            cache_dtype: of keys and values. None means the model's.
            columns: tokens that a slot has room for, at most the context. None means the context.
            source_columns: the same for the encoder's sources.
            max_stops: stop tokens that a request may have.
            prefix_bytes: host memory for keys and values of prompts, which later prompts with the same beginning reuse.
            slides: at the end of the context go on, with the window of `generate`, and not end the completion.
        """
        self.model, self.params = model, params
        self.slots = slots
        self.max_stops, self.slides = max_stops, slides
        known = model.config.vocab_size
        assert known is not None, "a model with parameters has one"
        self.vocab_size = known if vocab_size is None else min(vocab_size, known)
        columns = cache_columns(model) if columns is None else columns
        self._source_columns = model.config.block_size if source_columns is None else source_columns
        like = jax.tree.leaves(params)[0]
        self._scratch = allocate_cache(like, model, 1, columns, cache_dtype)  # of the prompt that is being read
        self._state = DecodeState(
            cache=allocate_cache(like, model, slots, columns, cache_dtype),
            rows=allocate_rows(like, slots, max_stops, self.vocab_size),
        )
        if model.config.n_encoder_layer:
            self._state = self._state.replace(
                cache=encode_source(model, params, self._state.cache, [0], self._source_columns)
            )
            self._scratch = encode_source(model, params, self._scratch, [0], self._source_columns)
        self._prefixes = PrefixStore(prefix_bytes)
        self._slots: list[_Slot | None] = [None] * slots
        self._cached = [0] * slots  # tokens of each prompt whose keys and values were not computed again
        self._waiting: collections.deque[tuple[int, _Slot]] = collections.deque()
        self._reading: Iterator[Chunk] | None = None  # of the first that waits

    @property
    def num_free(self) -> int:
        """Return the number of free slots."""
        return self._slots.count(None)

    @property
    def is_idle(self) -> bool:
        """Return whether all slots are free."""
        return self.num_free == self.slots

    def cached_tokens(self, slot: int) -> int:
        """Return how many tokens of the last prompt in a slot were not read again."""
        return self._cached[slot]

    def warm_up(self) -> None:
        """Compile all that a request can need."""
        assert self.is_idle, "requests are running"
        prompt = [0] * min(chunk_size(self.model) + 1, self.model.config.block_size)
        source = [0] if self.model.config.n_encoder_layer else None
        request = Request(prompt=prompt, key=jax.random.key(0), max_new_tokens=1, source=source)
        for _ in range(2):  # the second restores the chunk of the first
            slot = self.submit(request)
            self.step()
            self.finish_reading()
            self.cancel(slot)

    def submit(self, request: Request) -> int:
        """Put a request into the first free slot and return the slot. `step` reads the prompt.

        Raises `UserError` for a prompt or a source that the model cannot read, and for too many stop tokens.
        """
        check_prompt(self.model, request.prompt)
        if len(request.stop_tokens) > self.max_stops:
            raise UserError(f"{len(request.stop_tokens)} stop tokens: needs at most {self.max_stops}")
        if self.model.config.n_encoder_layer or request.source is not None:
            pad_source(self.model, request.source, self._source_columns)
        left = request.max_new_tokens
        if not self.slides:
            left = min(left, self.model.config.block_size + 1 - len(request.prompt))
        slot = self._slots.index(None)
        found = _Slot(request, list(request.prompt), left)
        self._slots[slot], self._cached[slot] = found, 0
        self._waiting.append((slot, found))
        return slot

    def cancel(self, slot: int) -> None:
        """Free a slot."""
        if self._waiting and self._waiting[0][0] == slot:
            self._reading = None
        self._waiting = collections.deque(item for item in self._waiting if item[0] != slot)
        self._slots[slot] = None
        self._state = release(self._state, np.int32(slot))

    def step(self, burst: int = 8) -> list[Piece]:
        """Read at most one chunk of one prompt, then draw up to `burst` tokens in each slot whose prompt has been read."""
        if self._waiting:
            self._read_chunk()
        return self.decode(burst)

    def finish_reading(self) -> None:
        """Read all prompts that wait."""
        while self._waiting:
            self._read_chunk()

    def decode(self, burst: int = BURST) -> list[Piece]:
        """Draw up to `burst` tokens, at most BURST, in each slot whose prompt has been read."""
        waiting = {slot for slot, _ in self._waiting}
        running = {n: s for n, s in enumerate(self._slots) if s is not None and n not in waiting}
        if not running:
            return []
        steps = min(burst, BURST, max(s.left for s in running.values()))
        self._state, drawn = decode(self.model, self.params, self._state, np.int32(steps), BURST)
        wants = any(s.request.top_logprobs is not None for s in running.values())
        drawn = jax.device_get(drawn if wants else drawn.without_logprobs())
        return [piece for slot, found in running.items() if (piece := self._collect(slot, found, drawn)) is not None]

    def _collect(self, slot: int, found: _Slot, drawn: Drawn) -> Piece | None:
        """Return what a burst drew in a slot; free the slot if that was all."""
        count = int(drawn.count_B[slot])
        tokens = drawn.tokens_BN[slot, :count].tolist()
        found.tokens += tokens
        found.left -= count
        finish = "stop" if drawn.stopped_B[slot] else "length" if found.left == 0 else None
        if finish:
            self._slots[slot] = None
        elif self._is_full(found):
            found.first = len(found.tokens) - max(self.model.config.block_size // 2, 1)
            self._waiting.append((slot, found))
        logprobs, top = [], []
        if (wanted := found.request.top_logprobs) is not None:
            assert (
                drawn.logprobs_BN is not None and drawn.top_ids_BNA is not None and drawn.top_logprobs_BNA is not None
            )
            logprobs = drawn.logprobs_BN[slot, :count].tolist()
            ids, best = drawn.top_ids_BNA[slot, :count, :wanted], drawn.top_logprobs_BNA[slot, :count, :wanted]
            top = [list(zip(i.tolist(), p.tolist(), strict=True)) for i, p in zip(ids, best, strict=True)]
        return Piece(slot, tokens, logprobs, top, finish) if tokens or finish else None

    def _is_full(self, found: _Slot) -> bool:
        """Return whether the last token is past the end of the position table, if there is one."""
        last = len(found.tokens) - 1 - found.first
        return not has_unbounded_positions(self.model) and last >= self.model.config.block_size

    def _read_chunk(self) -> None:
        """Read the next chunk of the first prompt that waits; after the last one, let its slot decode."""
        slot, found = self._waiting[0]
        unread = found.tokens[found.first : -1]  # the last token is read with the first draw
        if self._reading is None:
            if self.model.config.n_encoder_layer:
                self._scratch = encode_source(
                    self.model, self.params, self._scratch, found.request.source, self._source_columns
                )
            self._reading = split_chunks(unread, chunk_size(self.model), found.request.source)
        for chunk in self._reading:
            restored = self._prefixes.restore(self._scratch, chunk) if chunk.is_full else None
            if restored is None:
                self._scratch = prefill(self.model, self.params, self._scratch, chunk.tokens_1T, np.int32(chunk.start))
                self._prefixes.keep(self._scratch, chunk)
                if chunk.start + chunk.tokens_1T.size < len(unread):
                    return
                break
            self._scratch = restored
            self._cached[slot] += chunk.tokens_1T.size
        self._reading = None
        self._waiting.popleft()
        self._state = insert(self._state, np.int32(slot), self._scratch, self._row(found))

    def _row(self, found: _Slot) -> Rows:
        """Return the values of a slot, as NumPy's: they go to the device with the call of `insert`."""
        request, whole = found.request, np.int32
        stops = [*request.stop_tokens, *[NO_STOP] * (self.max_stops - len(request.stop_tokens))]
        seen_V = np.zeros(self.vocab_size, bool)
        if request.sampling.repetition_penalty is not None:
            ids = np.asarray(found.tokens)
            seen_V[ids[ids < self.vocab_size]] = True
        values: dict[str, Any] = {
            "token_B": whole(found.tokens[-1]),
            "position_B": whole(len(found.tokens) - found.first - 1),
            "left_B": whole(found.left),
            "drawn_B": whole(found.drawn),
            "keys_B": request.key,
            "sampling": SamplingRows.stack([request.sampling]),
            "stops_BE": np.array(stops, np.int32),
            "top_B": whole(-1 if request.top_logprobs is None else request.top_logprobs),
            "seen_BV": seen_V,
        }
        return Rows(**values)
