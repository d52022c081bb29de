"""Tasks whose answers a program can check: prompts, one right answer for each, and a reward of a completion.

It is no page: `grpo_arithmetic.py` trains with it. A task of your own is a subclass of `TaskConfig` with `prompt` and
`answer`, or with `reward`, where several answers are right. Its rows are prompts with their answers (SFT).
`rollouts.RolloutConfig` makes rows of the model's own completions instead.

Held out    One prompt in ten, by the CRC-32 of its text, is in the validation split only, whatever the seed is.
Validation  `AccuracyConfig` measures 1 - accuracy: the share of held-out prompts whose greedy completion is not the right
            answer. It needs no sampling: a greedy completion is the answer if and only if, after the prompt and any
            number of tokens of the answer, the most probable token is the answer's next one.
"""

import dataclasses
import random
import string
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from logprobs import apply_model, count_segment, sum_segments

from jaxgpt import DataConfig, GPTConfig, ObjectiveConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import PositiveInt, short
from jaxgpt.data import template as chat
from jaxgpt.data.conversations import encode_messages, find_end_of_turn
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.tokenizer import CharTokenizer, Tokenizer, fingerprint, open_tokenizer
from jaxgpt.train import LossFn

# Streams of prompts: those of rollouts do not begin with the examples of SFT.
EXAMPLES, HELD_OUT, ROLLOUTS = range(3)
TRIES = 1000  # prompts drawn to find one of a split


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig(DataConfig):
    """Prompts with an answer each, which a subclass makes. Both together have to fit into `block_size` tokens."""

    examples: PositiveInt | None = None  # different prompts to train on. None means as many as the task has
    val_prompts: PositiveInt = 256  # prompts to validate on
    # prompts are messages of a user, and completions messages of the assistant, in the chat template of the tokenizer
    chat: bool = False

    alphabet = "\n" + string.printable[:95]  # of the tokenizer "char"
    end = "\n"  # ends a completion: one token, which no answer has

    @property
    def is_packed(self) -> bool:
        """Return that only parts of a row are targets."""
        return True

    def prompt(self, rng: np.random.Generator) -> str:
        """Return a random prompt, drawn with `rng` alone. A subclass has this method."""
        raise NotImplementedError

    def answer(self, prompt: str) -> str:
        """Return a right completion of a prompt, for SFT and for validation."""
        raise NotImplementedError

    def reward(self, prompt: str, completion: str) -> float:
        """Return how good a completion is, a finite number: 1 if it is the answer, else 0, unless a subclass says more."""
        return float(completion == self.answer(prompt))

    def draw_prompt(self, number: int, seed: int, stream: int) -> str:
        """Return a prompt of a stream, which depends on these arguments only."""
        rng, held_out = np.random.default_rng([stream, seed, number]), stream == HELD_OUT
        for _ in range(TRIES):
            prompt = self.prompt(rng)
            if (zlib.crc32(prompt.encode()) % 10 == 0) == held_out:
                return prompt
        raise UserError(
            f"{type(self).__name__}.prompt: {TRIES} prompts, such as {short(prompt)}, have none for a split"
        )

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset: prompts with their answers."""
        tokenizer = CharTokenizer(self.alphabet) if self.tokenizer == "char" else open_tokenizer(self.tokenizer, "")
        if tokenizer is None:
            raise UserError(
                "data.tokenizer=bpe: a task has no text to train one on: take char, byte or a tokenizer.json"
            )
        made_of = {"task": type(self).__name__, "version": 1, "tokenizer_sha256": fingerprint(tokenizer)}
        form = Form(self, tokenizer)
        if form.template is not None:
            made_of["template_sha256"] = chat.fingerprint(form.template)
        train, val = (Examples(self, form, model.block_size, stream) for stream in (EXAMPLES, HELD_OUT))
        val.row(0, model.block_size, 0)  # so that a prompt that does not fit is refused now
        config = None if form.template is None else form.template.config()
        return Dataset(train=train, val=val, tokenizer=tokenizer, fingerprint=made_of, tokenizer_config=config)


class Form:
    """How prompts and completions become tokens: as they are, or by a chat template."""

    def __init__(self, task: TaskConfig, tokenizer: Tokenizer):
        """Find the token that ends a completion. Raises `UserError` if there is none."""
        self.tokenizer, self.template = tokenizer, None
        if task.chat:
            directory = None if task.tokenizer_file is None else Path(task.tokenizer_file).parent
            self.template = chat.find_template(tokenizer, directory)
            end = find_end_of_turn(self.template, tokenizer)
            if end is None:
                raise UserError("no token ends a turn of this chat template: put a special token behind an answer")
            self.end = end
        elif len(ids := tokenizer.encode(task.end)) == 1:
            self.end = int(ids[0])
        else:
            raise UserError(f"this tokenizer has no single token for {task.end!r}, which ends a completion")

    def encode(self, prompt: str) -> np.ndarray:
        """Return the ids of a prompt, up to where its completion begins."""
        if self.template is None:
            return self.tokenizer.encode(prompt)
        return np.array(encode_messages(self.template, self.tokenizer, [{"role": "user", "content": prompt}]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the prompt that `encode` made ids of."""
        text = self.tokenizer.decode(ids)
        if self.template is None:
            return text
        before, after = self.template.write([{"role": "user", "content": "\0"}], prompt=True).text.split("\0")
        return text.removeprefix(before).removesuffix(after)

    def encode_answer(self, answer: str) -> np.ndarray:
        """Return the ids of a completion, with its end."""
        return np.append(self.tokenizer.encode(answer), self.end)


