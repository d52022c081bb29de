"""The model that is served: its run, and what is fixed before the first request."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

from jaxgpt.config.validate import short
from jaxgpt.data.chat.template import Message
from jaxgpt.errors import UserError
from jaxgpt.run import Run
from jaxgpt.sample.state import check_ids
from jaxgpt.serve.choice import token_texts
from jaxgpt.serve.errors import RequestError
from jaxgpt.serve.parameters import Limits, Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A run and its limits. Any thread may call its methods."""

    run: Run
    name: str
    fingerprint: str  # of the parameters: the same seed may give another text under another one
    limits: Limits
    temperature: float  # the default
    stop_tokens: tuple[int, ...]
    chat_stop_tokens: tuple[int, ...] | None  # None: no chat
    why_no_chat: str | None
    text_of: Callable[[int], str]

    def encode(self, prompt: Prompt) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return (ids to continue, ids for the encoder or None) of a prompt.

        Raises `RequestError` for text or ids that the model cannot read.
        """
        with _refusing("prompt"):
            if isinstance(prompt, str):
                (ids,), sources = self.run.prompt_format.encode([prompt], chat=False)
                return self._check(ids, "prompt"), None if sources is None else self._check(sources[0], "prompt")
            if self.run.model.config.n_encoder_layer:
                raise UserError("prompt has token ids: a model with an encoder needs a text")
            return self._check(check_ids(self.run.model, prompt, "prompt").tolist(), "prompt"), None

    def encode_messages(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the ids of a conversation. Raises `RequestError` for one that the model cannot read."""
        if self.chat_stop_tokens is None:
            raise RequestError(f"{self.name} cannot chat: {self.why_no_chat}", code="no_chat")
        with _refusing("messages"):
            ids = self.run.prompt_format.encode_messages(messages)
        return self._check(ids, "messages")

    def tokenize(self, text: str, *, prefix: bool) -> list[int]:
        """Return the ids of a text; a text that is one special token is encoded as that.

        prefix: with what the tokenizer puts before texts.
        """
        tokenizer = self.run.tokenizer
        if text in tokenizer.specials:
            return [tokenizer.specials[text]]
        with _refusing("prompt"):
            ids = tokenizer.encode(text).tolist()
        return [*tokenizer.prefix, *ids] if prefix else ids

    def decode(self, ids: Sequence[int], param: str) -> str:
        """Return the text of ids. Raises `RequestError` for ids that the tokenizer lacks."""
        known = self.run.tokenizer.vocab_size
        if any(not 0 <= i < known for i in ids):
            raise RequestError(
                f"{param} has ids from {short(min(ids))} to {short(max(ids))}: needs ids from 0 to {known - 1}",
                param=param,
            )
        return self.run.tokenizer.decode(ids)

    def _check(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        most = self.limits.block_size
        if not 1 <= len(ids) <= most:
            raise RequestError(
                f"the {param} has {len(ids):,} tokens, and the context of {self.name} is {most:,}: needs 1 to {most:,}",
                param=param,
                code="context_length_exceeded" if ids else None,
            )
        known = self.run.tokenizer.vocab_size
        if max(ids) >= known:
            raise RequestError(f"the {param} has the id {max(ids)}: needs ids from 0 to {known - 1}", param=param)
        return tuple(ids)


def serve_run(run: Run, *, slots: int, queue: int) -> Served:
    """Return a run as it is served.

    slots: rows that are decoded together. queue: rows that may wait.
    """
    try:
        chat, why = tuple(run.prompt_format.stop_tokens(chat=True)), None
    except UserError as e:  # characters or tokens of the template that the tokenizer lacks
        chat, why = None, str(e)
    return Served(
        run=run,
        name=run.directory.resolve().name,
        fingerprint=f"step-{run.step}",
        limits=Limits(block_size=run.model.config.block_size, choices=slots, rows=queue),
        temperature=run.experiment.train.sample_temperature,
        stop_tokens=tuple(run.prompt_format.stop_tokens(chat=False)),
        chat_stop_tokens=chat,
        why_no_chat=why,
        text_of=token_texts(run.tokenizer),
    )


@contextlib.contextmanager
def _refusing(param: str) -> Iterator[None]:
    """Turn a `UserError` into a `RequestError` that names the parameter."""
    try:
        yield
    except RequestError:
        raise
    except UserError as e:
        raise RequestError(str(e), param=param) from None
