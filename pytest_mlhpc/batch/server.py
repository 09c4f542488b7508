"""PAYLOAD. The batch's end of the channel to its ranks (see ``batch/channel.py``)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence

from pytest_mlhpc.batch.channel import TCP, keep_alive

#: Longest line that a rank may send, in bytes; a report with 100,000 step times has about 2 MB.
MAX_RANK_LINE = 64 * 1024 * 1024

#: Longest path of a Unix socket, terminator included (unix(7)).
SUN_PATH = 108


#: Longest greeting, in bytes: ids of at most 128 characters and a node's name.
MAX_HELLO = 4096

#: How long a connection from the network may say nothing that is a greeting, in seconds.
HELLO_LIMIT_S = 30.0


#: Most connections that may wait to be accepted; the kernel has a limit of its own (net.core.somaxconn, usually 4,096).
BACKLOG = 4096


@dataclass(frozen=True)
class RankMessage:
    """One line from a rank. ``kind`` is hello, started, progress, report, failed, close, output or damaged."""

    kind: str
    body: Any


class RankServer:
    """A listening Unix socket in a directory that only this user may enter.

    Args:
        directory: made by who started this batch, and removes it however the batch ends; empty: we make our own.

    Raises:
        OSError: the socket cannot be made, or *directory* is not ours alone.
    """

    def __init__(self, directory: str = "") -> None:
        self._own = not directory
        if directory:
            self._directory = Path(directory)
            found = self._directory.lstat()
            private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700
            if not private or found.st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it is no private folder of ours", directory)
        else:
            self._directory = self._make()
        self.path = self.channel = str(self._directory / "s")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(self.path)
        self.socket.listen(1024)
        self.socket.setblocking(False)

    @staticmethod
    def _make() -> Path:
        base = None if len(tempfile.gettempdir()) < SUN_PATH - 40 else "/tmp"  # noqa: S108 - mkdtemp makes it private
        return Path(tempfile.mkdtemp(prefix="mlhpc-", dir=base))

    def accept(self) -> List[Connection]:
        """Return the connections that wait."""
        return [Connection(accepted) for accepted in _accept_all(self.socket)]

    def close(self) -> None:
        """Stop listening, and remove the socket and a directory of our own."""
        self.socket.close()
        with contextlib.suppress(OSError):  # a run may have removed it
            os.unlink(self.path)  # noqa: PTH108 - missing_ok is newer than some interpreters here
        if self._own:
            shutil.rmtree(self._directory, ignore_errors=True)


class RemoteServer:
    """A listening TCP socket for ranks on any node; whoever connects has to know the run's nonce.

    Args:
        hosts: names and addresses of this node as other nodes may know it, the likeliest first. Only loopback ones: nobody
            else is to come, and nobody else can.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        alone = list(hosts) == ["127.0.0.1"]
        self.socket = self._listen("127.0.0.1" if alone else "")
        self.socket.setblocking(False)
        port = self.socket.getsockname()[1]
        self.channel = TCP + ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts
        )

    @staticmethod
    def _listen(host: str) -> socket.socket:
        if not host and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # a kernel may know IPv6 and have it switched off
                return socket.create_server(
                    ("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
                )
        return socket.create_server((host, 0), backlog=BACKLOG)

    def accept(self) -> List[Connection]:
        """Return the connections that wait."""
        return [Connection(accepted, remote=True) for accepted in _accept_all(self.socket)]

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def _accept_all(listening: socket.socket) -> List[socket.socket]:
    found: List[socket.socket] = []
    while True:
        try:
            accepted, _ = listening.accept()
        except ConnectionAbortedError:
            continue
        except (
            OSError
        ):  # nobody waits; or no descriptor is free, and who waits is asked again in the next turn
            return found
        found.append(accepted)


class Connection:
    """One connection of a rank. ``rank``, ``purpose`` and ``node`` are known after its hello.

    ``pid`` is the peer's process as the kernel knows it (0 if it is in another pid namespace, or *remote*). A remote peer
    has to greet within ``HELLO_LIMIT_S`` and ``MAX_HELLO`` bytes; until then it is nobody.
    """

    def __init__(self, accepted: socket.socket, *, remote: bool = False) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.remote = remote
        self.since = time.monotonic()
        self.error: Optional[int] = None  #: errno, where the connection ended with one
        if remote:
            keep_alive(accepted)
        self.pid = 0 if remote else peer_pid(accepted)
        self.rank: Optional[int] = None
        self.purpose = ""
        self.ended = False
        self._buffer = bytearray()

    def hello(self, body: Mapping[str, Any]) -> None:
        """Remember who this is; what follows on an output connection is raw bytes."""
        self.rank, self.purpose = body["rank"], body["purpose"]

    def read(self) -> List[RankMessage]:
        """Return what has arrived. Sets ``ended`` when the peer is gone. Never raises for what a peer sends."""
        try:
            for _ in range(64 if self.purpose else 1):  # then the others' turn: a rank may print for ever
                data = self.socket.recv(1 << 16)
                if not data:
                    self.ended = True
                    break
                self._buffer += data
        except BlockingIOError:
            pass
        except OSError as error:
            self.ended, self.error = True, error.errno
        return self._split()

    @property
    def stranger(self) -> bool:
        """Whether it came over the network, has not greeted, and has had its time or its bytes for that."""
        late = time.monotonic() - self.since > HELLO_LIMIT_S
        return self.remote and not self.purpose and (self.ended or late or len(self._buffer) > MAX_HELLO)

    def _split(self) -> List[RankMessage]:
        found: List[RankMessage] = []
        while True:
            if self.purpose == "output":
                raw, self._buffer = bytes(self._buffer), bytearray()
                return [*found, RankMessage("output", raw)] if raw else found
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                break
            self._buffer = rest
            message = _parse(bytes(line), first=not self.purpose)
            if message.kind == "hello":
                self.hello(message.body)
            found.append(message)
        if len(self._buffer) > MAX_RANK_LINE:
            self._buffer = bytearray()
            found.append(RankMessage("damaged", f"a line of more than {MAX_RANK_LINE} bytes"))
        elif self.ended and self._buffer:
            found.append(RankMessage("damaged", f"it broke off in a line of {len(self._buffer)} bytes"))
            self._buffer = bytearray()
        return found

    def close(self) -> None:
        """Close our end; a rank that still runs ends itself then."""
        with contextlib.suppress(OSError):  # closing is all we can do
            self.socket.close()


def peer_pid(connected: socket.socket) -> int:
    """Return the pid of the process at the other end (SO_PEERCRED: pid, uid, gid as three ints)."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def _parse(line: bytes, *, first: bool) -> RankMessage:
    shown = f"the line {line[:80]!r}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return RankMessage("damaged", shown)
    if not isinstance(data, dict):
        return RankMessage("damaged", shown)
    if first:
        texts = all(isinstance(data.get(name), str) for name in ("run", "nonce"))
        if texts and type(data.get("rank")) is int and data.get("purpose") in ("messages", "output"):
            return RankMessage("hello", data)
        return RankMessage("damaged", shown)
    kind, body = data.get("kind"), data.get("body")
    if kind not in ("started", "progress", "report", "failed", "close") or not isinstance(body, dict):
        return RankMessage("damaged", shown)
    return RankMessage(str(kind), body)


def open_pidfd(pid: int) -> Optional[int]:
    """Return a descriptor that is readable once *pid* has ended; None before Linux 5.3 or in another pid namespace."""
    if pid <= 0 or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
