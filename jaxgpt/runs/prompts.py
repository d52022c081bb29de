"""Encode prompts in the format of a run's training data, and find where completions end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxgpt.data.conversations import encode_messages, find_end_of_turn
from jaxgpt.data.template import ChatTemplate, Message, find_template, fingerprint
from jaxgpt.data.tokenizer import Tokenizer, find_start_token
from jaxgpt.errors import UserError
from jaxgpt.hf.source import end_tokens
from jaxgpt.runs.directory import RunMetadata


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Encode prompts as plain text, or as the user's turn of a conversation."""

    metadata: RunMetadata
    tokenizer: Tokenizer

    @functools.cached_property
    def template(self) -> ChatTemplate:
        """Return the chat template of training, which is the tokenizer's own or the default of `data.template`."""
        template = find_template(self.tokenizer, self.metadata.directory)
        known = self.metadata.data.get("template_sha256")
        if known is not None and known != fingerprint(template):
            raise UserError(
                f"the chat template in {self.metadata.directory / 'tokenizer_config.json'} is not the one that the run "
                "was trained with: put back the file with the SHA-256 in experiment.json"
            )
        return template

    def encode(self, prompts: Sequence[str], chat: bool) -> list[list[int]]:
        """Return the ids of each prompt. chat: as user's turns."""
        if chat:
            return [self.encode_messages([{"role": "user", "content": prompt}]) for prompt in prompts]
        ids = [[*self.tokenizer.prefix, *self.tokenizer.encode(prompt).tolist()] for prompt in prompts]
        return [row or [find_start_token(self.tokenizer)[0]] for row in ids]

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation and of the header of the assistant's turn."""
        return encode_messages(self.template, self.tokenizer, messages)

    def stop_tokens(self, chat: bool) -> list[int]:
        """Return the ids that end a completion. chat: also the end of the assistant's turn."""
        ends = [self.tokenizer.end_of_text, find_end_of_turn(self.template, self.tokenizer) if chat else None]
        # A run with init_from was trained on other data, perhaps with other stop tokens.
        if self.metadata.experiment.train.init_from is None:
            ends += [end for end in end_tokens(self.metadata.directory) if 0 <= end < self.tokenizer.vocab_size]
        return list(dict.fromkeys(end for end in ends if end is not None))
