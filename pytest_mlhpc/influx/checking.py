"""``mlhpc records push --check``: the way to InfluxDB and back, one step a line, and what to do about the first that fails."""

from __future__ import annotations

import os
import sys
import time

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.influx.client import InfluxSink, RefusedError, UnavailableError
from pytest_mlhpc.influx.credentials import Server
from pytest_mlhpc.influx.query import Connection
from pytest_mlhpc.influx.schema import RUN
from pytest_mlhpc.store.text import clean

#: A measurement of its own: dashboards and history never see it.
MEASUREMENT = "mlhpc_check"
REQUEST_LIMIT_S = 10.0
_FOUND, _LATER = 1, 75


def check(server: Server) -> int:
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


def _read_back(server: Server, moment: int) -> None:
    connection = Connection(server, silence_s=REQUEST_LIMIT_S)
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
