"""A real Alertmanager for tests: one of `ci/services` in a directory of its own, its notifications in a sink."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_sink import HttpSink
from services import ROOT, UNFIT, MissingServiceError, needs, required

#: Longest wait for something that Alertmanager does by itself, in seconds.
_LIMIT_S = 60.0


@dataclass(frozen=True)
class Alertmanager:
    """One that its tests may break. ``sink`` gets its notifications."""

    directory: Path
    url: str
    sink: HttpSink

    def alerts(self, incident: str = "") -> list[dict[str, Any]]:
        """Return the alerts that it knows: all, or those of an incident."""
        with urllib.request.urlopen(f"{self.url}/api/v2/alerts", timeout=30) as answer:  # noqa: S310 - our own
            found: list[dict[str, Any]] = json.load(answer)
        return [alert for alert in found if not incident or alert["labels"].get("incident") == incident]

    def notified(self, incident: str) -> list[str]:
        """Return the states, firing or resolved, that its notifications told of an incident so far."""
        return [
            str(request.json["status"])
            for request in list(self.sink.requests)
            if request.json["groupLabels"].get("incident") == incident
        ]

    def wait_notified(self, incident: str, states: list[str]) -> None:
        """Wait until it has told exactly this of an incident."""
        deadline = time.monotonic() + _LIMIT_S
        while (told := self.notified(incident)) != states:
            assert time.monotonic() < deadline, f"told {told}, not {states}"
            time.sleep(0.05)

    def stop(self) -> None:
        """End it as an administrator does: it saves what it has told."""
        control("down", "--directory", str(self.directory))

    def kill(self) -> None:
        """End it as a crash does."""
        pid = int((self.directory / "pids/alertmanager").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def start(self) -> None:
        """Start it again: same port, same storage."""
        control("up", "--no-install", "--directory", str(self.directory), "--for", str(os.getpid()))


def control(command: str, *words: str) -> None:
    """Run `ci/services COMMAND alertmanager`.

    Raises:
        MissingServiceError: Not on this machine.
        RuntimeError: It failed; with its words.
    """
    argv = [sys.executable, str(ROOT / "ci/services"), command, "alertmanager", *words]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200, check=False
    )  # fmt: skip
    if done.returncode == UNFIT:
        raise MissingServiceError(done.stderr.strip())
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def run_alertmanager(config: pytest.Config) -> Iterator[Alertmanager]:
    """Start one, yield it and end it, as a fixture does."""
    directory = Path(tempfile.mkdtemp(prefix="mlhpc-alertmanager-"))
    more = () if "alertmanager" in required(config) else ("--no-install",)

    def start(sink: HttpSink) -> Alertmanager:
        place = ("--directory", str(directory))
        control("up", *place, "--for", str(os.getpid()), "--option", f"hook={sink.url}/hook", *more)
        state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
        return Alertmanager(directory, state["environment"]["MLHPC_TEST_ALERTMANAGER"], sink)

    with HttpSink() as sink:
        try:
            yield needs(config, "alertmanager", lambda: start(sink))
        finally:
            control("down", "--purge", "--directory", str(directory))
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def alertmanager(request: pytest.FixtureRequest) -> Iterator[Alertmanager]:
    """An Alertmanager of the test's own (it starts in a second); tests may kill it."""
    yield from run_alertmanager(request.config)
