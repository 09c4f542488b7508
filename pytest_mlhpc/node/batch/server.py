"""The batch's end of the channel to its ranks (see ``node/protocol/channel.py``): until they have proved that they are its own, it hears nothing."""

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
from typing import Any, List, Optional, Sequence

from pytest_mlhpc.node.agents.wire import PROOF_S, Handshake, keep_alive, listen
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.channel import TCP

#: Longest line that a rank may send, in bytes; a report with 100,000 step times has about 2 MB.
MAX_RANK_LINE = 64 * 1024 * 1024

#: Longest path of a Unix socket, terminator included (unix(7)).
SUN_PATH = 108


#: Age from which a socket that nobody serves is left over, in seconds: between its making and listening lie microseconds.
ABANDONED_S = 60.0


@dataclass(frozen=True)
class RankMessage:
    """One line from a rank. ``kind`` is hello, started, progress, report, failed, close, output or damaged."""

    kind: str
    body: Any


class RankServer:
    """A listening Unix socket in a directory that only this user may enter.

    Args:
        key: what the run's ranks know.
        directory: made by who started this batch, and removes it however the batch ends; empty: we make our own.

    Raises:
        OSError: the socket cannot be made, or *directory* is not ours alone.
    """

    def __init__(self, key: bytes, directory: str = "") -> None:
        self._key, self._own = key, not directory
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
        base = tempfile.gettempdir()
        base = base if len(base) < SUN_PATH - 40 else "/tmp"  # noqa: S108 - mkdtemp makes it private
        for folder in Path(base).glob("mlhpc-????????"):
            _remove_abandoned(folder)
        return Path(tempfile.mkdtemp(prefix="mlhpc-", dir=base))

    def accept(self) -> List[RankConnection]:
        """Return the connections that wait."""
        return [RankConnection(accepted, self._key) for accepted in _accept_all(self.socket)]

    def close(self) -> None:
        """Stop listening, and remove the socket and a directory of our own."""
        self.socket.close()
        with contextlib.suppress(OSError):  # a run may have removed it
            os.unlink(self.path)  # noqa: PTH108 - missing_ok is newer than some interpreters here
        if self._own:
            shutil.rmtree(self._directory, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user's with a socket at which nobody listens, or with nothing: its batch was killed outright.

    Nothing is also what a batch leaves that is killed before it listens, or within this function.
    """
    with contextlib.suppress(OSError):  # another user's, gone meanwhile, or it holds something else
        found = folder.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
        if not ours or time.time() - found.st_mtime < ABANDONED_S:
            return
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as caller:
            caller.setblocking(False)
            if caller.connect_ex(str(folder / "s")) == errno.ECONNREFUSED:
                (folder / "s").unlink()
        folder.rmdir()


class RemoteServer:
    """A listening TCP socket for ranks on any node.

    Args:
        key: what the run's ranks know.
        hosts: names and addresses of this node as other nodes may know it, the likeliest first. Only loopback ones: nobody
            else is to come, and nobody else can.

    Raises:
        OSError: no socket can be made.
    """

    def __init__(self, key: bytes, hosts: Sequence[str]) -> None:
        self._key = key
        alone = list(hosts) == ["127.0.0.1"]
        self.socket = listen([0], "127.0.0.1" if alone else "")
        port = self.socket.getsockname()[1]
        self.channel = TCP + ",".join(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts
        )

    def accept(self) -> List[RankConnection]:
        """Return the connections that wait."""
        return [RankConnection(accepted, self._key, remote=True) for accepted in _accept_all(self.socket)]

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


class RankConnection:
    """One connection of whoever came. ``rank`` and ``purpose`` are known after its hello, for which it has to know *key*.

    ``pid`` is the peer's process as the kernel knows it (0 if it is in another pid namespace, or *remote*). It has to prove
    itself within ``PROOF_S`` and ``MAX_HANDSHAKE`` bytes (``node/agents/wire.py``); until then it is nobody.
    """

    def __init__(self, accepted: socket.socket, key: bytes, *, remote: bool = False) -> None:
        self._handshake = Handshake(accepted, key)
        self.socket = accepted
        self.remote = remote
        self.error: Optional[int] = None  #: errno, where the connection ended with one
        if remote:
            keep_alive(accepted)
        self.pid = 0 if remote else peer_pid(accepted)
        self.rank: Optional[int] = None
        self.purpose = ""
        self.ended = False
        self._buffer = bytearray()

    @property
    def stranger(self) -> bool:
        """Whether it has not proved that it belongs here, and has had its time or its bytes for that."""
        return not self.purpose and (self.ended or time.monotonic() - self._handshake.wire.since > PROOF_S)

    def read(self) -> List[RankMessage]:
        """Return what has arrived. Sets ``ended`` when the peer is gone. Never raises for what a peer sends."""
        return self._read() if self.purpose else self._prove()

    def _prove(self) -> List[RankMessage]:
        """Return the greeting of who has proved to be of this run. What follows on an output connection is raw bytes."""
        text = self._handshake.greeting()
        if text is None:
            self.ended = bool(self._handshake.wire.ended)
            return []
        message = _parse_hello(text)
        if message.kind == "hello":
            self.rank, self.purpose = message.body["rank"], message.body["purpose"]
            self._handshake.welcome()
        else:
            self.ended = True
        return [message]

    def _read(self) -> List[RankMessage]:
        try:
            for _ in range(64):  # then the others' turn: a rank may print for ever
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
            found.append(_parse(bytes(line)))
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


def _parse_hello(text: str) -> RankMessage:
    try:
        data = read_json(text)
    except (ValueError, RecursionError):
        data = None
    known = isinstance(data, dict) and data.get("purpose") in ("messages", "output")
    if known and type(data.get("rank")) is int:
        return RankMessage("hello", data)
    return RankMessage("damaged", f"the greeting {text[:80]!r}")


def _parse(line: bytes) -> RankMessage:
    shown = f"the line {line[:80]!r}"
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return RankMessage("damaged", shown)
    if not isinstance(data, dict):
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
