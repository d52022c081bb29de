"""From the parameters of a request to the rows that the scheduler decodes, and from its updates to deltas."""

from __future__ import annotations

import collections
import dataclasses
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

from jaxgpt.serve.choice import Choice, Delta
from jaxgpt.serve.errors import RequestError
from jaxgpt.serve.metrics import Metrics
from jaxgpt.serve.parameters import ChatParameters, CompletionParameters
from jaxgpt.serve.responses import ChatFormat, CompletionFormat, Format, Usage
from jaxgpt.serve.scheduler import Row, Ticket
from jaxgpt.serve.served import Served


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """The choices of one request."""

    format: Format
    rows: list[Row]
    choices: list[Choice]
    echoes: list[str | None] | None = None  # texts of the prompts, None for one that was given as ids; None: no echo
    n: int  # choices of each prompt
    top: int  # alternatives for each token

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of all prompts, each counted once."""
        return sum(len(row.prompt) + len(row.source or ()) for row in self.rows[:: self.n])

    def usage(self, cached: Sequence[int]) -> Usage:
        """Return the numbers of tokens. cached: of each row's prompt."""
        completion = sum(choice.num_tokens for choice in self.choices)
        return Usage(self.prompt_tokens, completion, sum(cached[:: self.n]))


def plan_completion(served: Served, parameters: CompletionParameters) -> Generation:
    """Return the choices of `/v1/completions`: n of the first prompt, n of the second, and so on."""
    p, rows, echoes = parameters, [], []
    seed, earlier = _seed(p.seed), collections.Counter[object]()
    for prompt in p.prompts:
        ids, source = served.encode(prompt)
        if source is not None and p.echo:
            raise RequestError("echo is for models without an encoder: leave it out", param="echo")
        for _ in range(p.n):
            row = Row(
                prompt=ids,
                source=source,
                seed=seed,
                earlier=earlier[ids, source],
                max_new_tokens=p.max_tokens,
                sampling=p.sampling(served.temperature),
                stop_tokens=(*served.stop_tokens, *p.stop_token_ids),
                top_logprobs=p.logprobs,
                scored=p.echo and p.logprobs is not None,
            )
            earlier[ids, source] += 1
            rows.append(row)
            echoes.append(prompt if isinstance(prompt, str) else None)
    return Generation(
        format=CompletionFormat(p.logprobs),
        rows=rows,
        choices=[_choice(served, p.stops, p.logprobs) for _ in rows],
        echoes=echoes if p.echo else None,
        n=p.n,
        top=p.logprobs or 0,
    )


def plan_chat(served: Served, parameters: ChatParameters) -> Generation:
    """Return the choices of `/v1/chat/completions`."""
    p, top = parameters, (parameters.top_logprobs or 0) if parameters.logprobs else None
    ids, seed = served.encode_messages(p.conversation), _seed(p.seed)
    rows = [
        Row(
            prompt=ids,
            seed=seed,
            earlier=number,
            max_new_tokens=p.max_new_tokens or served.limits.block_size,
            sampling=p.sampling(served.temperature),
            stop_tokens=served.chat_stop_tokens or (),
            top_logprobs=top,
        )
        for number in range(p.n)
    ]
    return Generation(
        format=ChatFormat(p.logprobs),
        rows=rows,
        choices=[_choice(served, p.stops, top) for _ in rows],
        n=p.n,
        top=top or 0,
    )


async def iter_deltas(
    generation: Generation, ticket: Ticket, metrics: Metrics, cached: list[int]
) -> AsyncGenerator[tuple[int, Delta]]:
    """Yield (index of the choice, what is new).

    cached: takes the number of reused tokens of each row's prompt. The slots are freed when the iterator is closed.
    """
    last: list[float | None] = [None] * len(generation.rows)  # time of each row's last update
    start = time.perf_counter()
    try:
        async for update in ticket.updates():
            choice, now, before = generation.choices[update.row], time.perf_counter(), last[update.row]
            if update.tokens:
                metrics.tokens_after(now - (before or start), len(update.tokens), is_first=before is None)
                last[update.row] = now
            if generation.echoes is not None and not choice.begun:
                ids, text = generation.rows[update.row].prompt, generation.echoes[update.row]
                yield update.row, choice.echo(ids, text, update.prompt, generation.top)
            cached[update.row] = max(cached[update.row], update.cached_tokens)
            delta = choice.push(update)
            if choice.finish is not None:
                ticket.finish(update.row)  # a stop string, which the engine does not know
            if any(delta):
                yield update.row, delta
    finally:
        ticket.finish()


def _choice(served: Served, stops: Sequence[str], logprobs: int | None) -> Choice:
    return Choice(served.run.tokenizer, served.text_of, stops, logprobs=logprobs is not None)


def _seed(seed: int | None) -> int:
    return secrets.randbits(32) if seed is None else seed
