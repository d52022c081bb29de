"""Mix sources by weight. The number n of a row decides which source gives it, and which of its rows."""

from __future__ import annotations

import bisect
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxgpt.config.validate import PositiveFloat, check_value, short
from jaxgpt.data.pipeline import RowReader, Split
from jaxgpt.errors import UserError
from jaxgpt.files import Json, read_json

PERIOD = 10_000  # rows after which the order of the sources repeats: weights are multiples of its inverse
WEIGHTED = re.compile(r"(.+):(-?\d*\.?\d+(?:e-?\d+)?)")


class Mixture(Split):
    """Several splits that share the rows of a run by weight. Each is read without replacement, epoch after epoch."""

    def __init__(self, parts: dict[str, tuple[float, Split]]):
        """Mix `parts`: (weight, split) by name. The weights sum to 1."""
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(split) for _, split in self.parts.values())

    def training_rows(self, *, block_size: int, seed: int) -> RowReader:
        """Return the reader of row n. Each part gives the same rows, in order, as in training on that part only."""
        order, counts = assign_rows([weight for weight, _ in self.parts.values()])
        readers = [split.training_rows(block_size=block_size, seed=seed) for _, split in self.parts.values()]

        def row(n: int) -> tuple[np.ndarray, ...]:
            period, place = divmod(n, len(order))
            part, earlier = order[place]
            return readers[part](period * counts[part] + earlier)

        return row

    def validation_rows(
        self, *, block_size: int, stride: int, max_tokens: int | None, prefix_length: int
    ) -> tuple[int, RowReader]:
        """Return (number of rows, reader of a row) of one part after another, with `max_tokens` shared equally."""
        each = None if max_tokens is None else max(max_tokens // len(self.parts), 1)
        how = {"block_size": block_size, "stride": stride, "max_tokens": each, "prefix_length": prefix_length}
        found = [split.validation_rows(**how) for _, split in self.parts.values()]
        ends = np.cumsum([count for count, _ in found]).tolist()

        def row(n: int) -> tuple[np.ndarray, ...]:
            part = min(bisect.bisect(ends, n), len(ends) - 1)
            return found[part][1](n - ends[part] + found[part][0])

        return ends[-1], row


def parts_of(split: Split) -> dict[str, tuple[float, Split]]:
    """Return (weight, split) of each part of a mixture by name, or the split itself, named ""."""
    return split.parts if isinstance(split, Mixture) else {"": (1.0, split)}


def assign_rows(weights: list[float]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (part, earlier rows of that part) for each row of a period, and the number of rows of each part.

    After any number of rows, each part has had its share of them, rounded up or down. This is the quota method
    (Balinski and Young 1975). Parts that have had their share are passed over. The first one due of the others gets the row.
    """
    shares = np.round(np.array(weights) * PERIOD).astype(int)
    shares[np.argmax(shares)] += PERIOD - shares.sum()
    shares //= np.gcd.reduce(shares)
    given, order = np.zeros_like(shares), list[tuple[int, int]]()
    for n in range(1, (period := int(shares.sum())) + 1):
        part = int(np.argmin(np.where(given * period < n * shares, (given + 1) / shares, np.inf)))
        order.append((part, int(given[part])))
        given[part] += 1
    return order, given.tolist()


def replace_addresses(path: str | None, replace: Callable[[str], Path]) -> str | None:
    """Return a data path, or a mixture of them, with a local path in place of each address.

    The record of a run may be somebody else's, who must not choose the hosts to which a reader connects. So a record is
    read with `find_copy`, and only an address that the user names now is replaced by `fetch`.
    """
    if path is None or "://" not in path:
        return path
    sources = read_mixture(path)
    local = {name: str(replace(name)) if "://" in name else name for name in sources or [path]}
    return ",".join(f"{local[name]}:{weight!r}" for name, weight in sources.items()) or local[path]


def recorded_sources(known: Json) -> list[Json]:
    """Return the fingerprints of the sources of a mixture, [] if there was one source. `known` need not be trusted."""
    sources = known.get("mixture", [])
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        raise UserError(f"the recorded data.mixture={short(sources)} is damaged: it must be a list of objects")
    return sources


def read_mixture(path: str | None) -> dict[str, float]:
    """Return the weight of each source of `--data.path a:0.7,b:0.3`, or of a `*mixture.json` file.

    Sources in the file are relative to its folder. A result of {} means that the path is neither. Raises `UserError` for
    weights that are not positive or do not sum to 1, and for a source that cannot be mixed.
    """
    if path is None or (os.path.exists(path) and not path.endswith("mixture.json")):
        return {}
    if path.endswith("mixture.json"):
        values = read_json(path, 2**20)
        if not isinstance(values, dict) or not values:
            raise UserError(f'{path}: give an object of sources and weights, such as {{"a.txt": 0.7, "b.txt": 0.3}}')
        pairs = [(name if "://" in name else str(Path(path).parent / name), w) for name, w in values.items()]
    else:
        found = [WEIGHTED.fullmatch(part) for part in path.split(",")]
        if not any(found):
            return {}
        if not all(found):
            raise UserError(f"data.path={path}: each source needs a weight; a mixture is a:0.7,b:0.3")
        pairs = [(match[1], float(match[2])) for match in found if match]
    weights = {name: check_value(f"the weight of {name}", weight, PositiveFloat) for name, weight in pairs}
    total = math.fsum(weights.values())
    shares = {name: weight / total for name, weight in weights.items()}
    if len(weights) < len(pairs):
        raise UserError(f"data.path={path} names a source twice: add up its weights")
    if abs(total - 1) > 1.001e-3:
        repaired = ",".join(f"{name}:{share:.4g}" for name, share in shares.items())
        raise UserError(f"the weights of data.path={path} sum to {total:g}, needed 1: such as {repaired}")
    for name, share in shares.items():
        if name.endswith((".jsonl", "mixture.json")):
            raise UserError(f"{name} cannot be in a mixture, which takes texts, folders of them, and .bin token shards")
        if round(share * PERIOD) < 1:
            raise UserError(f"the weight of {name} is too small: give at least {1 / PERIOD:g}, or leave it out")
    return shares
