"""How good is a loss? Compute bits per character of models that are not networks, on the same held-out text.

Question    a run has 2.05 bits per character. Is that less than the size of the alphabet gives, than letter
            frequencies, than a table of five-character n-grams, than gzip and xz?
Reference   Shannon 1951, "Prediction and entropy of printed English"; Witten and Bell 1991, IEEE Trans. Inf. Theory
            37(4), method C, for contexts that the table has seen rarely or never.
Command     python experiments/baselines.py quijote.txt shakespeare.txt [--run RUN ...]
            A run's bits are those of its own validation text, so compare runs that were trained on one of these texts.
Result      docs/results/studies.md, under "Baselines", and LOG.md, 2026-11-22, "look inside, compare, translate".

All baselines are fitted to the first 90% of a text's characters and measured on the rest, as runs are. Compressors get
the rest by itself, and after the first part, where the bytes that it adds are counted.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path

ORDER = 5  # characters of an n-gram, including the predicted one
HELD_OUT = 0.1


def split(text: str) -> tuple[str, str]:
    """Return (training, validation), as `data.dataset` splits a text."""
    at = int(len(text) * (1.0 - HELD_OUT))
    return text[:at], text[at:]


def uniform(text: str) -> float:
    """Return the bits per character of a uniform distribution over the alphabet."""
    return math.log2(len(set(text)))


def n_gram(train: str, held: str, order: int, alphabet: int) -> float:
    """Return the bits per character of interpolated n-grams: p(c | h) = (n(hc) + d(h) p(c | h')) / (n(h) + d(h)).

    h' is h without its first character, d(h) the number of different characters that followed h. The recursion ends
    in a uniform distribution over the alphabet.
    """
    counts = [collections.Counter(train[i : i + n] for i in range(len(train) - n + 1)) for n in range(1, order + 1)]
    followed: list[dict[str, list[int]]] = []
    for of_length in counts:
        contexts: dict[str, list[int]] = {}
        for gram, count in of_length.items():
            found = contexts.setdefault(gram[:-1], [0, 0])
            found[0] += count
            found[1] += 1
        followed.append(contexts)
    bits, text = 0.0, train[len(train) - order + 1 :] + held
    for end in range(order - 1, len(text)):
        p = 1.0 / alphabet
        for n in range(1, order + 1):
            gram = text[end - n + 1 : end + 1]
            if (context := followed[n - 1].get(gram[:-1])) is None:
                break
            total, different = context
            p = (counts[n - 1][gram] + different * p) / (total + different)
        bits -= math.log2(p)
    return bits / len(held)


def compressed(compress: Callable[[bytes], bytes], train: str, held: str) -> tuple[float, float]:
    """Return the bits per character of the held-out text by itself, and after the training text."""
    alone, before, both = (len(compress(text.encode())) for text in (held, train, train + held))
    return 8 * alone / len(held), 8 * (both - before) / len(held)


def baselines(text: str) -> dict[str, float]:
    """Return the bits per character of the last tenth of a text, by name of the baseline."""
    train, held = split(text)
    alphabet = len(set(text))
    zipped = compressed(lambda raw: gzip.compress(raw, 9, mtime=0), train, held)
    packed = compressed(lambda raw: lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME), train, held)
    return {
        "uniform over the alphabet": uniform(text),
        "unigram": n_gram(train, held, 1, alphabet),
        f"{ORDER}-gram with back-off": n_gram(train, held, ORDER, alphabet),
        "gzip, alone": zipped[0],
        "gzip, after the training text": zipped[1],
        "xz, alone": packed[0],
        "xz, after the training text": packed[1],
    }


def of_run(directory: str) -> float:
    """Return the bits per character of a run on its own validation text."""
    from jaxgpt import load
    from jaxgpt.tools.evaluate.evaluate import evaluate_run

    bits = evaluate_run(load(directory))["bits_per_character"]
    if bits is None:
        raise SystemExit(f"{directory} was trained on token files, so its text and its bits per character are unknown")
    return bits


def main(argv: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Print the table of baselines, and the bits per character of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", help="UTF-8 files")
    parser.add_argument("--run", action="append", default=[], help="a run directory to compare with; may be repeated")
    parser.add_argument("--json", help="also write the table to this file")
    options = parser.parse_args(argv)
    found = {Path(path).stem: baselines(Path(path).read_text(encoding="utf-8")) for path in options.texts}
    print(f"| bits per character | {' | '.join(found)} |")
    print(f"|---|{'---|' * len(found)}")
    for name in next(iter(found.values())):
        print(f"| {name} | {' | '.join(f'{of_text[name]:.3f}' for of_text in found.values())} |")
    runs = {directory: of_run(directory) for directory in options.run}
    for directory, bits in runs.items():
        print(f"{directory}: {bits:.3f} bits per character of its validation text")
    if options.json:
        Path(options.json).write_text(json.dumps({"texts": found, "runs": runs}, indent=1) + "\n")
    return found | {"runs": runs}


if __name__ == "__main__":
    main()
