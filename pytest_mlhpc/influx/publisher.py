"""What a session does for InfluxDB, and ``mlhpc records push --check``.

Open it when a session says something of InfluxDB at its end, or when `--check` does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pluggy

from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.influx import credentials
from pytest_mlhpc.influx.credentials import InfluxServer
from pytest_mlhpc.influx.cursor import (
    PushStart,
    RecordsAndEvents,
    begin,
    draft_start,
    pending,
    rejected_folder,
    waiting,
)
from pytest_mlhpc.influx.push import InfluxSink, RefusedError, Sender, UnavailableError, push_records
from pytest_mlhpc.influx.schema import RUN
from pytest_mlhpc.influx.source import InfluxConnection
from pytest_mlhpc.store.text import count

hookimpl = pluggy.HookimplMarker("pytest_mlhpc")

#: How long the end of a session may take for sending, in seconds; one request gets most of it.
END_LIMIT_S = 15.0
REQUEST_LIMIT_S = 10.0


def register(manager: pluggy.PluginManager, state_dir: Path, environ: Mapping[str, str]) -> None:
    """Take part in this session if an InfluxDB is named."""
    if credentials.is_configured(environ) and not manager.has_plugin("influx"):
        manager.register(Publisher(state_dir, environ), "influx")


class Publisher:
    """Sends the records of one session at its end, and whatever else waits in the same state directory."""

    def __init__(self, state_dir: Path, environ: Mapping[str, str], limit_s: float = END_LIMIT_S) -> None:
        """Take what the environment says now; nothing is made before the first run."""
        self._state_dir = state_dir
        self._environ = dict(environ)
        self._limit_s = limit_s
        self._notes: list[str] = []
        self._draft: PushStart | None = None  #: of the begin of this session, where it could not be written

    @hookimpl
    def mlhpc_records_begin(self) -> None:
        """Make the start before there is a first record: what is recorded from now on is sent, whoever dies."""
        try:
            begin(self._state_dir, self._notes.append)
        except StoreError:
            with contextlib.suppress(StoreError):  # the end of the session tries again, and says why not
                self._draft = draft_start(self._state_dir)

    @hookimpl
    def mlhpc_records_end(self, tell: Callable[[str], None], hurry: bool) -> None:
        """Send what waits, unless the session received a signal to end."""
        try:
            begin(self._state_dir, self._notes.append, self._draft)
        except StoreError as error:
            self._notes.append(f"not sent: {error}")
        else:
            if not hurry:
                publish(self._state_dir, self._environ, self._notes.append, self._limit_s)
        for note in self._notes:
            tell(f"InfluxDB: {note}")


def publish(
    state_dir: Path, environ: Mapping[str, str], tell: Callable[[str], None], limit_s: float = END_LIMIT_S
) -> None:
    """Send what waits, if an InfluxDB is named and commands shall send: in a thread that nobody waits for longer than the limit.

    What it leaves waits for the next push.
    """
    if not (credentials.is_configured(environ) and credentials.pushes(environ)):
        return
    notes: list[str] = []
    sender = threading.Thread(
        target=_send, args=(state_dir, environ, notes.append), name="influx", daemon=True
    )
    sender.start()
    sender.join(limit_s)
    if sender.is_alive():
        notes.append(f"not all records were sent within {limit_s:g} s")
    for note in notes:
        tell(note)
    left = waiting(state_dir) if notes else RecordsAndEvents()
    if left.both:
        tell(f"{left} {'wait' if left.both > 1 else 'waits'}; `mlhpc records push` sends what waits")


def _send(state_dir: Path, environ: Mapping[str, str], tell: Callable[[str], None]) -> None:
    problems: list[str] = []
    try:
        server = credentials.server_of(environ)
        start = begin(state_dir, tell)
        if not any(pending(state_dir, start, problems.append)):  # the client is not even imported
            return
        problems.clear()
        with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
            sender = Sender(sink, state_dir)
            try:
                push_records(sender, start, problems.append)
            finally:
                for text in sender.progress.notes(rejected_folder(state_dir)):
                    tell(text)
    except StoreError as error:
        tell(str(error))
    except (MlhpcError, OSError) as error:
        tell(f"not sent: {error}")
    except BaseException as error:  # noqa: BLE001 - a thread of a session that must not fail by it
        tell(f"not sent: {error!r}")
    if problems:
        more = f" (and {count(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        tell(f"{problems[0]}{more}")


#: A measurement of its own: dashboards and history never see it.
MEASUREMENT = "mlhpc_check"
_FOUND, _LATER = 1, 75


def check(server: InfluxServer) -> tuple[list[tuple[str, str]], int]:
    """Write one point, read it back, count the records there. Return each step and what was found, and an exit code.

    The code is 0, 1 (refused) or 75 (no answer).
    """
    moment = time.time_ns()
    who = "a user and a password" if ":" in server.token else "a token" if server.token else "no token"
    organisation = f", organisation {server.org}" if server.org else ""
    steps = [("server", f"{server.url}, bucket {server.bucket}{organisation}, with {who}")]
    try:
        with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
            sink.write(f"{MEASUREMENT},tool=mlhpc value={os.getpid()}i {moment}\n".encode("ascii"))
        steps.append(("write", "ok: a point was taken"))
        steps.extend(_read_back(server, moment))
    except UnavailableError as error:
        later = error.status in {0, 429} or error.status >= 500
        return [*steps, ("FAILED", str(error))], _LATER if later else _FOUND
    except (RefusedError, StoreError) as error:
        return [*steps, ("FAILED", str(error))], _FOUND
    return steps, 0


def _read_back(server: InfluxServer, moment: int) -> Iterator[tuple[str, str]]:
    connection = InfluxConnection(server, silence_s=REQUEST_LIMIT_S)
    try:
        question = f'SELECT "value" FROM "{MEASUREMENT}" WHERE time = {moment}'  # noqa: S608 - constants of this module
        rows = [row for block in connection.ask(question) for row in block.rows]
        if [row[1] for row in rows] != [os.getpid()]:
            raise StoreError(
                "the written point cannot be read back: check that writes and queries use the same database"
            )
        yield "read", "ok: the same point came back"
        question = f'SELECT count("created_ns") FROM "{RUN.name}"'  # noqa: S608 - constants of this module
        found = [int(row[1]) for block in connection.ask(question) for row in block.rows]
        yield "records", str(sum(found))
    finally:
        connection.close()
