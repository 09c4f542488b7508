"""Servers of `ci/services` for tests: started once for a session of pytest, shared by its workers, gone with the last of them.

Here also InfluxDB; the others are in files of their own (`alertmanager_service.py`, `browser_service.py`, ...). A conftest
takes what its tests need: ``from over_time_services import influx_server, influxdb``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shlex
import shutil
import signal
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from services import LIMIT_S, control, is_alive, needs, required, session_folder, wait_until

from pytest_mlhpc.influx import publisher
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.influx.push import CHUNK_LINES, InfluxSink, Patience, Sender


@dataclass(frozen=True)
class Service:
    """A server of `ci/services`, and what `env` says of it. Only a private one may be broken."""

    name: str
    directory: Path
    environment: Mapping[str, str]
    private: bool = False

    def pid(self, daemon: str) -> int:
        """Return the pid of one of its daemons."""
        return int((self.directory / "pids" / daemon).read_text(encoding="ascii").split()[0])

    def kill(self, daemon: str) -> None:
        """End a daemon by SIGKILL; `start` starts it again on the same files and ports."""
        assert self.private, f"killing {daemon} would disturb other tests: use a private {self.name}"
        os.kill(self.pid(daemon), signal.SIGKILL)
        assert wait_until(lambda: not is_alive(self.directory, daemon))

    def start(self) -> None:
        """Start what does not run."""
        control("services", "up", self.name, "--for", str(os.getpid()), directory=self.directory)

    def stop(self) -> None:
        """End it as an administrator does: it saves its state."""
        control("services", "down", self.name, directory=self.directory)


def share(config: pytest.Config, name: str, *options: str) -> Iterator[Service]:
    """Start one server for a whole session of pytest, all workers together, and yield it, as a session's fixture does.

    Args:
        config: Of pytest.
        name: Of the service.
        options: Words of `up`, such as ``--option``, ``auth=on``.
    """
    directory = session_folder(config, f"{name}{'-'.join(options)[2:]}".replace("=", "-"))
    yield _start(config, name, directory, options, private=False)
    control("services", "down", name, "--purge", "--for", str(os.getpid()), directory=directory)


def own(config: pytest.Config, name: str, *options: str) -> Iterator[Service]:
    """Start a server for one test, which may break it, and yield it."""
    directory = Path(tempfile.mkdtemp(prefix=f"mlhpc-{name}-"))  # tmp_path is too long for some sockets
    try:
        yield _start(config, name, directory, options, private=True)
    finally:
        control("services", "down", name, "--purge", directory=directory)
        shutil.rmtree(directory, ignore_errors=True)


def _start(
    config: pytest.Config, name: str, directory: Path, options: tuple[str, ...], *, private: bool
) -> Service:
    more = () if name in required(config) else ("--no-install",)

    def start() -> Service:
        control("services", "up", name, "--for", str(os.getpid()), *options, *more, directory=directory)
        return Service(
            name, directory, _environment(control("services", "env", name, directory=directory)), private
        )

    return needs(config, name, start)


def _environment(text: str) -> dict[str, str]:
    """Return the variables of lines like ``export NAME='value'``."""
    words = (shlex.split(line)[1] for line in text.splitlines() if line.startswith("export "))
    return dict(word.split("=", 1) for word in words)


# --- InfluxDB


@dataclass(frozen=True)
class Influx:
    """A database of one test in a real InfluxDB 1.6, behind the write path of 2.x (influx_v2_door.py)."""

    service: Service
    database: str

    @property
    def url(self) -> str:
        return self.service.environment["MLHPC_INFLUX_URL"]

    @property
    def environment(self) -> dict[str, str]:
        """What `mlhpc` needs to use it."""
        return {
            "MLHPC_INFLUX_URL": self.url,
            "MLHPC_INFLUX_BUCKET": self.database,
            "MLHPC_INFLUX_TOKEN": self.service.environment["MLHPC_INFLUX_TOKEN"],
        }

    def ask(self, question: str) -> list[dict[str, Any]]:
        """Return all rows of an answer, tags as columns; times in ns.

        Raises:
            AssertionError: the server says that something is wrong with the question.
        """
        who = {}
        user, _, password = self.service.environment["MLHPC_INFLUX_TOKEN"].partition(":")
        if self.service.environment.get("MLHPC_INFLUX_TOKEN") != "any:thing":
            who = {"u": user, "p": password}
        address = f"{self.url}/query?{urllib.parse.urlencode(who)}"
        words = urllib.parse.urlencode({"q": question, "db": self.database, "epoch": "ns"})
        with urllib.request.urlopen(address, words.encode(), timeout=LIMIT_S) as answer:  # noqa: S310 - on loopback
            results = json.load(answer)["results"]
        errors = [result["error"] for result in results if "error" in result]
        assert not errors, f"{question}: {errors}"
        groups = [group for result in results for group in result.get("series", ())]
        return [
            {**group.get("tags", {}), **dict(zip(group["columns"], row, strict=True))}
            for group in groups
            for row in group.get("values", ())
        ]

    def count(self, measurement: str, field: str = "id") -> int:
        """Return how many points there are."""
        rows = self.ask(f'SELECT count("{field}") FROM "{measurement}"')  # noqa: S608 - a test's own words
        return int(rows[0]["count"]) if rows else 0

    def push(self, records: Iterable[Sequence[str]], folder: Path, patience: Patience | None = None) -> None:
        """Send the lines of records; what is refused is put into *folder*."""
        every = (f"{line}\n".encode() for lines in records for line in lines)
        with InfluxSink(server_of(self.environment), timeout_s=6000) as sink:
            sender = Sender(sink, folder, patience)
            while chunk := b"".join(itertools.islice(every, CHUNK_LINES)):
                sender.send(chunk)

    def fault(self, words: str) -> None:
        """Let writes fail: ``503``, ``429 3`` (the next three), ``hang``, ``reset``, ``cut``; ``""`` ends it."""
        path = self.service.directory / f"fault-{self.database}"
        if words:
            path.write_text(words, encoding="ascii")
        else:
            path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def influx_server(request: pytest.FixtureRequest) -> Iterator[Service]:
    """One InfluxDB for all tests of this session; each has a database of its own: `influxdb`."""
    yield from share(request.config, "influxdb")


#: A conftest of a suite whose sessions wait for InfluxDB as long as a busy machine takes; others wait 15 s.
PATIENT = """\
from pytest_mlhpc.influx import publisher
publisher.Publisher.__init__.__defaults__ = publisher.publish.__defaults__ = (600.0,)
publisher.REQUEST_LIMIT_S = 600.0
"""


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """Let commands of this process wait as long."""
    with pytest.MonkeyPatch.context() as patch:
        for function in (publisher.Publisher.__init__, publisher.publish):
            patch.setattr(function, "__defaults__", (LIMIT_S,))
        patch.setattr(publisher, "REQUEST_LIMIT_S", LIMIT_S)
        yield


@pytest.fixture
def influxdb(influx_server: Service) -> Iterator[Influx]:
    """A database of this test."""
    found = Influx(influx_server, f"test_{secrets.token_hex(6)}")
    found.ask(f'CREATE DATABASE "{found.database}"')
    with patient():
        yield found
    found.fault("")
    found.ask(f'DROP DATABASE "{found.database}"')


@pytest.fixture
def own_influxdb(request: pytest.FixtureRequest) -> Iterator[Influx]:
    """An InfluxDB of this test alone, which it may kill: `own_influxdb.service.kill("influxd")`, `.start()`."""
    for service in own(request.config, "influxdb"):
        with patient():
            yield Influx(service, service.environment["MLHPC_INFLUX_BUCKET"])


@pytest.fixture
def closed_influxdb(request: pytest.FixtureRequest) -> Iterator[Influx]:
    """An InfluxDB of this test alone that wants a user and a password."""
    for service in own(request.config, "influxdb", "--option", "auth=on"):
        with patient():
            yield Influx(service, service.environment["MLHPC_INFLUX_BUCKET"])
