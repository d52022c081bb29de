"""Does a run write faster when a smaller one drafts its tokens?

Question    a small model proposes several tokens, and the large one checks them in one pass. A completion has exactly the
            large model's own distribution. A greedy one is the same token for token. What does it gain?
Reference   Leviathan, Kalman and Matias 2022, arXiv:2211.17192, and Chen et al. 2023, arXiv:2302.01318
Command     python experiments/speculative.py runs/mine runs/small [--prompt "The "] [--max-new-tokens 200] [--greedy]
            Both runs need one tokenizer: train them on the same data.
Hardware    one device of any kind; a small pair takes seconds on two cores of a CPU
Expected    the gain is the number of tokens kept for each pass, less the time of the draft. A bad draft only costs time.
Result      the quickstart's model with itself as the draft, greedy, on CPU: the same text, at 980 tokens/s (LOG.md,
            2026-11-21, "sampling, small").
Verdict     no gain where the draft costs as much as the model. A large model with a small draft has not been timed.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxgpt import GPT, Decoding, Run, Sampling, UserError, load
from jaxgpt.config.validate import check_count, check_value
from jaxgpt.data.tokenizer import fingerprint
from jaxgpt.sample import programs
from jaxgpt.sample.engine import iter_text, prompt_keys, truncate_prompts
from jaxgpt.sample.filters import SamplingRows, draw
from jaxgpt.sample.programs import cache_columns, has_unbounded_positions, known_ids, next_bucket
from jaxgpt.sample.quantize import apply_model, unstack_layers


def sample(
    run: Run, draft: Run, prompts: list[str], *, max_new_tokens: int, greedy: bool = False, seed: int = 0
) -> list[str]:
    """Return the completion of each prompt, without the prompt. draft: a smaller run with the same tokenizer."""
    if fingerprint(draft.tokenizer) != fingerprint(run.tokenizer):
        raise UserError(
            f"the draft {draft.directory} has another tokenizer than {run.directory}: train both on the same data"
        )
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature=run.experiment.train.sample_temperature, greedy=greedy),
        stop_tokens=run.prompt_format.stop_tokens(chat=False),
        vocab_size=run.tokenizer.vocab_size,
    )
    key, texts = jax.random.key(seed), []
    for number, ids in enumerate(run.prompt_format.encode(prompts, chat=False)):
        earlier = prompts[:number].count(prompts[number])  # equal prompts get different keys
        row_key = jax.random.fold_in(key, earlier) if earlier else key
        new_ids = speculate(*run.decode_params, *draft.decode_params, ids, decoding, key=row_key, every=None)
        texts.append("".join(iter_text(run.tokenizer, new_ids, prompt=ids if prompts[number] else ())))
    return texts


def speculate(
    model: GPT,
    params: dict,
    draft: GPT,
    draft_params: dict,
    prompt: Sequence[int],
    decoding: Decoding,
    *,
    key: jax.Array,
    every: int | None = 8,
    num_draft_tokens: int = 4,
) -> Iterator[list[int]]:
    """Yield the completion of one prompt as lists of new ids.

    There is one prompt, since the rows of a batch would accept different numbers of tokens. The completion depends only
    on the prompt and the key. Unless greedy, it is not the one that `generate` draws with this key.

    Args:
        model: a GPT.
        params: its parameters.
        draft: a GPT with the same tokenizer.
        draft_params: its parameters.
        prompt: a list of ids.
        decoding: see `generate`.
        key: see `generate`.
        every: the fewest tokens of an item between the first and the last. None means no item between those two.
        num_draft_tokens: tokens that the draft proposes for each pass of the model, at most half of either block_size.

    Raises:
        UserError: as `generate`, and if the draft has a smaller vocabulary, or num_draft_tokens is out of range.
    """
    every = decoding.max_new_tokens if every is None else check_count("every", every)
    vocab_size = known_ids(model, decoding.vocab_size)
    if known_ids(draft, decoding.vocab_size) < vocab_size:
        raise UserError(
            f"the draft knows {draft.config.vocab_size} tokens, the model writes {vocab_size}: both need one tokenizer"
        )
    most = min(model.config.block_size, draft.config.block_size) // 2
    G = check_value("num_draft_tokens", num_draft_tokens, int)
    if not 1 <= G <= most:
        raise UserError(f"num_draft_tokens={G}: needs 1 to {most}, half of the shorter block_size")
    if decoding.grammar is not None:
        raise UserError("speculative decoding follows no grammar: leave the draft or the grammar out")
    programs.check_ids(model, [i for i, _ in decoding.sampling.logit_bias], "logit_bias")
    (ids,) = truncate_prompts(model, [prompt])
    (key,) = prompt_keys(key, [ids])
    new = decoding.max_new_tokens + G + 1  # a round may draw more than is left
    t = init_sequence(model, params, ids, new, decoding, G)
    d = init_sequence(draft, draft_params, ids[-draft.config.block_size :], new, decoding, G)
    sampling = SamplingRows.stack([decoding.sampling])
    stops = programs.pad_stop_tokens(decoding.stop_tokens, next_bucket(4, len(decoding.stop_tokens)))
    limit, shown = 1, 0
    while True:
        t, d = _advance(model, draft, params, draft_params, t, d, key, sampling, stops, np.int32(limit), vocab_size, G)
        count = min(int(t.count), decoding.max_new_tokens)
        yield np.asarray(t.tokens_X)[len(ids) + shown : len(ids) + count].tolist()
        shown = count
        if shown == decoding.max_new_tokens or bool(t.stopped):
            return
        limit = min(shown + every, decoding.max_new_tokens)


class SequenceState(flax.struct.PyTreeNode):
    """One prompt and its completion, as one of the two models sees them."""

    tokens_X: jax.Array  # int32, with room for the completion
    length: jax.Array  # int32: tokens so far
    start: jax.Array  # int32: index of the token at position 0
    unread: jax.Array  # int32: index of the first token that is not in the cache
    count: jax.Array  # int32: tokens generated before the stop token
    stopped: jax.Array  # bool
    seen_1V: jax.Array  # int32: tokens of prompt and completion, see `SamplingRows.adjust`
    cache: programs.Cache


def init_sequence(
    model: GPT, params: dict, prompt: Sequence[int], new: int, decoding: Decoding, G: int
) -> SequenceState:
    """Return the state before the prompt is read. new: most tokens to generate. G: tokens drafted in each round."""
    room, V = next_bucket(decoding.bucket, len(prompt) + new), known_ids(model, decoding.vocab_size)
    tokens_X = np.zeros(room + programs.chunk_size(model), np.int32)  # slices of a chunk may begin at the last token
    tokens_X[: len(prompt)] = prompt
    # More columns than a round reads: rejected tokens must not overwrite columns that the window still needs.
    columns = cache_columns(model, room) + cache_columns(model, G + 1)
    cache = programs.allocate_cache(model, params, 1, columns, decoding.cache_dtype)
    if programs.keeps_cache(model.config) and not programs.is_columns(cache):
        name = type(model.config).__name__
        raise UserError(
            f"{name}: speculative decoding takes tokens back, which its module's cache cannot: leave the draft out"
        )
    return SequenceState(
        tokens_X=jnp.asarray(tokens_X),
        length=jnp.int32(len(prompt)),
        start=jnp.int32(0),
        unread=jnp.int32(0),
        count=jnp.int32(0),
        stopped=jnp.asarray(False),
        seen_1V=jnp.asarray(np.isin(np.arange(V), prompt)[None], jnp.int32),
        cache=cache,
    )


class _Model(NamedTuple):
    """One of the two models."""

    model: GPT
    params: dict
    vocab_size: int

    def catch_up(self, state: SequenceState, ahead: int) -> SequenceState:
        """Read all tokens but the last, which is read with the next ones.

        The position table may end before the last token, or before the token `ahead` places after it. Then read the last
        half of a full window again, from position 0.
        """
        block_size = self.model.config.block_size
        if not has_unbounded_positions(self.model):
            is_full = (state.length - 1 + ahead - state.start >= block_size) & ~state.stopped
            half = state.length - max(block_size // 2, 1)
            start, unread = jnp.where(is_full, half, state.start), jnp.where(is_full, half, state.unread)
            state = state.replace(start=start, unread=unread)
        C = programs.chunk_size(self.model)
        state = jax.lax.while_loop(lambda s: s.unread < s.length - 1, lambda s: self.read(s, C)[0], state)
        return state.replace(unread=state.length - 1)

    def read(self, state: SequenceState, T: int) -> tuple[SequenceState, jax.Array]:
        """Read T tokens. Return the state and their hidden states x_1TD."""
        tokens_1T = jax.lax.dynamic_slice(state.tokens_X, (state.unread,), (T,))[None]
        positions_1T = state.unread - state.start + jnp.arange(T)[None]
        x_1TD, cache = programs.read(self.model, self.params, state.cache, tokens_1T, positions_1T)
        return state.replace(cache=cache, unread=state.unread + T), x_1TD

    def probabilities(self, x_1TD: jax.Array, sampling: SamplingRows, seen_TV: jax.Array) -> jax.Array:
        logits_1TV = apply_model(self.model, self.params, x_1TD, method="unembed")
        return sampling.probabilities(logits_1TV[0, :, : self.vocab_size], seen_TV)


@functools.partial(jax.jit, static_argnums=(0, 1, 10, 11), donate_argnums=(4, 5))
def _advance(model, draft, params, draft_params, t, d, key, sampling, stops, limit, vocab_size, G):
    """Generate at least up to `limit` tokens of t, the model's state, unless it stops.

    d is the draft's state: the same tokens, or the last of them.
    """
    target = _Model(*unstack_layers(model, params), vocab_size)
    drafter = _Model(*unstack_layers(draft, draft_params), vocab_size)
    prompt_length, each = t.length - t.count, jnp.arange(G)
    is_bounded = not has_unbounded_positions(model)

    def run_round(states: tuple[SequenceState, SequenceState]) -> tuple[SequenceState, SequenceState]:
        t, d = target.catch_up(states[0], 0), drafter.catch_up(states[1], G - 1)
        round_key, length = jax.random.fold_in(key, t.count), d.length

        # Draw G tokens from the draft. It may not have read the token before the last, so it first reads two.
        d, x_1TD = drafter.read(d.replace(unread=length - 2), 2)
        q, tokens, seen = [], [], [t.seen_1V]
        for i in range(G):
            if i:
                d, x_1TD = drafter.read(d, 1)
            q.append(drafter.probabilities(x_1TD[:, -1:], sampling, seen[-1]))
            (token,) = draw(q[-1], jax.random.fold_in(round_key, i)[None])
            d = d.replace(tokens_X=jax.lax.dynamic_update_slice(d.tokens_X, token[None], (length + i,)))
            tokens.append(token)
            seen.append(seen[-1].at[0, token].add(2))
        q_GV, tokens_G = jnp.concatenate(q), jnp.stack(tokens)

        # Read the last token and the G proposed. Token i should have been drawn from p_RV[i].
        t = t.replace(tokens_X=jax.lax.dynamic_update_slice(t.tokens_X, tokens_G, (t.length,)))
        t, x_1TD = target.read(t, G + 1)
        p_RV = target.probabilities(x_1TD, sampling, jnp.concatenate(seen))
        # If all before it are kept, token i is kept with probability min(1, p/q): u q < p, since q may be tiny.
        kept_key, last_key = jax.random.split(jax.random.fold_in(round_key, G))
        u_G = jax.random.uniform(kept_key, (G,))
        kept_G = u_G * q_GV[each, tokens_G] < p_RV[each, tokens_G]
        room = model.config.block_size - (t.length - t.start)  # positions after which nothing can be checked
        if is_bounded:
            kept_G &= each < room
        n = jnp.argmin(jnp.concatenate([kept_G, jnp.zeros(1, bool)]))  # up to the first that is rejected
        # After a rejection, draw from the positive part of p - q, which corrects the distribution. A token past the end
        # of the position table is dropped without a test. Then the next one is drawn from p, as after G kept tokens.
        is_rejected = n < G
        if is_bounded:
            is_rejected &= n < room
        rest_V = jnp.maximum(p_RV[n] - jnp.where(is_rejected, q_GV[jnp.minimum(n, G - 1)], 0.0), 0.0)
        # If p and q are equal up to rounding, nothing may be left: then draw from p.
        last = draw(jnp.where(rest_V.sum() > 0, rest_V, p_RV[n])[None], last_key[None])[0]

        # n tokens are kept, and the last follows them.
        order_R = jnp.arange(G + 1)
        new_R = jnp.where(order_R < n, jnp.append(tokens_G, 0), last)
        is_end_R = jnp.isin(new_R, stops) & (order_R <= n)
        return _accept(t, t.length, new_R, n, is_end_R), _accept(d, length, new_R, n, is_end_R)

    def is_unfinished(states: tuple[SequenceState, SequenceState]) -> jax.Array:
        return (states[0].length - prompt_length < limit) & ~states[0].stopped

    return jax.lax.while_loop(is_unfinished, run_round, (t, d))


def _accept(state: SequenceState, length: jax.Array, new_R: jax.Array, n: jax.Array, is_end_R: jax.Array):
    """Write n + 1 of the new tokens after the first `length`."""
    stopped = is_end_R.any()
    V = state.seen_1V.shape[1]  # out of range: dropped
    kept_R = jnp.where(jnp.arange(len(new_R)) <= n, new_R, V)
    return state.replace(
        tokens_X=jax.lax.dynamic_update_slice(state.tokens_X, new_R, (length,)),
        length=length + n + 1,
        unread=length + n,
        count=state.count + jnp.where(stopped, jnp.argmax(is_end_R), n + 1),
        stopped=state.stopped | stopped,
        seen_1V=state.seen_1V.at[0, kept_R].add(2, mode="drop"),
    )


def main(argv: list[str] | None = None) -> None:
    """Print a completion, and the seconds that it takes with the draft and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="directory of the run that decides")
    parser.add_argument("draft", help="directory of the run that proposes")
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        run, draft = load(options.run), load(options.draft)
        how = {"max_new_tokens": options.max_new_tokens, "greedy": options.greedy, "seed": options.seed}
        drafted, seconds = measure(functools.partial(sample, run, draft, [options.prompt], **how))
        _, alone = measure(functools.partial(run.sample, [options.prompt], **how))
    except UserError as error:
        parser.exit(2, f"{error}\n")
    print(f"{options.prompt}{drafted[0]}\n\nwith the draft {seconds:.2f} s, without {alone:.2f} s")


def measure(write: Callable[[], list[str]]) -> tuple[list[str], float]:
    """Return what a function writes, and the fewest seconds of three calls after one that compiles."""
    texts, times = write(), []
    for _ in range(3):
        start = time.perf_counter()
        write()
        times.append(time.perf_counter() - start)
    return texts, min(times)


if __name__ == "__main__":
    main()
