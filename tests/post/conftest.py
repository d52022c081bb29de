"""The objectives of post-training are outside the package: their tests are slow ones."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.slow)
