"""Tests of screening against real servers: a Slurm cluster, a browser."""

import pytest
from browser_service import browser, open_page

__all__ = ["browser", "open_page"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "open_page" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.servers)
