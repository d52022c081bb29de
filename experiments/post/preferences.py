"""Pairs of a chosen and a rejected answer to one prompt: read, encoded, packed, and scored by a reference model.

It is no page: `dpo.py` imports it. A line of a .jsonl file has TRL's fields, all three as messages or all three as texts:

    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", "content": "4."}], "rejected": ...}
    {"prompt": "2 + 2 = ", "chosen": "4.", "rejected": "Five, I would say."}

Messages are written with the chat template. Texts are not, and end with the tokenizer's end-of-text token if it has one.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from logprobs import token_logprobs

from jaxgpt import DataConfig, GPTConfig, UserError
from jaxgpt.batch import Batch
from jaxgpt.config.validate import Count, short
from jaxgpt.data.conversations import Conversations, tokenise
from jaxgpt.data.pipeline import Dataset
from jaxgpt.data.template import ChatTemplate, Written, check_message, find_template, index_specials
from jaxgpt.data.template import fingerprint as template_fingerprint
from jaxgpt.data.tokenizer import Tokenizer, fingerprint, load_tokenizer
from jaxgpt.files import cache_directory, make_cache, parse_json, read_lines, write_whole
from jaxgpt.parallel.strategy import with_shardings
from jaxgpt.runs.directory import read_metadata
from jaxgpt.runs.pretrained import Weights, load_base, open_weights

FIELDS = ("prompt", "chosen", "rejected")
LONGEST_LINE = 2**24  # bytes
Pair = dict[str, Any]  # by FIELDS: three lists of messages, or three texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferencesConfig(DataConfig):
    """Pairs of answers in a .jsonl file, `path`. Without one, pairs that `make_pairs` makes."""

    corpus: str = "sums.jsonl"  # name of the made pairs, which have no file
    reference: str | None = None  # a run, or the directory of a model. None means the weights that training starts from
    reference_batch: Count = 16  # rows that the reference reads at once

    @property
    def is_packed(self) -> bool:
        """Return that rows hold several texts."""
        return True

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset: the last `val_fraction` of the pairs are for validation."""
        if self.tokenizer_file is None:
            raise UserError("pairs teach a model that answers already: name it with --train.init-from")
        tokenizer, folder = load_tokenizer(self.tokenizer_file), Path(self.tokenizer_file).parent
        name, template = self.path or self.corpus, find_template(tokenizer, folder)
        encoded = [
            encode_pair(pair, where, tokenizer, template, model.block_size)
            for where, pair in (make_pairs() if self.path is None else read_pairs(self.path))
        ]
        train = int(len(encoded) * (1.0 - self.val_fraction))
        if not 0 < train < len(encoded):
            raise UserError(f"{name} has {len(encoded)} pairs: needs one to train on and one to validate on")
        splits = [Preferences(part, model.block_size) for part in (encoded[:train], encoded[train:])]
        longest = max(int(split.needed.max()) for split in splits)
        if not all(len(split.sizes) for split in splits):
            raise UserError(f"{name}: no pair fits into block_size={model.block_size}, both answers with their prompts: "
                            f"the longest needs {longest}")  # fmt: skip
        weights = self._open_reference(model, folder, tokenizer, resumed=known is not None)
        score = make_scorer(weights, model.block_size)
        for split in splits:
            split.score(score, self.reference_batch)
        digest = hashlib.sha256(b"".join(x.tobytes() for pair in encoded for x in pair))
        left_out = sum(split.left_out for split in splits)
        note = f"{len(splits[0].sizes):,} training and {len(splits[1].sizes):,} validation pairs, in rows of {model.block_size} "
        note += f"tokens that are {splits[0].filled:.1%} full; the reference is {weights.directory}"
        more = f"{left_out:,} pairs need more than block_size={model.block_size} and are left out; {longest} holds all"
        return Dataset(
            train=splits[0],
            val=splits[1],
            tokenizer=tokenizer,
            fingerprint={
                "pairs": digest.hexdigest(),
                "train_pairs": train,
                "reference_sha256": weights.sha256(),
                "tokenizer_sha256": fingerprint(tokenizer),
                "template_sha256": template_fingerprint(template),
            },
            tokenizer_config=template.config(),
            notes=(note, more) if left_out else (note,),
        )

    def _open_reference(self, model: GPTConfig, folder: Path, tokenizer: Tokenizer, *, resumed: bool) -> Weights:
        """Open the reference's weights. Raises `UserError` unless it has the tokenizer, and can read these rows."""
        if self.reference is None and resumed:  # the tokenizer is now the run's own
            return load_base(read_metadata(folder))
        try:
            weights = open_weights(self.reference or str(folder))
        except UserError as e:
            raise UserError(f"data.reference: {e}") from None
        if fingerprint(load_tokenizer(weights.tokenizer)) != fingerprint(tokenizer):
            raise UserError(f"data.reference: {weights.directory} has another tokenizer than {self.tokenizer}: name a "
                            "model of the same family")  # fmt: skip
        found, own = weights.config, model
        if own.vocab_size not in (None, found.vocab_size) or found.block_size < own.block_size:
            raise UserError(
                f"data.reference: {weights.directory} has {found.vocab_size} tokens and a context of {found.block_size}, "
                f"needs {own.vocab_size} and at least {own.block_size}"
            )
        return weights

    def shape_batch(self, tokens_BT: jax.ShapeDtypeStruct) -> Batch:
        """Return the shapes of a training batch: those of packed documents, and what the reference said of them."""
        scores_BT = jax.ShapeDtypeStruct(tokens_BT.shape, np.float32, sharding=tokens_BT.sharding)
        return super().shape_batch(tokens_BT)._replace(extras={"reference_logprobs_BT": scores_BT})


