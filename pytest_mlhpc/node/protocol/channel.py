"""The rank's end of the channel to its batch: one stream socket, JSON lines, one direction.

The batch makes the socket (``node/batch/server.py``) and names it in ``MLHPC_CHANNEL``: the path of a Unix socket in a directory
that only its user may enter, or, where ranks are on other nodes, ``tcp://ADDRESS:PORT``, several of them with commas
between, to be tried in turn. Both first prove that they know the run's secret (``node/agents/wire.py``), which goes over no socket.
Then the rank sends ``started``, ``progress``, ``report`` or ``failed``, and ``close``, and the batch never answers. When its
end closes, the batch is gone, and a rank without a batch must not go on: a thread then ends the process, whatever the main
thread is waiting for.

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
from typing import Any, List, Mapping, Optional, Tuple, Union

from pytest_mlhpc.node.agents.wire import PROOF_S, Wire, connect, greet, key_of_run
from pytest_mlhpc.node.protocol.plan import PROTOCOL
from pytest_mlhpc.node.protocol.schema import RankReport, to_json

#: Exit code of a rank whose batch went away: EX_UNAVAILABLE of sysexits.h (4.3BSD).
EXIT_BATCH_GONE = 69

#: Least time between two progress messages of one rank, in seconds (worker lines allow one a second).
PROGRESS_EVERY_S = 1.0


#: Beginning of a channel's name where ranks reach the batch over the network.
TCP = "tcp://"

#: Longest wait for one address of the batch, in seconds: TCP repeats its first packet after 1, 3, 7 and 15 s.
CONNECT_LIMIT_S = 20.0

#: How long the batch may take to answer, which may have thousands of ranks to greet, in seconds; how often it is asked at most
#: where it turns us away, as it may for too many strangers; and the pause before it is asked again, in seconds.
GREETING_LIMIT_S, GREETINGS, AGAIN_S = 2 * PROOF_S, 5, 1.0

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

        Reads ``MLHPC_CHANNEL`` (where the batch listens), ``MLHPC_RUN``, ``MLHPC_SECRET`` and the rank's number. With
        ``MLHPC_OUTPUT=channel`` (several ranks behind one launcher) standard output and error of this process go to
        the batch too, so that each rank has a log of its own.

        Raises:
            ChannelError: a variable is missing, or nobody listens at the socket.
        """
        variables = os.environ if environment is None else environment
        missing = [name for name in ("MLHPC_CHANNEL", "MLHPC_RUN", "MLHPC_SECRET") if not variables.get(name)]
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

    def progress(
        self, step: int, steps: int, samples_per_s: float, late: Optional[Mapping[str, float]] = None
    ) -> None:
        """Say how far this rank is, and why it is *late*. Costs nothing when the last progress was less than a second ago."""
        now = time.monotonic()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_EVERY_S
        body = {"step": step, "steps": steps, "samples_per_s": samples_per_s}
        self._send("progress", body if late is None else {**body, "late": late})

    def report(self, report: RankReport) -> None:
        """Send what this rank measured. To be called once."""
        self._send("report", to_json(report))

    def failed(self, outcome: str, text: str) -> None:
        """Say why this rank cannot report. *outcome* is a name from ``store/record.py``."""
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
    archive = getattr(globals().get("__loader__"), "archive", None)
    if archive is None:
        return "source"
    with open(archive, "rb") as file:  # noqa: PTH123 - a str from zipimport, read whole
        return hashlib.sha256(file.read()).hexdigest()


def _connect(variables: Mapping[str, str], rank: int, purpose: str) -> socket.socket:
    """Return the connection to the batch, which has proved to be ours.

    Raises:
        ChannelError: it cannot be reached, or whoever can be does not know this run.
    """
    key = key_of_run(variables["MLHPC_RUN"], variables["MLHPC_SECRET"])
    node = variables.get("MLHPC_NODE") or variables.get("SLURMD_NODENAME") or socket.gethostname()
    hello = json.dumps({"rank": rank, "purpose": purpose, "node": node})
    channel = variables["MLHPC_CHANNEL"]
    places = addresses_of(channel) if channel.startswith(TCP) else [channel]
    deadline = time.monotonic() + PROOF_S
    for left in reversed(range(GREETINGS)):
        troubles: List[str] = []
        turned_away = False
        for place in places:
            try:
                connection = _open(place)
            except (OSError, UnicodeError) as error:
                troubles.append(_trouble(place, error))
                continue
            try:
                greet(Wire(connection), key, lambda: hello, GREETING_LIMIT_S)
            except OSError as error:
                connection.close()
                troubles.append(_trouble(place, error))
                turned_away = True
                continue
            connection.setblocking(True)
            return connection
        if not (turned_away and left and time.monotonic() < deadline):
            break
        time.sleep(AGAIN_S)
    raise ChannelError(f"cannot reach the batch from {socket.gethostname()}: {'; '.join(troubles)}")


def _open(place: Union[str, Tuple[str, int]]) -> socket.socket:
    """Return a connection to an address, or to the path of a Unix socket.

    Raises:
        OSError, UnicodeError: nobody listens there, or there is no such place.
    """
    if not isinstance(place, str):
        return connect(*place, CONNECT_LIMIT_S)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(place)
    except OSError:
        connection.close()
        raise
    return connection


def _trouble(place: Union[str, Tuple[str, int]], error: Exception) -> str:
    where = place if isinstance(place, str) else f"{place[0]} port {place[1]}"
    return f"{where}: {getattr(error, 'strerror', None) or error}"


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
