"""Of tests of channels: a server that takes messages; no proxy of the surrounding CI is asked."""

import pytest
from http_sink import HttpSink


@pytest.fixture(autouse=True)
def no_proxy_of_ours(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def sink():
    with HttpSink() as server:
        yield server
