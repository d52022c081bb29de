"""Continuous batching: requests enter and leave the slots of one decoding state at any time.

The programs are in `sample.programs`, and no row of a batch depends on another: with a fixed number of rows each gives
the same bits whatever else runs. The engine has no threads of its own. One thread calls it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxgpt.config.validate import check_count, short_repr
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.errors import UserError
from jaxgpt.model import GPT
from jaxgpt.sample import BUCKET, Decoding, Precision, Sampling, programs
from jaxgpt.sample.filters import SamplingRows
from jaxgpt.sample.grammar import Grammar
from jaxgpt.sample.programs import CHUNK, GPU_CHUNK, cache_columns, check_ids, check_prompt, chunk_size, next_bucket
from jaxgpt.sample.quantize import check_model_type, lay_out_once
from jaxgpt.sample.score import pair_up, score

BURST = 64  # most tokens that one call of `decode` draws in each slot
PLAIN_STEPS = (64, 8)  # tokens that one call of `decode_plain` draws: each number is a program
MAX_STOPS = 8  # stop tokens of a request
CONTEXT = 64  # last ids of a prompt with which new ones are decoded: all of thousands would take milliseconds each time
UNFINISHED = "\ufffd"  # how decoded text ends if the last bytes are an incomplete character


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue, with its own key, limits, sampling and grammar."""

    prompt: Sequence[int]  # ids, 1 to block_size
    key: jax.Array  # the key of all draws: see `prompt_keys`
    max_new_tokens: int  # most tokens of the completion, at least 1
    sampling: Sampling = dataclasses.field(default_factory=Sampling)  # how each token is drawn
    stop_tokens: Sequence[int] = ()  # the completion ends before the first of these
    top_logprobs: int | None = None  # alternatives of each token, 0 to MAX_TOP. None means no log-probabilities
    grammar: Grammar | None = None  # what the completion must match. None means any text
    __repr__ = short_repr

    @functools.cached_property
    def is_plain(self) -> bool:
        """Whether `decode_plain` draws its tokens."""
        plain = Sampling(greedy=self.sampling.greedy, temperature=self.sampling.temperature)
        return self.sampling == plain and self.top_logprobs is None and self.grammar is None


class Piece(NamedTuple):
    """New tokens of the request in a slot, without the stop token."""

    slot: int  # number of the request's slot
    tokens: list[int]  # ids
    logprobs: list[float]  # nats, of raw logits over the whole vocabulary, if requested
    top: list[list[tuple[int, float]]]  # the most probable (id, logprob) in each token's place, best first
    finish: str | None  # "stop" if a stop token was drawn, "length" if no token is left, None if unfinished


@dataclasses.dataclass(eq=False)
class _Slot:
    """A request that is being read or decoded."""

    number: int
    request: Request
    tokens: list[int]  # prompt and completion
    left: int  # tokens still to draw
    first: int = 0  # the token at position 0
    constraint: Grammar | None = None
    chunks: Iterator[programs.Chunk] | None = None  # what is left to read of the prompt, once that has begun


