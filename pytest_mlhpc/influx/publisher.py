"""What a session does for InfluxDB, and ``mlhpc records push --check``: the way to the server and back, step by step."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.influx import credentials
from pytest_mlhpc.influx.credentials import InfluxServer
from pytest_mlhpc.influx.push import InfluxSink, RefusedError, UnavailableError
from pytest_mlhpc.influx.schema import RUN, lines_of
from pytest_mlhpc.influx.source import InfluxConnection
from pytest_mlhpc.influx.spool import Writer, spool_of
from pytest_mlhpc.store.text import clean

if TYPE_CHECKING:
    from pytest_mlhpc.store.record import Record


hookimpl = pluggy.HookimplMarker("pytest_mlhpc")

#: How long the end of a session may take for sending, in seconds; one request gets most of it.
END_LIMIT_S = 15.0
REQUEST_LIMIT_S = 10.0


def register(manager: pluggy.PluginManager, state_dir: Path, environ: Mapping[str, str]) -> None:
    """Take part in this session if an InfluxDB is named."""
    if credentials.is_configured(environ) and not manager.has_plugin("influx"):
        manager.register(Publisher(state_dir, environ), "influx")


class Publisher:
    """Receives the records of one session, from any of its threads."""

    def __init__(self, state_dir: Path, environ: Mapping[str, str], limit_s: float = END_LIMIT_S) -> None:
        """Take what the environment says now; nothing is made before the first record."""
        self._state_dir = state_dir
        self._environ = dict(environ)
        self._limit_s = limit_s
        self._writer = Writer(state_dir)
        self._lock = threading.Lock()
        self._left: list[Record] = []  #: that the spool could not take
        self._trouble = ""

    @hookimpl
    def mlhpc_record(self, record: Record) -> None:
        """Put it into the spool; what cannot be written now is tried again at the end."""
        with self._lock:
            try:
                self._writer.add(lines_of(record))
            except StoreError as error:
                self._left.append(record)
                self._trouble = str(error)

    @hookimpl
    def mlhpc_records_end(self, tell: Callable[[str], None], hurry: bool) -> None:
        """Close the spool's file and send what waits, unless the session was told to end."""
        with self._lock:
            self._try_again(tell)
            self._writer.close()
        if not hurry and credentials.pushes(self._environ) and _anything(self._state_dir):
            self._push(tell)

    def _try_again(self, tell: Callable[[str], None]) -> None:
        left = []
        for record in self._left:
            try:
                self._writer.add(lines_of(record))
            except StoreError as error:
                left.append(record)
                self._trouble = str(error)
        self._left = []
        if left:
            tell(
                f"InfluxDB: {self._trouble}; {len(left)} records are in the store only: "
                "`mlhpc records push --all` sends them"
            )

    def _push(self, tell: Callable[[str], None]) -> None:
        """Send in a thread that nobody waits for longer than the limit: what it leaves, and how, `mlhpc records push` can take up."""
        told: list[str] = []
        sender = threading.Thread(
            target=_send, args=(self._state_dir, self._environ, told.append), name="influx", daemon=True
        )
        sender.start()
        sender.join(self._limit_s)
        if sender.is_alive():
            told.append(f"not all records were sent within {self._limit_s:g} s")
        for text in told:
            tell(f"InfluxDB: {text}; `mlhpc records push` sends what waits in {spool_of(self._state_dir)}")


def _anything(state_dir: Path) -> bool:
    folders = (spool_of(state_dir) / name for name in ("open", "ready"))
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


def _send(state_dir: Path, environ: Mapping[str, str], tell: Callable[[str], None]) -> None:
    try:
        from pytest_mlhpc.influx.push import InfluxSink, Sender, push_spool

        with InfluxSink(credentials.server_of(environ), timeout_s=REQUEST_LIMIT_S) as sink:
            sender = Sender(sink, spool_of(state_dir) / "rejected")
            push_spool(sender, spool_of(state_dir))
        if sender.progress.rejected:
            tell(f"{sender.progress.rejected} points were refused ({_first(sender.progress.reasons)})")
    except (MlhpcError, OSError) as error:
        tell(f"not sent: {error}")
    except BaseException as error:  # noqa: BLE001 - a thread of a session that must not fail by it
        tell(f"not sent: {error!r}")


def _first(reasons: Mapping[str, int]) -> str:
    return next(iter(reasons), "no reason given")


#: A measurement of its own: dashboards and history never see it.
MEASUREMENT = "mlhpc_check"
_FOUND, _LATER = 1, 75


def check(server: InfluxServer) -> int:
    """Write one point and read it back; say how many records are there. Returns 0, 1 (refused) or 75 (no answer)."""
    moment = time.time_ns()
    who = "a user and a password" if ":" in server.token else "a token" if server.token else "no token"
    organisation = f", organisation {server.org}" if server.org else ""
    sys.stdout.write(f"server   {server.url}, bucket {server.bucket}{organisation}, with {who}\n")
    try:
        with InfluxSink(server, timeout_s=REQUEST_LIMIT_S) as sink:
            sink.write(f"{MEASUREMENT},tool=mlhpc value={os.getpid()}i {moment}\n".encode("ascii"))
        sys.stdout.write("write    ok: a point was taken\n")
        _read_back(server, moment)
    except UnavailableError as error:
        sys.stdout.write(f"FAILED   {clean(str(error))}\n")
        return _LATER if error.status in {0, 429} or error.status >= 500 else _FOUND
    except (RefusedError, StoreError) as error:
        sys.stdout.write(f"FAILED   {clean(str(error))}\n")
        return _FOUND
    return 0


def _read_back(server: InfluxServer, moment: int) -> None:
    connection = InfluxConnection(server, silence_s=REQUEST_LIMIT_S)
    try:
        question = f'SELECT "value" FROM "{MEASUREMENT}" WHERE time = {moment}'  # noqa: S608 - our own words
        rows = [row for block in connection.ask(question) for row in block.rows]
        if [row[1] for row in rows] != [os.getpid()]:
            raise StoreError(
                "the written point cannot be read back: check that writes and queries use the same database"
            )
        sys.stdout.write("read     ok: the same point came back\n")
        question = f'SELECT count("created_ns") FROM "{RUN.name}"'  # noqa: S608 - our own words
        found = [int(row[1]) for block in connection.ask(question) for row in block.rows]
        sys.stdout.write(f"records  {sum(found)}\n")
    finally:
        connection.close()
