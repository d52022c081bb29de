"""The objectives of post-training are outside the package: their tests are slow ones, all but some of the rollouts'."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name != "test_rollouts.py":
            item.add_marker(pytest.mark.slow)