class Examples:
    """Rows of one prompt and its answer."""

    def __init__(self, task: TaskConfig, form: Form, block_size: int, stream: int):
        self.task, self.form, self.stream = task, form, stream
        self.count = task.val_prompts if stream == HELD_OUT else task.examples
        self.length = block_size * (self.count or 2**20)

    def __len__(self) -> int:
        """Return the number of tokens to report; without a number of examples the stream has no end."""
        return self.length

    def row(self, n: int, block_size: int, seed: int) -> tuple[np.ndarray, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T) of the n-th example."""
        prompt = self.task.draw_prompt(n, seed, self.stream)
        return make_row(self.form.encode(prompt), self.form.encode_answer(self.task.answer(prompt)), block_size, prompt)

    def training_rows(self, *, block_size: int, seed: int):
        if self.count is None:
            return lambda n: self.row(n, block_size, seed)
        # The examples are the same with each seed; only their order differs.
        return lambda n: self.row(int(np.random.default_rng([seed, n]).integers(self.count)), block_size, 0)

    def validation_rows(self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int):
        rows = self.count if max_tokens is None else max(1, min(self.count, max_tokens // block_size))

        def read(n: int) -> tuple[np.ndarray, ...]:
            inputs, targets, mask, segments = self.row(n, block_size, 0)
            return inputs, targets, mask & (n < rows), segments

        return rows, read


def make_row(prompt: np.ndarray, completion: np.ndarray, block_size: int, text: str) -> tuple[np.ndarray, ...]:
    """Return (inputs_T, targets_T, mask_T, segments_T), in which the completion's tokens are targets."""
    ids, first = np.concatenate([prompt, completion]), len(prompt) - 1
    if not len(prompt) or len(ids) > block_size + 1:
        raise UserError(
            f"{short(text)} has {len(prompt)} tokens and its completion {len(completion)}: block_size={block_size} needs "
            f"1 or more, and at most {block_size + 1} together: raise --model.block-size (and --data.row), or draw shorter prompts"
        )
    inputs, targets, mask, segments = np.zeros((4, block_size), np.int32)
    inputs[: len(ids) - 1], targets[: len(ids) - 1], segments[: len(ids) - 1] = ids[:-1], ids[1:], 1
    mask[first : len(ids) - 1] = 1
    return inputs, targets, mask.astype(bool), segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyConfig(ObjectiveConfig):
    """The objective that follows it among the bases of a class, validated by the share of wrong answers.

    Alone it trains on the right answers (SFT): `class PolicyConfig(AccuracyConfig, GRPOConfig)` trains with GRPO.
    """

    unit = "share of wrong answers"

    def make_loss(self, model: Any, **options: Any) -> LossFn:
        """Return the loss. Arguments: see `jaxgpt.loss.make_loss`."""
        train_loss = super().make_loss(model, **options)

        def loss(params: dict, batch: Batch, key: Any) -> Any:
            if key is not None:
                return train_loss(params, batch, key)
            logits_BTV, _ = apply_model(model, params, batch, None)
            is_wrong_BT = batch.mask_BT & (logits_BTV.argmax(axis=-1) != batch.targets_BT)
            wrong_BS = sum_segments(is_wrong_BT.astype(jnp.float32), batch.segments_BT)
            _, completions = count_segment(batch.mask_BT, batch.segments_BT)
            return jnp.sum(wrong_BS > 0, dtype=jnp.float32), completions, {}

        return loss


