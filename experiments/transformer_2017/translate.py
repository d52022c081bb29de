"""Translate with a run of train.py, or count how many of its held-out targets it writes exactly.

Command     python experiments/transformer_2017/translate.py runs/transformer-2017 "dos mil" [--beams 4] [--average 5]
            python experiments/transformer_2017/translate.py runs/transformer-2017 --average 5
"""

import argparse

import encoder_decoder  # noqa: F401, so that its classes are known when the run is read
import numpy as np
from beams import beam_search
from pairs import Pairs, encode_source, target_ids

import jaxgpt

PAIRS_AT_ONCE = 256  # pairs that are decoded together


def search(run: jaxgpt.Run, sources: list[list[int]], beams: int) -> list[list[int]]:
    """Return the ids of the best target of each source, without its start and its end."""
    start, end = target_ids(run.tokenizer)
    how = {
        "beams": beams,
        "length_penalty": 0.6 if beams > 1 else 0.0,
        "start": start,
        "end": end,
        "vocab_size": run.tokenizer.vocab_size,
    }
    return [best for best, *_ in beam_search(*run.decode_params, sources, **how).tokens]


def translate(run: jaxgpt.Run, sources: list[str], beams: int = 1) -> list[str]:
    """Return the target of each source. beams: width of the search; 1 means greedy decoding."""
    ids = [encode_source(source, run.tokenizer) for source in sources]
    return [run.tokenizer.decode(target) for target in search(run, ids, beams)]


def count_exact(run: jaxgpt.Run, pairs: Pairs, beams: int = 1) -> tuple[int, list[tuple[str, str, str]]]:
    """Return how many targets are written exactly, token for token, and (source, target, written) of up to 5 others."""
    right, missed = 0, []
    order = np.argsort(pairs.lengths, kind="stable")  # by length, so that the pairs of a batch finish together
    for first in range(0, len(order), PAIRS_AT_ONCE):
        those = [pairs.split(int(n)) for n in order[first : first + PAIRS_AT_ONCE]]
        written = search(run, [source.tolist() for source, _ in those], beams)
        for (source, target), ids in zip(those, written, strict=True):
            is_exact = ids == target[1:-1].tolist()
            right += is_exact
            if not is_exact and len(missed) < 5:
                missed.append(tuple(run.tokenizer.decode(x) for x in (source, target[1:-1], ids)))
    return right, missed


def main() -> None:
    """Read the command line, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("source", nargs="*", help="texts to translate; none: the held-out pairs are counted")
    parser.add_argument("--beams", type=int, default=1, help="width of the search; 1: greedy decoding")
    parser.add_argument("--average", type=int, help="mean of the last checkpoints, as the paper took; the best one")
    asked = parser.parse_args()
    run = jaxgpt.load(asked.run, average=asked.average)
    if asked.source:
        print("\n".join(translate(run, asked.source, asked.beams)))
        return
    pairs = run.experiment.data.open_dataset(run.model.config).val
    right, missed = count_exact(run, pairs, asked.beams)
    n, share = len(pairs.lengths), right / len(pairs.lengths)
    print(f"{share:.2%} of {n:,} pairs exact (standard error {(share * (1 - share) / n) ** 0.5:.2%})")
    for source, target, written in missed:
        print(f"  {source} -> {written}, not {target}")


if __name__ == "__main__":
    main()
