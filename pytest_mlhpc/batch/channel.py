"""PAYLOAD. The rank's end of the channel to its batch: one Unix stream socket, JSON lines, one direction.

The batch makes the socket (``batch/server.py``) in a directory that only its user may enter and names it in
``MLHPC_CHANNEL``. A rank says hello with the ids from its environment, then sends ``started``, ``progress``,
``report`` or ``failed``, and ``close``. The batch never answers. When its end closes, the batch is gone, and a rank
without a batch must not go on: a thread then ends the process, whatever the main thread is waiting for.

What a rank finds in its environment besides: ``MLHPC_PLAN`` is the path of plan.json and ``MLHPC_RUN`` the id of its
run in there; torchrun sets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from typing import Any, Dict, Mapping, Optional

import pytest_mlhpc
from pytest_mlhpc.batch.plan import PROTOCOL
from pytest_mlhpc.results.schema import RankReport, to_json

#: Exit code of a rank whose batch went away: EX_UNAVAILABLE of sysexits.h (4.3BSD).
EXIT_BATCH_GONE = 69

#: Least time between two progress messages of one rank, in seconds (worker lines allow one a second).
PROGRESS_EVERY_S = 1.0


class ChannelError(RuntimeError):
    """This process was not started by a batch, or the batch cannot be reached; the text says which."""


class RankChannel:
    """What one rank tells its batch. Safe to call from several threads; a rank has one.

    Sending fails only when the batch has gone, and then the process ends, so callers need not handle errors.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self._connection = connection
        self._lock = threading.Lock()
        self._closed = False
        self._next_progress = 0.0
        threading.Thread(target=self._end_with_batch, name="mlhpc-channel", daemon=True).start()

    @classmethod
    def from_environment(cls, environment: Optional[Mapping[str, str]] = None) -> RankChannel:
        """Connect to the batch that started this process.

        Reads ``MLHPC_CHANNEL`` (path of the socket), ``MLHPC_RUN``, ``MLHPC_NONCE`` and the rank's number. With
        ``MLHPC_OUTPUT=channel`` (several ranks behind one launcher) standard output and error of this process go to
        the batch too, so that each rank has a log of its own.

        Raises:
            ChannelError: a variable is missing, or nobody listens at the socket.
        """
        variables = os.environ if environment is None else environment
        missing = [name for name in ("MLHPC_CHANNEL", "MLHPC_RUN", "MLHPC_NONCE") if not variables.get(name)]
        if missing:
            raise ChannelError(f"not started by a batch: {', '.join(missing)} not set in the environment")
        rank = rank_of(variables)
        if variables.get("MLHPC_OUTPUT") == "channel":
            with _connect(variables, rank, "output") as output:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
        return cls(_connect(variables, rank, "messages"), rank)

    def started(self, body: Mapping[str, Any]) -> None:
        """Say that this rank runs, with what software. Protocol, payload, Python and host are added here."""
        ours = {
            "protocol": PROTOCOL,
            "payload_sha256": running_payload(),
            "python": platform.python_version(),
            "host": socket.gethostname(),
        }
        self._send("started", {**ours, **body})

    def progress(self, step: int, steps: int, samples_per_s: float) -> None:
        """Say how far this rank is. Costs nothing when the last progress was less than a second ago."""
        now = time.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_EVERY_S
        self._send("progress", {"step": step, "steps": steps, "samples_per_s": samples_per_s})

    def report(self, report: RankReport) -> None:
        """Send what this rank measured. To be called once."""
        self._send("report", to_json(report))

    def failed(self, outcome: str, text: str) -> None:
        """Say why this rank cannot report. *outcome* is a name from ``results/failures.py``."""
        self._send("failed", {"outcome": outcome, "text": text})

    def close(self) -> None:
        """Say that nothing more will come. Idempotent. The connection itself lasts until the process ends."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._send("close", {})

    def _send(self, kind: str, body: Any) -> None:
        line = json.dumps({"kind": kind, "body": body}, separators=(",", ":")).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(line)
        except OSError:
            if not self._closed:
                os._exit(EXIT_BATCH_GONE)

    def _end_with_batch(self) -> None:
        try:
            while self._connection.recv(4096):
                pass  # the batch says nothing; only its end matters
        except OSError:
            pass  # a reset connection means the same as a closed one
        if not self._closed:
            os._exit(EXIT_BATCH_GONE)


def rank_of(environment: Mapping[str, str]) -> int:
    """Return this process's number among the run's ranks: ``RANK`` (torchrun's contract), ``MLHPC_RANK``, else 0.

    Raises:
        ChannelError: the variable holds no number.
    """
    for name in ("MLHPC_RANK", "RANK"):
        text = environment.get(name)
        if text is not None:
            if not (text.isascii() and text.isdigit()):
                raise ChannelError(f"{name}={text!r} in the environment is not the number of a rank")
            return int(text)
    return 0


def running_payload() -> str:
    """Return the SHA-256 of the zip that this code was imported from, or ``source`` outside a zip."""
    archive = getattr(getattr(pytest_mlhpc, "__loader__", None), "archive", None)
    if archive is None:
        return "source"
    with open(archive, "rb") as file:  # noqa: PTH123 - a str from zipimport, read whole
        return hashlib.sha256(file.read()).hexdigest()


def _connect(variables: Mapping[str, str], rank: int, purpose: str) -> socket.socket:
    path = variables["MLHPC_CHANNEL"]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    hello: Dict[str, Any] = {
        "run": variables["MLHPC_RUN"],
        "nonce": variables["MLHPC_NONCE"],
        "rank": rank,
        "purpose": purpose,
    }
    try:
        connection.connect(path)
        connection.sendall(json.dumps(hello, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        connection.close()
        raise ChannelError(f"cannot reach the batch at {path}: {error.strerror or error}") from error
    return connection
