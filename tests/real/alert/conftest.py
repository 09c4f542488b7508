"""Fixtures of alerts to real servers."""

import pytest
from alertmanager_service import alertmanager

__all__ = ["alertmanager"]


@pytest.fixture(autouse=True)
def no_proxy_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of the surrounding CI is asked."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
