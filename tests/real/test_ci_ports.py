"""Ports of the test servers: whose they are while a server is stopped."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """Return a function that takes a port for the directory of that name, and returns it."""
    monkeypatch.syspath_prepend(str(ROOT / "ci/slurm.d"))
    ports = importlib.import_module("testcluster.ports")
    monkeypatch.setattr(ports, "CLAIMS", tmp_path / "claims")

    def take(name):
        (tmp_path / name).mkdir(exist_ok=True)
        with ports.free_range(1, tmp_path / name) as port:
            return port

    return take


def test_the_port_of_a_server_that_is_stopped_is_given_to_no_other(taken):
    first, second = taken("one"), taken("two")
    assert first != second
    assert taken("one") == first


def test_the_port_of_a_server_whose_directory_is_gone_is_free(taken, tmp_path):
    first = taken("one")
    (tmp_path / "one").rmdir()
    assert taken("two") == first
