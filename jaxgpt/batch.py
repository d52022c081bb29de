"""Batches of tokens."""

from typing import Any, NamedTuple

import jax

from jaxgpt.config.validate import short_repr


class Batch(NamedTuple):
    """Rows of tokens and the token that follows each: NumPy arrays on the host, JAX arrays in a program."""

    inputs_BT: Any  # int32: token ids
    targets_BT: Any  # int32: inputs shifted by one
    mask_BT: Any = None  # bool: the targets that count. None means all
    segments_BT: Any = None  # int32: the document of each input, 0 for padding. None means one per row
    extras: dict[str, Any] | None = None  # arrays with B rows: more arguments of the model, by name
    __repr__ = short_repr

    def micro_batches(self, n: int) -> "Batch":
        """Split the rows into n micro-batches, a new first axis. Each takes every n-th row, so devices keep their rows."""
        return jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), self)
