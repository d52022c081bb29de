"""What a run was trained on, opened again."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import prepare
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory, is_there
from jaxgpt.runs.metadata import Record, refuse_other_data


def reopen_dataset(directory: Path, record: Record, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset that a run was trained on: from its text or, where that is gone, from the cache of tokens.

    data: the run's, perhaps with its text in another place; None: the recorded one. remedy: what to do without it, as a
    clause. Raises `UserError` if it is nowhere, or is another.
    """
    data, model = data or record.experiment.data, record.model
    try:
        dataset = prepare(
            data,
            block_size=model.block_size,
            vocab_size=model.vocab_size,
            encoder=model.n_encoder_layer > 0,
            prefixed=record.prefixed,
            known=record.data,
        )
    except UserError:
        if data.path is None or is_there(Path(data.path), "Name another text."):
            raise
        raise UserError(
            f"{directory} was trained on {data.path}, which is not there, and its tokens are not in the cache "
            f"{cache_directory() / 'tokens'}: {remedy}"
        ) from None
    refuse_other_data(directory, dataset, remedy)
    return dataset
