"""Batches of tokens, which the data produce and the training step consumes."""

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of tokens and the token that follows each: NumPy arrays on the host, JAX arrays in a program."""

    inputs_BT: Any  # int32
    targets_BT: Any  # int32: inputs shifted by one
    mask_BT: Any = None  # bool: the targets that count; None: all
    segments_BT: Any = None  # int32: the document that each input belongs to, 0 for padding; None: one in each row
    # int32, for a model with an encoder: the sources of the documents, and the number of each token's document
    source_BS: Any = None
    source_segments_BS: Any = None

    def micro_batches(self, n: int) -> "Batch":
        """Return the rows with a first axis of n turns, of which each has every n-th row: devices keep their own."""
        return Batch(*(None if x is None else x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1) for x in self))