def read_pairs(path: str | Path) -> Iterator[tuple[str, Pair]]:
    """Yield ("FILE:LINE", pair) for the lines that are not blank. Raises `UserError` for one that is no pair."""
    for where, raw in read_lines(path, LONGEST_LINE, "cut the pair"):
        pair = parse_json(raw, f"{where}: the line")
        if not isinstance(pair, dict) or (missing := [name for name in FIELDS if name not in pair]):
            got = f"no {', '.join(missing)}" if isinstance(pair, dict) else short(pair)
            raise UserError(f"{where}: got {got}, needs an object with prompt, chosen and rejected")
        if not all(isinstance(pair[name], str) for name in FIELDS):
            if not all(isinstance(pair[name], list) and pair[name] for name in FIELDS):
                raise UserError(
                    f"{where}: prompt, chosen and rejected need to be three texts, or three lists of messages"
                )
            pair = {
                name: [check_message(m, f"{where}: {name} {n}") for n, m in enumerate(pair[name], 1)] for name in FIELDS
            }
            for name in FIELDS[1:]:
                if pair[name][0]["role"] != "assistant" or pair[name][-1]["role"] != "assistant":
                    raise UserError(f"{where}: {name} needs to begin and end with a message of the assistant")
        if pair["chosen"] == pair["rejected"]:
            raise UserError(f"{where}: chosen and rejected are equal: leave the line out, since it prefers nothing")
        yield where, pair


