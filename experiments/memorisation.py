"""How much of what a run writes is word for word from its training text?

Command     python experiments/memorisation.py runs/mine [--samples 4] [--tokens 400]
            needs python -m pip install "jaxgpt[report]", for pydivsufsort
Result      the share of character n-grams that do not occur in the training text, and the longest stretches that do, of
            generated texts, and of as much held-out text: so much overlap is to be expected without memorisation.

The first 67 million tokens of the training text are searched.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pydivsufsort

from jaxgpt import Run, UserError, load
from jaxgpt.data.pipeline import Tokens
from jaxgpt.runs.resume import reopen_dataset
from jaxgpt.tools.grid import format_table

MOST_TEXT = 2**26  # leading tokens of the training text that are searched
LENGTHS = (5, 10, 20, 50)  # n of the n-grams, in characters
SHOWN = 5  # longest overlaps that are reported


def measure(run: Run, samples: int = 4, tokens: int = 400) -> dict[str, dict[str, Any]]:
    """Return `measure_novelty` of "generated" and of "held out" texts. Raises `UserError` without the training text."""
    if run.metadata.imported is not None:
        raise UserError(f"{run.directory} was imported without its training text")
    dataset = reopen_dataset(run.metadata, run.experiment.data, remedy="put that text back")
    train, val, decode = dataset.train, dataset.val, run.tokenizer.decode
    if not isinstance(train, Tokens) or not isinstance(val, Tokens):
        raise UserError(f"{run.directory} was trained on conversations or a mixture, not on one text")
    corpus = SuffixArray(decode(train.read(0, min(len(train), MOST_TEXT))))
    prompt = run.experiment.train.sample_prompt
    try:
        run.tokenizer.encode(prompt)
    except UserError:
        prompt = ""
    generated = [str(run.sample(prompt, max_new_tokens=tokens, seed=seed)) for seed in range(samples)]
    starts = np.linspace(0, max(len(val) - tokens, 0), samples).astype(int)
    held_out = [decode(val.read(int(start), min(tokens, len(val)))) for start in starts]
    texts = {"generated": generated, "held out": held_out}
    return {name: measure_novelty(corpus, each) for name, each in texts.items()}


class SuffixArray:
    """Index of a corpus for substring search (Manber and Myers 1993; libdivsufsort)."""

    def __init__(self, text: str):
        self._search, self.bytes = pydivsufsort.sa_search, text.encode()
        self._suffixes = pydivsufsort.divsufsort(self.bytes) if text else None

    def find(self, piece: str) -> int | None:
        """Return the offset, in bytes, of an occurrence of a string in the corpus; None if there is none."""
        if self._suffixes is None:
            return None
        count, at = self._search(self.bytes, self._suffixes, piece.encode())
        return int(self._suffixes[at]) if count > 0 else None

    def match_lengths(self, text: str) -> np.ndarray:
        """Return the length of the longest match that begins at each character: characters, int64 [len(text)].

        The match at the next character is at most one shorter, so its search starts from that length.
        """
        lengths, grown = np.zeros(len(text), np.int64), 0
        for i in range(len(text)):
            grown = max(grown - 1, 0)
            while i + grown < len(text) and self.find(text[i : i + grown + 1]) is not None:
                grown += 1
            lengths[i] = grown
        return lengths


def measure_novelty(corpus: SuffixArray, texts: Sequence[str]) -> dict[str, Any]:
    """Compare texts, each separately, with a corpus.

    Returns:
        characters, the total length of the texts; overlaps, the longest substrings that occur in the corpus, none part
        of another, each with `at`, the offset of one occurrence in characters; novel, for each n the share of the
        texts' n-grams that do not occur in the corpus, or None without n-grams.
    """
    overlaps: set[tuple[int, str]] = set()
    seen: dict[int, list[bool]] = {n: [] for n in LENGTHS}
    for text in texts:
        lengths = corpus.match_lengths(text)
        for n in LENGTHS:
            seen[n] += (lengths[: max(len(text) - n + 1, 0)] >= n).tolist()
        # A match that ends where the one before it ends is part of that one.
        before = np.concatenate([[0], lengths - 1])[:-1]
        for i in np.flatnonzero((lengths > before) & (lengths > 0)):
            overlaps.add((-int(lengths[i]), text[i : i + lengths[i]]))
    return {
        "characters": sum(map(len, texts)),
        "overlaps": [
            {"text": text, "at": len(corpus.bytes[: corpus.find(text)].decode())}
            for _, text in sorted(overlaps)[:SHOWN]
        ],
        "novel": {str(n): 1.0 - float(np.mean(found)) if found else None for n, found in seen.items()},
    }


def format_found(found: dict[str, dict[str, Any]]) -> str:
    """Return what `measure` found as Markdown."""
    rows = [[str(n), *(str(each["novel"][str(n)]) for each in found.values())] for n in LENGTHS]
    parts = ["n-grams that do not occur in the training text", format_table(["n", *found], rows)]
    for name, each in found.items():
        lines = [f"{len(one['text'])} characters: {one['text']!r}" for one in each["overlaps"]]
        parts.append("\n".join([f"{name}, {each['characters']:,} characters, longest stretches of it:", *lines]))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    """Measure the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="run directory; without it, the newest under runs/")
    parser.add_argument("--samples", type=int, default=4, help="texts to generate")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each")
    options = parser.parse_args(argv)
    try:
        print(format_found(measure(load(options.run), options.samples, options.tokens)))
    except UserError as e:
        sys.stderr.write(f"{parser.prog}: {e}\n")
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
