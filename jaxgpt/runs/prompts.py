"""Encode prompts in the format of a run's training data, and find where completions end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxgpt.data.conversations import encode_messages, find_end_of_turn
from jaxgpt.data.pairs import TARGET_END, encode_pair_prompt
from jaxgpt.data.template import ChatTemplate, Message, find_template, fingerprint
from jaxgpt.data.tokenizer import Tokenizer, find_start_token
from jaxgpt.errors import UserError
from jaxgpt.hf.source import end_tokens
from jaxgpt.runs.directory import RunMetadata


@dataclasses.dataclass(frozen=True)
class PromptFormat:
    """Encode prompts as plain text, as the user's turn of a conversation, or as the source of a pair."""

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

    def encode(self, prompts: Sequence[str], chat: bool) -> tuple[list[list[int]], list[list[int]] | None]:
        """Return (ids to continue, ids for the encoder: None for a model without one). chat: as user's turns."""
        if chat:
            return [self.encode_messages([{"role": "user", "content": prompt}]) for prompt in prompts], None
        if not self.metadata.experiment.data.is_pairs:
            ids = [[*self.tokenizer.prefix, *self.tokenizer.encode(prompt).tolist()] for prompt in prompts]
            return [row or [find_start_token(self.tokenizer)[0]] for row in ids], None
        pairs = [encode_pair_prompt(prompt, self.tokenizer) for prompt in prompts]
        if self.metadata.experiment.model.n_encoder_layer:
            return [target for _, target in pairs], [source for source, _ in pairs]
        return [[*source, *target] for source, target in pairs], None

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation and of the header of the assistant's turn."""
        return encode_messages(self.template, self.tokenizer, messages)

    def stop_tokens(self, chat: bool) -> list[int]:
        """Return the ids that end a completion. chat: also the end of the assistant's turn."""
        ends = [self.tokenizer.end_of_text, find_end_of_turn(self.template, self.tokenizer) if chat else None]
        if self.metadata.experiment.data.is_pairs:
            ends.append(int(self.tokenizer.encode(TARGET_END)[0]))
        # A run with init_from was trained on other data, perhaps with other stop tokens.
        if self.metadata.experiment.train.init_from is None:
            ends += [end for end in end_tokens(self.metadata.directory) if 0 <= end < self.tokenizer.vocab_size]
        return list(dict.fromkeys(end for end in ends if end is not None))
