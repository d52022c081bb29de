"""Reopen the data of a run."""

from __future__ import annotations

from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import prepare_for
from jaxgpt.data.tokens import Dataset
from jaxgpt.errors import UserError
from jaxgpt.files import cache_directory, is_there
from jaxgpt.runs.metadata import RunMetadata
from jaxgpt.runs.resume import check_same_data


def reopen_dataset(metadata: RunMetadata, data: DataConfig | None = None, *, remedy: str) -> Dataset:
    """Return the dataset that a run was trained on: from its text or, where that is gone, from the cache of tokens.

    data: the run's, perhaps with its text in another place; None: the recorded one. remedy: what to do without it, as a
    clause. Raises `UserError` if it is nowhere, or is another.
    """
    data = data or metadata.experiment.data
    try:
        dataset = prepare_for(metadata.model, data, with_prefix=metadata.has_prefix, known=metadata.data)
    except UserError:
        if data.path is None or is_there(Path(data.path), "Name another text."):
            raise
        raise UserError(
            f"{metadata.directory} was trained on {data.path}, which is not there, and its tokens are not in the cache "
            f"{cache_directory() / 'tokens'}: {remedy}"
        ) from None
    check_same_data(metadata, dataset, remedy)
    return dataset
