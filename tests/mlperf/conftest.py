"""Records of a test's own state directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.store import Store


@pytest.fixture
def store(state_dir: Path) -> Iterator[Callable[..., None]]:
    """Return what stores records."""
    kept = Store(state_dir, "s1")

    def put(*records: Record) -> None:
        for one in records:
            kept.append(one)

    yield put
    kept.close()