def make_pairs() -> Iterator[tuple[str, Pair]]:
    """Yield the 100 sums of two digits in a random order: a bare answer is chosen, a wordy one rejected."""
    for n in np.random.default_rng(0).permutation(100).tolist():
        a, b = divmod(n, 10)
        texts = {"prompt": f"{a} + {b}?", "chosen": f"{a + b}.", "rejected": f"It is {a + b}, I would say."}
        roles = dict(zip(FIELDS, ("user", "assistant", "assistant"), strict=True))
        yield f"{a} + {b}", {name: [{"role": roles[name], "content": text}] for name, text in texts.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BothConfig(DataConfig):
    """Both answers of the made pairs, as conversations: what a model learns before it prefers one of them."""

    corpus: str = "sums.jsonl"

    def open_dataset(self, model: GPTConfig, *, known: dict[str, Any] | None = None) -> Dataset:
        """Return the dataset of a file that is written into the cache."""
        chats = [{"messages": pair["prompt"] + pair[name]} for _, pair in make_pairs() for name in FIELDS[1:]]
        path = cache_directory() / "corpora" / self.corpus
        make_cache(path.parent)
        write_whole(path, "".join(f"{json.dumps(chat)}\n" for chat in chats))
        return DataConfig.open_dataset(dataclasses.replace(self, path=str(path)), model, known=known)


def encode_pair(
    pair: Pair, where: str, tokenizer: Tokenizer, template: ChatTemplate, block_size: int
) -> list[np.ndarray]:
    """Return [ids, mask of the answer's tokens] of the chosen text, and the same of the rejected one.

    Raises `UserError`, with its place, for a prompt that leaves no room in the context.
    """
    found = []
    for name in FIELDS[1:]:
        try:
            ids, is_answer = tokenise(write_answer(pair["prompt"], pair[name], tokenizer, template), tokenizer)
        except UserError as e:
            raise UserError(f"{where}: {e}") from None
        if not is_answer[1:].any():
            raise UserError(f"{where}: {name} has no token of an answer")
        if (start := int(np.argmax(is_answer))) > block_size:
            raise UserError(f"{where}: the prompt has {start} tokens, more than block_size={block_size}: shorten it")
        end = np.flatnonzero(is_answer)[-1] + 1
        found += [ids[:end], is_answer[:end]]
    return found


def write_answer(prompt: Any, answer: Any, tokenizer: Tokenizer, template: ChatTemplate) -> Written:
    """Render a prompt and its answer, of which only the messages or the text of `answer` are marked."""
    if not isinstance(prompt, str):
        written = template.write([*prompt, *answer])
        own, of_all = ([m for m in messages if m["role"] == "assistant"] for messages in (answer, prompt + answer))
        if len(written.answers) != len(of_all):
            raise UserError("its chat template does not mark each answer by itself: mark them with {% generation %}")
        return written._replace(answers=written.answers[-len(own) :])
    specials = index_specials(tokenizer)
    begin = "".join(specials[i] for i in tokenizer.prefix)
    end = "" if tokenizer.end_of_text is None else specials[tokenizer.end_of_text]
    text, starts = begin + prompt + answer + end, (len(begin), len(begin + prompt))
    return Written(text=text, answers=((starts[1], len(text)),), contents=((starts[0], len(text) - len(end)),))


class Preferences(Conversations):
    """Pairs as token ids. A pair is one entry, never cut: it takes up two segments of a row, 2 n - 1 and 2 n."""

    def __init__(self, pairs: Sequence[list[np.ndarray]], block_size: int):
        """Concatenate (ids, mask, ids, mask) of pairs, and leave out those that do not fit into a row."""
        ids, answers = (np.concatenate([pair[n] for pair in pairs for n in at]) for at in ((0, 2), (1, 3)))
        ends = np.cumsum([[len(pair[0]), len(pair[2])] for pair in pairs])  # of each text
        self._middles, self.logprobs = ends[::2], np.zeros(len(ids), np.float32)  # of the reference, once scored
        super().__init__(ids, answers, ends[1::2], block_size)
        self.needed -= 1

    def fit(self, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens to read of each pair, inputs that its two texts take up)."""
        return lengths, lengths - 2

    def texts(self, members: np.ndarray) -> Iterator[tuple[slice, slice]]:
        """Yield (place in a row, place in the ids but for the first) of each text of some pairs."""
        at = 0
        for member in members:
            start, end = self.starts[member], self.starts[member] + self.lengths[member]
            middle = self._middles[np.searchsorted(self._middles, start, "right")]
            for a, b in ((start, middle), (middle, end)):
                yield slice(at, at + b - a - 1), slice(a + 1, b)
                at += b - a - 1

    def row(self, members: np.ndarray) -> tuple[Any, ...]:
        """Return (inputs_T, targets_T, mask_T, segments_T, {"reference_logprobs_BT": float32 [T]})."""
        inputs, targets, segments = (np.zeros(self.block_size, np.int32) for _ in range(3))
        mask, logprobs = np.zeros(self.block_size, bool), np.zeros(self.block_size, np.float32)
        for number, (here, there) in enumerate(self.texts(members), 1):
            inputs[here], targets[here] = self._ids[there.start - 1 : there.stop - 1], self._ids[there]
            mask[here], segments[here], logprobs[here] = self.answers[there], number, self.logprobs[there]
        return inputs, targets, mask, segments, {"reference_logprobs_BT": logprobs}

    def score(self, score: Any, batch_size: int) -> None:
        """Store the log-probabilities that a model, `Batch -> [B, T]`, gives to all texts."""
        order, empty = self._packing[0], np.zeros(0, np.int64)
        for first in range(0, self.rows, batch_size):
            rows = [self._members(order, n) if n < self.rows else empty for n in range(first, first + batch_size)]
            batch = Batch(*jax.tree.map(lambda *x: np.stack(x), *map(self.row, rows)))
            for members, found_T in zip(rows, np.asarray(score(batch)), strict=True):
                for here, there in self.texts(members):
                    self.logprobs[there] = found_T[here]


def make_scorer(weights: Weights, block_size: int) -> Any:
    """Return the function that scores a batch by these weights, on one device and in float32."""
    model = dataclasses.replace(weights.config, block_size=block_size, scan_layers=False, remat="none").make_model()
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    params = weights.read(with_shardings(model.shapes(), place))
    return functools.partial(jax.jit(functools.partial(token_logprobs, model)), params)
