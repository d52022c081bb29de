"""Batches of tokens."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of tokens and the token that follows each: NumPy arrays on the host, JAX arrays in a program."""

    inputs_BT: Any  # int32
    targets_BT: Any  # int32: inputs shifted by one
    mask_BT: Any = None  # bool: the targets that count; None: all
    segments_BT: Any = None  # int32: the document of each input, 0 for padding; None: one per row
    # int32, for a model with an encoder: tokens of the sources, and the document of each
    source_BS: Any = None
    source_segments_BS: Any = None

    def micro_batches(self, n: int) -> "Batch":
        """Split the rows into n micro-batches, a new first axis, of every n-th row each: devices keep their rows."""
        return Batch(*(None if x is None else x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1) for x in self))