class Engine:
    """The slots of a decoding state, and the requests in them."""

    def __init__(
        self,
        model: GPT,
        params: dict,
        *,
        slots: int,
        vocab_size: int | None = None,
        cache_dtype: Precision | None = None,
        columns: int | None = None,
        max_stops: int = MAX_STOPS,
        prefix_bytes: int = 0,
        slides: bool = False,
        resizes: bool = False,
        reproducible: bool = False,
    ):
        """Allocate the state.

        Args:
            model, params: a GPT and its parameters, as `for_decoding` returns them or at least without stacked layers.
            slots: requests that are decoded together.
            vocab_size: ids from this number on are never drawn. None means that all may be drawn.
            cache_dtype: the dtype of keys and values. None means the dtype of the model.
            columns: tokens that a slot has room for, at most the context. None means the context.
            max_stops: stop tokens that a request may have.
            prefix_bytes: host memory for keys and values of prompts, which later prompts with the same beginning reuse.
            slides: whether to go on at the end of the context, with the window of `generate`, or to end the completion.
            resizes: compute 1, 2, 4, ... rows, as many as are occupied: faster, but other requests may change rounding.
            reproducible: also on a GPU one program draws whatever the requests are, so that others change no rounding.
        """
        self.model, self.params, self.slots = model, params, slots
        self.vocab_size, self.max_stops, self.slides = programs.known_ids(model, vocab_size), max_stops, slides
        self._columns = columns = cache_columns(model) if columns is None else columns
        # Numbers of rows of the decoding state, and the slot that each row is for.
        self._sizes = [*(2**n for n in range(resizes * (slots - 1).bit_length())), slots]
        self._rows: list[_Slot | None] = [None] * self._sizes[0]
        # The prompt that is being read.
        self._scratch = programs.allocate_cache(model, params, 1, columns, cache_dtype)
        is_on_gpu = {device.platform for device in jax.tree.leaves(self._scratch)[0].devices()} == {"gpu"}
        gpu_chunk = GPU_CHUNK if columns <= 16 * GPU_CHUNK else CHUNK  # scores of a chunk and all columns take memory
        self._chunk = math.gcd(columns, gpu_chunk) if is_on_gpu else chunk_size(model)
        self._has_plain = is_on_gpu and not reproducible  # `decode_plain` draws where it can
        self._state = programs.DecodeState(
            programs.allocate_cache(model, params, self._sizes[0], columns, cache_dtype),
            programs.allocate_rows(jax.tree.leaves(params)[0], self._sizes[0], max_stops, self.vocab_size),
        )
        self._prefixes = programs.PrefixStore(prefix_bytes if programs.is_columns(self._scratch) else 0)
        self._slots: list[_Slot | None] = [None] * slots
        self.cached_tokens = [0] * slots  # those of the last prompt in each slot that were not read again
        self._waiting: collections.deque[_Slot] = collections.deque()

    @property
    def num_free(self) -> int:
        """Return the number of free slots."""
        return self._slots.count(None)

    def warm_up(self, begin: Callable[[str], None] = lambda program: None) -> None:
        """Compile all that requests can need, before the first one. begin: is given each program's name, before that."""
        prompt = [0] * min(self._chunk + 1, self.model.config.block_size)
        for size in [*self._sizes, 1]:  # the last restores the chunk of the first, and gives up rows
            begin(f"the decoding of {size} rows" if size > 1 else "the decoding of one row")
            for number in range(size):
                read = [0] if number else prompt
                self.submit(Request(prompt=read, key=jax.random.key(0), max_new_tokens=1, top_logprobs=0))
            self.finish_reading()
            self.decode(1)
            for end in range(1, self._columns * self._has_plain, programs.GPU_COLUMNS):  # many find theirs compiled
                self._draw_plain(min(PLAIN_STEPS), end, True)
                self._draw_plain(min(PLAIN_STEPS), end, False)
            self._state = programs.release(self._state, np.int32(0))

    def submit(self, request: Request) -> int:
        """Put a request into the first free slot and return the slot. `step` reads the prompt.

        Raises `UserError` for a prompt that the model cannot read, and for too many stop tokens.
        """
        check_prompt(self.model, request.prompt)
        if len(request.stop_tokens) > self.max_stops:
            raise UserError(f"{len(request.stop_tokens)} stop tokens: needs at most {self.max_stops}")
        check_ids(self.model, [i for i, _ in request.sampling.logit_bias], "logit_bias")
        left = request.max_new_tokens
        if not self.slides:
            left = min(left, self.model.config.block_size + 1 - len(request.prompt))
        constraint = None if request.grammar is None else request.grammar.start()
        slot = self._slots.index(None)
        found = self._slots[slot] = _Slot(slot, request, list(request.prompt), left, constraint=constraint)
        self.cached_tokens[slot] = 0
        self._waiting.append(found)
        return slot

    def cancel(self, slot: int) -> None:
        """Free a slot."""
        self._waiting = collections.deque(found for found in self._waiting if found.number != slot)
        found, self._slots[slot] = self._slots[slot], None
        if found in self._rows:
            row = self._rows.index(found)
            self._state, self._rows[row] = programs.release(self._state, np.int32(row)), None

    def _resize(self, size: int) -> None:
        """Give the state another number of rows."""
        running = [row for row, found in enumerate(self._rows) if found is not None]
        rows = np.array([*running, *[0] * size][:size], np.int32)
        self._state = programs.take_rows(self._state, rows, np.int32(len(running)))
        self._rows = [*(self._rows[row] for row in running), *[None] * (size - len(running))]

    def step(self, burst: int = 8) -> list[Piece]:
        """Read at most one chunk of one prompt, then draw up to `burst` tokens in each slot that has read its prompt."""
        if self._waiting:
            self._read_chunk()
        return self.decode(burst)

    def finish_reading(self) -> None:
        """Read all prompts that wait."""
        while self._waiting:
            self._read_chunk()

    def decode(self, burst: int = BURST) -> list[Piece]:
        """Draw up to `burst` tokens, at most BURST, in each slot that has read its prompt. With a grammar draw only one."""
        if not (count := len(self._rows) - self._rows.count(None)):
            return []
        at = self._sizes.index(len(self._rows))
        while at and count <= self._sizes[at - 1]:
            at -= 1
            self._resize(self._sizes[at])
        running = [(row, found) for row, found in enumerate(self._rows) if found is not None]
        drawn, pieces, block_size = jax.device_get(self._draw(running, burst)), [], self.model.config.block_size
        for row, found in running:
            count = int(drawn.count_B[row])
            tokens, logprobs, top = drawn.tokens_BN[row, :count].tolist(), [], []
            found.left -= count
            finish = "stop" if drawn.stopped_B[row] else "length" if found.left == 0 else None
            if found.constraint is not None and tokens:
                found.constraint.push(tokens[0])
                if found.constraint.is_complete:
                    finish = "length" if found.constraint.error else "stop"
                    self._state = programs.release(self._state, np.int32(row))
            found.tokens += tokens
            if finish:
                self._slots[found.number] = self._rows[row] = None
            elif not programs.has_unbounded_positions(self.model) and len(found.tokens) - 1 - found.first >= block_size:
                # The last token is past the end of the position table.
                found.first = len(found.tokens) - max(block_size // 2, 1)
                self._waiting.append(found)
                self._rows[row] = None
            wanted = found.request.top_logprobs
            if wanted is not None:
                logprobs = drawn.logprobs_BN[row, :count].tolist()
                top = pair_up(drawn.top_ids_BNA[row, :count, :wanted], drawn.top_logprobs_BNA[row, :count, :wanted])
            if tokens or finish:
                pieces.append(Piece(found.number, tokens, logprobs, top, finish))
        return pieces

    def _draw(self, running: list[tuple[int, _Slot]], burst: int) -> programs.Drawn:
        """Draw up to `burst` tokens in each row that runs, by the program that a GPU has for plain requests if it may."""
        left = max(found.left for _, found in running)
        if self._has_plain and burst >= min(PLAIN_STEPS) and all(found.request.is_plain for _, found in running):
            # The loop may go past the end of all, for so many steps that one program does for many lengths.
            steps = next(n for n in PLAIN_STEPS if n <= min(burst, 2 * left + 8))
            last = max(len(found.tokens) - 1 - found.first for _, found in running)
            is_greedy = all(found.request.sampling.is_greedy for _, found in running)
            return self._draw_plain(steps, last + steps, is_greedy)
        steps = min(burst, BURST, left)
        allowed_BW = np.full((len(self._rows), self.vocab_size // 32 + 1), 2**32 - 1, np.uint32)
        for row, found in running:
            if found.constraint is not None:
                found.constraint.fill(allowed_BW[row], found.request.stop_tokens)
                steps = 1
        self._state, drawn = programs.decode(self.model, self.params, self._state, np.int32(steps), BURST, allowed_BW)
        return drawn

    def _draw_plain(self, steps: int, end: int, is_greedy: bool) -> programs.Drawn:
        """Draw by `decode_plain` at positions below `end`."""
        columns = min(next_bucket(programs.GPU_COLUMNS, end), self._columns)
        self._state, drawn = programs.decode_plain(self.model, self.params, self._state, steps, columns, is_greedy)
        return drawn

    def _read_chunk(self) -> None:
        """Read the next chunk of the first prompt that waits. After the last one, let its slot decode."""
        found = self._waiting[0]
        unread = found.tokens[found.first : -1]  # the last is read with the first draw
        if found.chunks is None:
            found.chunks = programs.split_chunks(unread, self._chunk)
        for chunk in found.chunks:
            start, size = np.int32(chunk.start), chunk.tokens_1T.size
            length = np.int32(min(size, len(unread) - chunk.start))
            if (restored := self._prefixes.restore(self._scratch, chunk)) is None:
                self._scratch = programs.prefill(self.model, self.params, self._scratch, chunk.tokens_1T, start, length)
                self._prefixes.keep(self._scratch, chunk)
                if chunk.start + size < len(unread):
                    return
                break
            self._scratch = restored
            self.cached_tokens[found.number] += size
        found.chunks = None
        self._waiting.popleft()
        # The values of the slot are in NumPy: they go to the device with the call.
        request, number, seen_V = found.request, np.int32, np.zeros(self.vocab_size, np.int32)
        prompt, drawn = np.split(np.asarray(found.tokens), [len(request.prompt)])
        seen_V[prompt[prompt < self.vocab_size]] = 1
        np.add.at(seen_V, drawn, 2)
        values: dict[str, Any] = {
            "token_B": number(found.tokens[-1]),
            "position_B": number(len(found.tokens) - found.first - 1),
            "left_B": number(found.left),
            "drawn_B": number(len(found.tokens) - len(request.prompt)),
            "keys_B": request.key,
            "sampling": SamplingRows.stack([request.sampling]),
            "stops_BE": programs.pad_stop_tokens(request.stop_tokens, self.max_stops),
            "top_B": number(-1 if request.top_logprobs is None else request.top_logprobs),
            "seen_BV": seen_V,
        }
        if None not in self._rows:
            self._resize(self._sizes[self._sizes.index(len(self._rows)) + 1])
        row = self._rows.index(None)
        self._rows[row] = found
        self._state = programs.insert(self._state, np.int32(row), self._scratch, programs.Rows(**values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
    """The completion of each prompt, without the prompt and without the stop token.

    Log-probabilities are in nats, from the logits before temperature and filters. They are None unless requested.
    """

    tokens: list[list[int]]  # ids of each completion
    logprobs: list[list[float]] | None = None  # log-probability of each of `tokens`. None unless requested
    prompt_logprobs: list[list[float]] | None = None  # the same of each token of the prompt, nan for the first
    __repr__ = short_repr


def generate(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    logprobs: bool = False,
    vocab_size: int | None = None,
    cache_dtype: Precision | None = None,
    bucket: int = BUCKET,
    slots: int | None = None,
    grammar: Grammar | None = None,
) -> Generated:
    """Continue each prompt, a list of ids of any length, by up to `max_new_tokens` ids.

    Past the context, positions "rope" and "none" let the window slide: each token attends to itself and the
    block_size - 1 before it, and keys and values are computed once. "learned" and "sinusoidal" positions have a last
    one: a full window is recomputed from its last block_size // 2 tokens at positions from 0.

    Args:
        model: a GPT.
        params: its parameters. Trained ones are laid out as by `for_decoding` at the first call, and memory then holds
            both forms until the trained ones are freed. To hold one, call `for_decoding` with `donate`.
        prompts: lists of ids, none empty, else `UserError`. Beyond block_size only the end is read, with a warning.
        key: the key of all draws. Each prompt has its own, derived from it and from how many equal prompts come before it.
        max_new_tokens: most tokens of a completion, at least 1.
        sampling: filters of the logits. None means the model's own distribution.
        stop_tokens: ids. A completion ends before the first of them.
        logprobs: also return how likely each token of the completions and of the prompts was.
        vocab_size: ids from this one on are padding, never drawn. None means no padding.
        cache_dtype: dtype of keys and values, to bound memory: int8 takes a quarter of float32. None means as the model.
        bucket: tokens that the cache has room for at least. It doubles as needed, so that few lengths compile again.
        slots: prompts decoded together, which bounds memory. Another number may round otherwise. None means all.
        grammar: what each completion must match: see `compile_grammar`. None means any text.
    """
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        stop_tokens=stop_tokens,
        logprobs=logprobs,
        vocab_size=vocab_size,
        cache_dtype=cache_dtype,
        bucket=bucket,
        slots=slots,
        grammar=grammar,
    )
    ((tokens, drawn),) = _decode(model, params, prompts, decoding, key, None)
    if not logprobs:
        return Generated(tokens=tokens)
    read = score(model, params, [prompt[-model.config.block_size :] for prompt in prompts])
    return Generated(tokens=tokens, logprobs=drawn, prompt_logprobs=[row.tolist() for row in read])


def stream(
    model: GPT,
    params: dict,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None = 8,
) -> Iterator[list[list[int]]]:
    """Continue prompts like `generate`, by the same compiled programs, but yield new ids as they are drawn.

    Each item is a list of new ids for each prompt. Joined, they are what `generate` returns. `decoding` has the options,
    which `generate` takes one by one. `every` bounds the tokens of an item for each prompt, but the first item has one,
    so that text appears at once. None means one item, at the end. Arguments are checked when the first item is drawn.
    """
    for tokens, _ in _decode(model, params, prompts, decoding, key, every):
        yield tokens


def _decode(
    model: GPT, params: dict, prompts: Sequence[Sequence[int]], decoding: Decoding, key: jax.Array, every: int | None
) -> Iterator[tuple[list[list[int]], list[list[float]]]]:
    """Yield the new tokens of each prompt and their log-probabilities, after each burst of at most `every` tokens."""
    check_model_type(model)
    most = BURST if every is None else check_count("every", every)
    burst = BURST if every is None else 1
    ids = truncate_prompts(model, prompts)
    model, params = lay_out_once(model, params)
    engine = Engine(
        model,
        params,
        slots=len(ids) if decoding.slots is None else decoding.slots,
        vocab_size=decoding.vocab_size,
        cache_dtype=decoding.cache_dtype,
        columns=cache_columns(model, next_bucket(decoding.bucket, max(map(len, ids)) + decoding.max_new_tokens)),
        max_stops=next_bucket(4, len(decoding.stop_tokens)),
        slides=True,
        reproducible=decoding.slots is not None,
    )
    keys, waiting, running = prompt_keys(key, ids), list(range(len(ids)))[::-1], {}
    tokens, logprobs = [[] for _ in ids], [[] for _ in ids]
    while waiting or running:
        while waiting and engine.num_free:
            row = waiting.pop()
            request = Request(
                prompt=ids[row],
                key=keys[row],
                max_new_tokens=decoding.max_new_tokens,
                sampling=decoding.sampling,
                stop_tokens=decoding.stop_tokens,
                top_logprobs=0 if decoding.logprobs else None,
                grammar=decoding.grammar,
            )
            running[engine.submit(request)] = row
        engine.finish_reading()
        for piece in engine.decode(burst):
            row = running[piece.slot] if piece.finish is None else running.pop(piece.slot)
            tokens[row] += piece.tokens
            logprobs[row] += piece.logprobs
        if every is not None or not (waiting or running):
            yield tokens, logprobs
            tokens, logprobs = [[] for _ in ids], [[] for _ in ids]
        burst = most


def truncate_prompts(model: GPT, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the last block_size ids of each prompt. Warn if that cuts one. Raises as `generate`."""
    window, rows = model.config.block_size, []
    if not len(prompts):
        raise UserError("no prompts: give at least one list of token ids")
    for number, prompt in enumerate(prompts):
        ids = check_ids(model, prompt, f"prompt {number}")
        if len(ids) > window:
            message = f"prompt {number} has {len(ids)} tokens, block_size={window}: only its last {window} are read"
            warnings.warn(message, stacklevel=5)
        check_prompt(model, ids[-window:], f"prompt {number}")
        rows.append(ids[-window:].tolist())
    return rows


def prompt_keys(key: jax.Array, prompts: Sequence[Sequence[int]]) -> list[jax.Array]:
    """Derive a key from each prompt, and how many equal ones come before it in the batch."""
    earlier, keys = collections.Counter(), []
    for prompt in prompts:
        keys.append(prompt_key(key, prompt, earlier=earlier[tuple(prompt)]))
        earlier[tuple(prompt)] += 1
    return keys


def prompt_key(key: jax.Array, prompt: Sequence[int], *, earlier: int = 0) -> jax.Array:
    """Derive one key of `prompt_keys`. earlier: equal prompts before it in the batch."""
    return _fold_in(key, np.array([zlib.crc32(np.asarray(prompt, np.int32).tobytes()), earlier], np.uint32))


@jax.jit
def _fold_in(key: jax.Array, words_2: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(key, words_2[0]), words_2[1])


class Detokenizer:
    """Decode one growing list of ids in pieces that never split a character and never contain a stop string.

    Text that may be the start of a character or of a stop string is held back until more ids decide, or until `rest`.
    Joined, the pieces are what the ids add to the text of the prompt, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: Sequence[int] = ()):
        """Start with the ids of a prompt, none for a text of its own. Raise `UserError` for an empty stop string."""
        self._stop = [stop] if isinstance(stop, str) else stop
        if "" in self._stop:
            raise UserError("a stop string is empty: every text contains it; give at least one character, or none")
        self.stopped, self.length = False, 0  # length: characters of the new ids, with those held back
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prompt[-CONTEXT:]]
        # Each call decodes the ids from `context` on, of which those before `shown` have been returned. A new id must
        # not come first: decoders treat the first id of a list differently (a leading space).
        self._context, self._shown = 0, len(self._ids)
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that new ids add."""
        text = ""
        for i in ids:
            if self.stopped:
                break
            self._ids.append(int(i))
            new = self._decode_new()
            if new and not new.endswith(UNFINISHED):
                self._context, self._shown = self._shown, len(self._ids)
                text += self._release(new)
        return text

    def rest(self) -> str:
        """Return the text that was held back, after the last id."""
        return "" if self.stopped else self._release(self._decode_new(), is_last=True)

    def _decode_new(self) -> str:
        shown = self._tokenizer.decode(self._ids[self._context : self._shown])
        text = self._tokenizer.decode(self._ids[self._context :])
        if not text.startswith(shown):  # a prompt that ends within a character
            shown = shown.rstrip(UNFINISHED)
        return text[len(shown) :]

    def _release(self, new: str, *, is_last: bool = False) -> str:
        """Return the part of the held and the new text that no further id can change. Hold the rest back."""
        self.length += len(new)
        text = self._held + new
        starts = [text.find(stop) for stop in self._stop if stop in text]
        # All but the longest end of the text that begins a stop string.
        lengths = [n for stop in self._stop for n in range(1, len(stop)) if not is_last and text.endswith(stop[:n])]
        self.stopped, cut = bool(starts), min(starts, default=len(text) - max(lengths, default=0))
        self._held = "" if starts else text[cut:]
        return text[:cut]


def iter_text(
    tokenizer: Tokenizer, ids: Iterable[Sequence[int]], stop: Sequence[str] = (), prompt: Sequence[int] = ()
) -> Iterator[str]:
    """Yield the text that successive lists of ids add to a prompt's, in non-empty pieces, until a stop string."""
    detokenizer = Detokenizer(tokenizer, stop, prompt)
    for new_ids in ids:
        if piece := detokenizer.push(new_ids):
            yield piece
        if detokenizer.stopped:
            return
    if piece := detokenizer.rest():
        yield piece


def join_texts(
    tokenizer: Tokenizer,
    batches: Iterable[Sequence[Sequence[int]]],
    prompts: Sequence[Sequence[int]],
    stop: Sequence[str] = (),
) -> list[str]:
    """Return the text that the new ids in batches add to each prompt's, until all have met a stop string."""
    detokenizers = [Detokenizer(tokenizer, stop, prompt) for prompt in prompts]
    texts = [""] * len(prompts)
    for batch in batches:
        texts = [text + d.push(new_ids) for text, d, new_ids in zip(texts, detokenizers, batch, strict=True)]
        if all(d.stopped for d in detokenizers):
            break
    return [text + d.rest() for text, d in zip(texts, detokenizers, strict=True)]
