"""Sets that are made once for the whole session."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from data_sets import layout

from pytest_mlhpc.node.worker.data import make


@pytest.fixture(scope="session")
def made_set(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return the folder of a set as :func:`data_sets.layout` lays it out; tests only read it."""

    @functools.cache
    def make_once(*arguments, **fields) -> Path:
        root = tmp_path_factory.mktemp("made") / "set"
        make.make_set(layout(*arguments, **fields), root)
        return root

    return make_once