# The tasks ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(TaskConfig):
    """Sums such as 27+85= of two numbers whose units add up to more than nine, so that there is a carry."""

    digits: PositiveInt = 2  # most digits of each number

    alphabet = "\n+0123456789="

    def prompt(self, rng: np.random.Generator) -> str:
        """Return a sum with a carry."""
        a, b = (int(x) for x in rng.integers(10**self.digits, size=2))
        units = int(rng.integers(1, 10)), int(rng.integers(10))
        units = units[0], units[1] if sum(units) > 9 else 10 - units[0] + int(rng.integers(units[0]))
        return f"{a // 10 * 10 + units[0]}+{b // 10 * 10 + units[1]}="

    def answer(self, prompt: str) -> str:
        """Return the sum."""
        a, b = prompt.removesuffix("=").split("+")
        return str(int(a) + int(b))


FORMS = {"upper": (str.upper, ";"), "title": (str.title, " "), "back": (lambda word: word[::-1], "-")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormatConfig(TaskConfig):
    """Words to write as a line of a given form, such as `upper|cat,dog>` for CAT;DOG. Each part is worth a share."""

    words: PositiveInt = 3  # most words of a prompt

    def prompt(self, rng: np.random.Generator) -> str:
        """Return the name of a form and words of two to four letters."""
        words = ["".join(rng.choice(list("abcde"), rng.integers(2, 5))) for _ in range(rng.integers(1, self.words + 1))]
        return f"{rng.choice(list(FORMS))}|{','.join(words)}>"

    def answer(self, prompt: str) -> str:
        """Return the line."""
        name, _, words = prompt.removesuffix(">").partition("|")
        change, join = FORMS[name]
        return join.join(map(change, words.split(",")))

    def reward(self, prompt: str, completion: str) -> float:
        """Return 1 for the line, else half the share of its words that are in their places, with the right joints."""
        right, join = self.answer(prompt), FORMS[prompt.partition("|")[0]][1]
        if completion == right:
            return 1.0
        words, got = right.split(join), completion.split(join)
        return 0.5 * sum(a == b for a, b in zip(words, got, strict=False)) / max(len(words), len(got))


GYM_ENTRIES: dict[str, dict] = {}  # by prompt: a reward needs more of an entry than its text
MOST_ENTRIES = 2**14  # more than are read ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymConfig(TaskConfig):
    """A task of reasoning-gym (arXiv:2505.24760) by its name, with its rewards. It needs `pip install reasoning-gym`."""

    task: str = "chain_sum"  # name of a data set of reasoning-gym
    tokenizer: str = "byte"  # as in `DataConfig`. Questions have any character, and bytes spell all

    end = "\x03"  # answers may have several lines

    def prompt(self, rng: np.random.Generator) -> str:
        """Return the question of a random entry."""
        try:
            import reasoning_gym
        except ImportError:
            raise UserError("GymConfig needs the package reasoning-gym: pip install reasoning-gym") from None
        seed = int(rng.integers(2**31))
        state = random.getstate()  # some of its tasks draw from the global generator
        try:
            entry = reasoning_gym.create_dataset(self.task, size=1, seed=seed)[0]
        except ValueError as e:
            raise UserError(f"data.task={self.task!r}: {e}") from None
        finally:
            random.setstate(state)
        if len(GYM_ENTRIES) > MOST_ENTRIES:
            GYM_ENTRIES.pop(next(iter(GYM_ENTRIES)))
        GYM_ENTRIES[prompt := f"{entry['question']}\n"] = entry | {"task": self.task}
        return prompt

    def answer(self, prompt: str) -> str:
        """Return the entry's answer."""
        return str(GYM_ENTRIES[prompt]["answer"])

    def reward(self, prompt: str, completion: str) -> float:
        """Return the score of reasoning-gym, 0 to 1."""
        import reasoning_gym

        return float(reasoning_gym.get_score_answer_fn(self.task)(completion, GYM_ENTRIES[prompt]))
