"""`jaxgpt chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Generator

import jax

from jaxgpt.cli.console import one_line, say
from jaxgpt.config.validate import Count, Size
from jaxgpt.data.tools import Message
from jaxgpt.errors import UserError, reason_of
from jaxgpt.parallel.signals import catch_signals
from jaxgpt.run import Run, load
from jaxgpt.sample import MAX_NEW_TOKENS, Precision, Sampling
from jaxgpt.sample.engine import Detokenizer, Engine, Request, prompt_key
from jaxgpt.sample.programs import cache_columns

CONTEXT = 4096  # tokens: a longer context takes memory that few conversations need
PREFIX_BYTES = 2**30  # bytes of host memory for the keys and values of earlier turns
EVERY = 4  # tokens that are drawn before they are shown and Ctrl-C is looked at
HELP = """\
/system TEXT   begin anew with another system prompt
/regenerate    answer the last turn again
/reset         begin anew
/save FILE     append the conversation to a file of JSON lines
/exit          end, as Ctrl-D does. Ctrl-C stops an answer"""


def chat(
    run: str | None = None,
    *,
    average: Count | None = None,
    system: str | None = None,
    max_new_tokens: Size = MAX_NEW_TOKENS,
    context: Size = CONTEXT,
    sampling: Sampling = Sampling(),  # noqa: B008, it is frozen
    stop: tuple[str, ...] = (),
    seed: int = 0,
    weights: Precision | None = None,
    cache_dtype: Precision | None = None,
) -> None:
    """Talk with a model, in the terminal.

    Each line is a turn, also of a standard input that is no terminal. /help lists what else can be typed.

    Args:
        system: the system prompt. None means none of your own
        max_new_tokens: most tokens of an answer
        context: tokens that the model sees of the conversation, at most its own context. Older turns are left out
        sampling: how to draw the next token
        stop: end an answer before this text
    """
    loaded = load(run, average=average).for_decoding(weights, donate=True)
    if sampling.temperature is None:
        temperature = loaded.experiment.train.sample_temperature
        sampling = dataclasses.replace(sampling, temperature=temperature)
    conversation = Conversation(loaded, system, min(context, loaded.model.config.block_size), cache_dtype)
    options = {"max_new_tokens": max_new_tokens, "sampling": sampling, "stop": stop, "seed": seed}
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401, it gives `input` the editing of lines and their history

        say("/help lists what can be typed, Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except KeyboardInterrupt:  # at the prompt it clears the line
            print()
            continue
        except EOFError:
            return
        if line == "/exit":
            return
        try:
            if obey(conversation, line):
                show_answer(conversation.answer(**options))
        except UserError as e:
            say(one_line(str(e)))


def obey(conversation: Conversation, line: str) -> bool:
    """Carry out what was typed, and return whether the model is to answer."""
    word, _, rest = line.partition(" ")
    messages, rest = conversation.messages, rest.strip()
    if not line.startswith("/"):
        if line:
            messages.append({"role": "user", "content": line})
            conversation.tries = 0
        return bool(line)
    if word == "/regenerate":
        if not messages or messages[-1]["role"] != "assistant":
            raise UserError("there is no answer yet")
        messages.pop()
        conversation.tries += 1
        return True
    if word in ("/reset", "/system"):
        conversation.begin(rest if word == "/system" else conversation.system)
        say("a new conversation")
    elif word == "/save" and rest:
        save(messages, rest)
    else:
        say(HELP)
    return False


def show_answer(pieces: Generator[str]) -> None:
    """Print an answer as it is drawn, up to Ctrl-C. A second one ends the program."""
    # No exception may come between a step of the engine and its result, since the state before it is gone.
    caught = None
    with catch_signals() as stop, contextlib.closing(pieces):
        for text in pieces:
            print(text, end="", flush=True)
            caught = stop(None)
            if caught:
                print(" ...", end="")
                break
        print(flush=True)
    if caught == "SIGTERM":
        raise SystemExit(0)


def save(messages: list[Message], path: str) -> None:
    """Append a conversation to a file, as one line that `--data.path` reads."""
    line = json.dumps({"messages": messages}, ensure_ascii=False)
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as e:
        raise UserError(f"cannot write {path}: {reason_of(e)}") from None
    say(f"{len(messages)} messages are in {path}")


class Conversation:
    """The messages so far, and an engine that keeps the keys and values of earlier turns."""

    def __init__(self, run: Run, system: str | None, context: int, cache_dtype: Precision | None):
        """Start with no message but the system prompt. context: tokens that the model sees."""
        self.run, self.context = run, context
        self._stop_tokens = run.prompt_format.stop_tokens(chat=True)
        self._engine = Engine(
            run.model,
            run.params,
            slots=1,
            vocab_size=run.tokenizer.vocab_size,
            cache_dtype=cache_dtype,
            columns=cache_columns(run.model, context),
            prefix_bytes=PREFIX_BYTES,
        )
        self.begin(system)

    def begin(self, system: str | None) -> None:
        """Begin anew. system: the system prompt."""
        self.system, self.tries = system, 0
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []

    def answer(self, *, max_new_tokens: int, sampling: Sampling, stop: tuple[str, ...], seed: int) -> Generator[str]:
        """Yield the model's answer to the last message in pieces, and keep it, or what of it is read."""
        try:
            ids, most = self._fit(max_new_tokens)
        except UserError:
            self.messages.pop()
            raise
        request = Request(
            prompt=ids,
            key=prompt_key(jax.random.key(seed), ids, earlier=self.tries),
            max_new_tokens=most,
            sampling=sampling,
            stop_tokens=self._stop_tokens,
        )
        slot, text, finish = self._engine.submit(request), "", None
        detokenizer = Detokenizer(self.run.tokenizer, stop, ids)
        try:
            while finish is None and not detokenizer.stopped:
                for piece in self._engine.step(EVERY):
                    finish = piece.finish
                    new = detokenizer.push(piece.tokens)
                    new += detokenizer.rest() if finish else ""
                    text += new
                    yield new
        finally:
            if finish is None:
                self._engine.cancel(slot)
            self.messages.append({"role": "assistant", "content": text})
        if finish == "length":
            say(f"\n(cut after {most:,} tokens: --max-new-tokens and --context allow no more)")

    def _fit(self, max_new_tokens: int) -> tuple[list[int], int]:
        """Return the ids of the conversation and the tokens of an answer, which fit into the context together.

        The oldest turns are left out until a quarter of the context, or `max_new_tokens`, is free.
        """
        first = 1 if self.system else 0
        start, turns = self.messages[:first], self.messages[first:]
        encode = self.run.prompt_format.encode_messages
        most = self.context - min(max_new_tokens, self.context // 4)
        ids, left_out = encode(start + turns), 0
        while len(ids) > most:
            left_out += 2
            if left_out >= len(turns):
                raise UserError(f"the turn has {len(ids):,} tokens: needs at most {most:,}, or a larger --context")
            ids = encode(start + turns[left_out:])
        if left_out:
            say(f"(the first {left_out} messages no longer fit into {self.context:,} tokens, and are not seen)")
        return ids, min(max_new_tokens, self.context + 1 - len(ids))
