"""PAYLOAD. The rank's end of the channel to its batch: one stream socket, JSON lines, one direction.

The batch makes the socket (``batch/server.py``) and names it in ``MLHPC_CHANNEL``: the path of a Unix socket in a directory
that only its user may enter, or, where ranks are on other nodes, ``tcp://ADDRESS:PORT``, several of them with commas
between, to be tried in turn. A rank says hello with the ids from its environment, then sends ``started``, ``progress``,
``report`` or ``failed``, and ``close``. The batch never answers. When its end closes, the batch is gone, and a rank
without a batch must not go on: a thread then ends the process, whatever the main thread is waiting for.

What a rank finds in its environment besides: ``MLHPC_PLAN`` is the path of plan.json and ``MLHPC_RUN`` the id of its
run in there; ``MLHPC_NODE`` is how its node is called where Slurm does not say it; torchrun sets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``.
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
from typing import Any, Dict, List, Mapping, Optional, Tuple

import pytest_mlhpc
from pytest_mlhpc.batch.plan import PROTOCOL
from pytest_mlhpc.results.schema import RankReport, to_json

#: Exit code of a rank whose batch went away: EX_UNAVAILABLE of sysexits.h (4.3BSD).
EXIT_BATCH_GONE = 69

#: Least time between two progress messages of one rank, in seconds (worker lines allow one a second).
PROGRESS_EVERY_S = 1.0


#: Beginning of a channel's name where ranks reach the batch over the network.
TCP = "tcp://"

#: Longest wait for one address of the batch, in seconds: TCP repeats its first packet after 1, 3, 7 and 15 s.
CONNECT_LIMIT_S = 20.0

#: After how many seconds without an answer the other node counts as dead: a probe after the first, three more with the
#: second between them (tcp(7)).
KEEPALIVE_S, PROBE_S, PROBES = 15, 5, 3

#: Outcome by which rank 0 says that its port is taken: the batch starts the run once more with another.
PORT_TAKEN = "port_taken"


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

        Reads ``MLHPC_CHANNEL`` (where the batch listens), ``MLHPC_RUN``, ``MLHPC_NONCE`` and the rank's number. With
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
            "step": os.environ.get("SLURM_STEP_ID", ""),
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
    channel = variables["MLHPC_CHANNEL"]
    hello: Dict[str, Any] = {
        "run": variables["MLHPC_RUN"],
        "nonce": variables["MLHPC_NONCE"],
        "rank": rank,
        "purpose": purpose,
        "node": variables.get("MLHPC_NODE") or variables.get("SLURMD_NODENAME") or socket.gethostname(),
    }
    connection = _tcp(channel) if channel.startswith(TCP) else _unix(channel)
    try:
        connection.sendall(json.dumps(hello, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        connection.close()
        raise ChannelError(f"cannot reach the batch at {channel}: {error.strerror or error}") from error
    return connection


def _unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ChannelError(f"cannot reach the batch at {path}: {error.strerror or error}") from error
    return connection


def _tcp(channel: str) -> socket.socket:
    troubles = []
    for host, port in addresses_of(channel):
        try:
            connection = socket.create_connection((host, port), CONNECT_LIMIT_S)
        except (OSError, UnicodeError) as error:
            troubles.append(f"{host} port {port}: {getattr(error, 'strerror', None) or error}")
            continue
        connection.settimeout(None)
        keep_alive(connection)
        return connection
    raise ChannelError(f"cannot reach the batch from {socket.gethostname()}: {'; '.join(troubles)}")


def addresses_of(channel: str) -> List[Tuple[str, int]]:
    """Return host and port of each address in a ``tcp://`` channel.

    Raises:
        ChannelError: it is not written so.
    """
    found = []
    for text in channel[len(TCP) :].split(","):
        host, _, port = text.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise ChannelError(f"MLHPC_CHANNEL={channel!r} in the environment names no address")
        found.append((host.strip("[]"), int(port)))
    return found


def keep_alive(connection: socket.socket) -> None:
    """Let both ends of a TCP connection notice that the other's node is dead, also while data is under way."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
    patience_ms = 1000 * (KEEPALIVE_S + PROBE_S * PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
