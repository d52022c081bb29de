"""The zoo is outside the package: all of its tests are slow ones, except for the test of its table."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE and item.path.name != "test_table.py":
            item.add_marker(pytest.mark.slow)
