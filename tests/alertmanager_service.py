"""A real Alertmanager for tests: one of `ci/services` in a directory of its own, its notifications in a sink."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from http_sink import HttpSink
from over_time_services import Service, own
from services import LIMIT_S, wait_until


@dataclass(frozen=True)
class Alertmanager:
    """One that its tests may break. ``sink`` gets its notifications."""

    service: Service
    sink: HttpSink

    @property
    def url(self) -> str:
        """Return its address."""
        return self.service.environment["MLHPC_TEST_ALERTMANAGER"]

    def alerts(self, incident: str = "") -> list[dict[str, Any]]:
        """Return the alerts that it knows: all, or those of an incident."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=LIMIT_S) as answer:  # noqa: S310 - our own
            found: list[dict[str, Any]] = json.load(answer)
        return [alert for alert in found if not incident or alert["labels"].get("incident") == incident]

    def notified(self, incident: str) -> list[str]:
        """Return the states, firing or resolved, of its notifications about an incident so far."""
        return [
            str(request.json["status"])
            for request in list(self.sink.requests)
            if request.json["groupLabels"].get("incident") == incident
        ]

    def wait_notified(self, incident: str, states: list[str]) -> None:
        """Wait until its notifications about an incident are exactly these."""
        assert wait_until(lambda: self.notified(incident) == states), self.notified(incident)


@pytest.fixture
def alertmanager(request: pytest.FixtureRequest) -> Iterator[Alertmanager]:
    """An Alertmanager of the test's own (it starts in a second); tests may kill it."""
    with HttpSink() as sink:
        for service in own(request.config, "alertmanager", "--option", f"hook={sink.url}/hook"):
            yield Alertmanager(service, sink)
