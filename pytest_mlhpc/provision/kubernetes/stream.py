"""Answers as they come: bytes, lines, and the events of a watch."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterable, Iterator

import urllib3

from pytest_mlhpc.line import Line
from pytest_mlhpc.provision.kubernetes.api import WatchEvent
from pytest_mlhpc.provision.kubernetes.errors import Call, KubernetesError, Unavailable, error_of
from pytest_mlhpc.results.foreign import read_json

#: Most bytes that one read takes.
READ_BYTES = 256 * 1024
#: Longest watch event, in bytes: etcd keeps objects of at most 1.5 MiB by default, and JSON may be longer than what is kept.
MOST_EVENT_BYTES = 64 * 1024 * 1024
#: Longest line of a log that is kept in one piece, in bytes.
MOST_LINE_BYTES = 16 * 1024 * 1024


def body(response: urllib3.BaseHTTPResponse, most: int, *, cut: bool = False) -> bytes:
    """Return all of an answer; beyond *most* bytes it is cut, or refused (OSError)."""
    pieces, size = [], 0
    while piece := response.read1(READ_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            if cut:
                break
            raise OSError(0, f"the answer has more than {most} bytes")
    return b"".join(pieces)


class Stream:
    """Bytes of one answer until the server ends it, or :meth:`close` from any thread does.

    Args:
        response: whose body is read.
        line: its connection.
        call: for texts of errors.
        forget: called once with the line when nothing more will be read.
    """

    def __init__(
        self, response: urllib3.BaseHTTPResponse, line: Line, call: Call, forget: Callable[[Line], None]
    ) -> None:
        self._response = response
        self._line = line
        self._call = call
        self._forget = forget
        self._lock = threading.Lock()
        self._state = "new"

    def __iter__(self) -> Iterator[bytes]:
        """Return pieces as they come; once.

        Raises:
            Unavailable: the connection broke before the server's proper end.
        """
        with self._lock:
            if self._state != "new":
                return
            self._state = "read"
        try:
            while piece := self._piece():
                yield piece
        finally:
            self._end()

    def close(self) -> None:
        """End it; who reads is woken at once and gets no error."""
        self._line.cut("closed")
        with self._lock:
            if self._state == "read":  # who reads cleans up
                return
        self._end()

    def _end(self) -> None:
        with self._lock:
            if self._state == "ended":
                return
            self._state = "ended"
        self._response.close()
        self._forget(self._line)

    def _piece(self) -> bytes:
        try:
            return self._response.read1(READ_BYTES)
        except (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            if self._line.why == "closed":
                return b""
            words = self._line.why or f"the connection broke: {type(error).__name__}"
            raise Unavailable(self._call, words) from error


def lines(pieces: Iterable[bytes], most: int, rest: list[bytes]) -> Iterator[bytes]:
    """Return lines without their newline; longer ones come in parts of about *most* bytes. *rest* gets a last unended one."""
    tail: list[bytes] = []
    size = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        tail.append(first)
        size += len(first)
        if others:
            yield b"".join(tail)
            yield from others[:-1]
            tail, size = [others[-1]], len(others[-1])
        elif size >= most:
            yield b"".join(tail)
            tail, size = [], 0
    rest.append(b"".join(tail))


class LineStream:
    """A log, as :class:`~pytest_mlhpc.provision.kubernetes.api.LogStream` says."""

    def __init__(self, stream: Stream) -> None:
        self.rest = b""
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        """Return the lines as they come."""
        rest: list[bytes] = []
        yield from lines(self._stream, MOST_LINE_BYTES, rest)
        self.rest = b"".join(rest)

    def close(self) -> None:
        """End it, from any thread."""
        self._stream.close()


class WatchStream:
    """A watch, as :class:`~pytest_mlhpc.provision.kubernetes.api.Watch` says."""

    def __init__(self, stream: Stream, call: Call) -> None:
        self._stream = stream
        self._call = call
        self._closed = False

    def __iter__(self) -> Iterator[WatchEvent]:
        """Return the events as they come."""
        rest: list[bytes] = []
        for line in lines(self._stream, MOST_EVENT_BYTES, rest):
            if line.strip():
                yield _event(self._call, line)
        if not self._closed and any(part.strip() for part in rest):
            raise Unavailable(self._call, "the watch ended in the middle of an event")

    def close(self) -> None:
        """End it, from any thread."""
        self._closed = True
        self._stream.close()


def _event(call: Call, line: bytes) -> WatchEvent:
    """Return the event of one line; an ERROR event is raised."""
    try:
        found = read_json(line)
        kind, content = found["type"], found["object"]
    except (ValueError, RecursionError, TypeError, KeyError):
        kind, content = None, None
    if not (isinstance(kind, str) and isinstance(content, dict)):
        raise Unavailable(call, f"this is no watch event: {line[:200].decode(errors='replace')!r}")
    if kind == "ERROR":
        raise _told(call, content)
    return WatchEvent(kind, content)


def _told(call: Call, status: dict[str, object]) -> KubernetesError:
    code = status.get("code")
    return error_of(call, code if isinstance(code, int) else 500, status)
