"""Send what waits in the spool to InfluxDB: chunks of whole lines in order, until each is acknowledged."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import threading
import time
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.influx import spool as spools
from pytest_mlhpc.influx.credentials import InfluxServer
from pytest_mlhpc.influx.spool import Frame
from pytest_mlhpc.node.files import read_json

#: What a server answers when it does not take what was sent, as it is: line protocol it cannot read, a type that does not fit,
#: a body that is too large, a time outside of the retention. Anything else may be different tomorrow.
REFUSED = frozenset({400, 413, 422})
_NO_CONTENT = 204
#: Level 1 packs line protocol to a twelfth already; higher ones take several times as long for little.
_LEVEL = 1
_GZIP = 31
_LONGEST_REASON = 500


class RefusedError(MlhpcError):
    """The server does not take these lines, and never will."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason
        super().__init__(f"{status}: {reason}")


class UnavailableError(MlhpcError):
    """The server did not take the lines now. ``retry_after_s`` is what it asked for, where it did."""

    def __init__(self, text: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        self.status = status
        self.retry_after_s = retry_after_s
        super().__init__(text)


class Sink(Protocol):
    """What takes lines."""

    def write(self, lines: bytes) -> None:
        """Write lines; when it returns, the server has acknowledged all of them.

        Raises:
            RefusedError: some or all of them are not taken.
            UnavailableError: nothing is known about any of them.
        """


@dataclass(frozen=True)
class _Library:
    """The parts of influxdb-client that are used."""

    service: Any
    failure: type[Exception]
    transport: type[Exception]
    client: Any


class InfluxSink:
    """One server. Use as a context manager."""

    def __init__(self, server: InfluxServer, *, timeout_s: float) -> None:
        """Make a client; nothing is asked yet.

        Raises:
            UsageError: influxdb-client is not installed.
        """
        self._server = server
        self._library = _load(server, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._library.client.close()

    def write(self, lines: bytes) -> None:
        """Write lines; see :class:`Sink`."""
        packer = zlib.compressobj(_LEVEL, wbits=_GZIP)
        body = packer.compress(lines) + packer.flush()
        library, server = self._library, self._server
        try:
            _, status, _ = library.service.post_write_with_http_info(
                org=server.org, bucket=server.bucket, body=body, precision="ns", content_encoding="gzip"
            )
        except library.failure as error:
            raise self._failure(error) from None  # the library's error holds the whole answer
        except (library.transport, OSError, UnicodeDecodeError) as error:
            raise UnavailableError(f"{server.url} does not answer: {self._words(error)}") from None
        if status != _NO_CONTENT:  # a portal that wants a password answers 200 and a page
            raise UnavailableError(
                f"{server.url} answered {status} to a write, as InfluxDB never does; check the address",
                status,
            )

    def _failure(self, error: Any) -> MlhpcError:
        status = int(error.status or 0)
        reason = self._reason(error)
        if status in REFUSED:
            return RefusedError(status, reason)
        if not status:
            return UnavailableError(f"{self._server.url}: {reason}")
        return UnavailableError(
            f"{self._server.url} answered {status}: {reason}{hint(status, self._server)}",
            status,
            _retry_after(error),
        )

    def _reason(self, error: Any) -> str:
        """Return what the server says, in a line, without our token."""
        text = str(error.body or error.reason or "")
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            text = str(read_json(text).get("message") or text)
        return self._server.hide(" ".join(text.split()))[:_LONGEST_REASON] or "no reason given"

    def _words(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        return self._server.hide(text.rpartition("Caused by ")[2])[:_LONGEST_REASON] or type(error).__name__


def hint(status: int, server: InfluxServer) -> str:
    """Return what to do about an answer, to be put behind it."""
    match status:
        case 401:
            return " (check MLHPC_INFLUX_TOKEN)"
        case 403:
            return f" (the token may not write to {server.bucket!r})"
        case 404:
            return (
                f" (is there a bucket or database {server.bucket!r}? MLHPC_INFLUX_BUCKET, MLHPC_INFLUX_ORG)"
            )
        case _:
            return ""


def _retry_after(error: Any) -> float:
    try:
        return max(0.0, float(error.headers.get("Retry-After", "")))
    except (AttributeError, TypeError, ValueError):
        return 0.0


def _load(server: InfluxServer, timeout_s: float) -> _Library:
    try:
        from influxdb_client.client.influxdb_client import InfluxDBClient
        from influxdb_client.rest import ApiException
        from influxdb_client.service.write_service import WriteService
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise UsageError(
            f"InfluxDB needs a package that is not installed ({error.name}): pip install 'pytest-mlhpc[influx]'"
        ) from error
    client = InfluxDBClient(
        url=server.url,
        token=server.token,
        org=server.org,
        timeout=int(timeout_s * 1000),
        ssl_ca_cert=server.ca or None,
        retries=False,  # no second try and no redirect behind our back: the token goes to one host only
    )
    service = WriteService(client.api_client)  # type: ignore[no-untyped-call]  # the library's
    return _Library(service, ApiException, HTTPError, client)


#: InfluxData advises 5,000 lines a request ("Optimize writes to InfluxDB"); lines with long names count by their bytes.
CHUNK_LINES = 5000
CHUNK_BYTES = 4 << 20
#: So many refused lines in a row, and none taken: then not the lines are wrong but the server or its address.
ALL_REFUSED = 50
#: First wait before another try, in seconds; each next one is twice as long, up to the second figure.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0


Part = TypeVar("Part")


class StuckError(MlhpcError):
    """The server refuses every line. All was kept."""


@dataclass
class Progress:
    """What was done so far."""

    points: int = 0  #: acknowledged
    rejected: int = 0  #: put aside, with the server's reason
    damaged: int = 0  #: frames of the spool that were not what had been written
    files: int = 0  #: of the spool, sent whole
    adopted: int = 0  #: of dead writers
    reasons: dict[str, int] = field(default_factory=dict)  #: of what was rejected

    def reject(self, reason: str, count: int = 1) -> None:
        """Count lines that were put aside."""
        self.rejected += count
        if reason in self.reasons or len(self.reasons) < 20:
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass(frozen=True)
class Patience:
    """How long to try while the server does not answer. ``wait(seconds)`` is for tests; None: return early if all is to end."""

    until: float = 0.0  #: time.monotonic()
    wait: Callable[[float], object] | None = None


class Sender:
    """Sends lines to a sink; keeps count in ``progress``. With several *lanes*, so many requests are under way at a time."""

    def __init__(
        self, sink: Sink, rejected: Path, patience: Patience | None = None, *, lanes: int = 1
    ) -> None:
        """Take the sink, and the folder for what it refuses."""
        self.progress = Progress()
        self.lanes = lanes
        self._lock = threading.Lock()  #: of ``progress``
        self._stop = threading.Event()
        self._sink = sink
        self._rejected = rejected
        self._patience = patience or Patience()

    def send(self, lines: bytes, name: str) -> None:
        """Send whole lines; put those that are refused into the file *name* of the folder, durably.

        Raises:
            UnavailableError: not all were acknowledged; send all again later.
            StuckError: every line is refused, which is not the lines' fault; send all again later.
            OSError: what was refused cannot be put aside; send all again later.
        """
        if not lines:
            return
        every = lines.splitlines(keepends=True)
        bad = []
        try:
            self._write(lines)
        except RefusedError as error:
            bad = self._halve(every, error)
            self._put_aside(bad, name)
        with self._lock:
            self.progress.points += len(every) - len(bad)

    def in_order(
        self,
        parts: Iterable[Part],
        send: Callable[[Part], None],
        note: Callable[[Part], None] = lambda _: None,
    ) -> None:
        """Call *send* for each part, in as many threads as there are lanes, and *note* in this one, in the parts' order.

        A server spends most of its time for a request in one thread of its own: two at a time are almost twice as fast.
        """
        if self.lanes == 1:
            for part in parts:
                send(part)
                note(part)
            return
        under_way: collections.deque[tuple[Future[None], Part]] = collections.deque()
        with ThreadPoolExecutor(self.lanes, "influx") as pool:
            try:
                for part in parts:
                    under_way.append((pool.submit(send, part), part))
                    if len(under_way) > self.lanes:
                        _settle(under_way.popleft(), note)
                while under_way:
                    _settle(under_way.popleft(), note)
            except BaseException:
                self._stop.set()  # whoever waits for the server
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def put_damage_aside(self, frame: Frame, name: str) -> None:
        """Keep what a bad disk left of a frame."""
        with self._lock:
            self.progress.damaged += 1
        text = frame.lines.decode("utf-8", "replace")
        self._put_aside([(text, "damaged in the spool: the checksum does not fit")], name)

    def _write(self, lines: bytes) -> None:
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                self._sink.write(lines)
            except UnavailableError as error:
                pause = min(max(wait_s, error.retry_after_s), _LONGEST_WAIT_S)
                if self._stop.is_set() or time.monotonic() + pause > self._patience.until:
                    raise
                (self._patience.wait or self._stop.wait)(pause)
                wait_s *= 2
            else:
                return

    def _halve(self, every: list[bytes], refusal: RefusedError) -> list[tuple[str, str]]:
        """Return the lines that are refused, with the reason. Servers may have taken the others already; again is harmless."""
        bad: list[tuple[str, str]] = []
        taken = 0
        todo = [(every, refusal)]  # parts of which it is known that the server refuses them as they are
        while todo:
            part, why = todo.pop()
            if len(part) == 1:
                bad.append((part[0].decode("utf-8", "replace").rstrip("\n"), str(why)))
                if len(bad) >= ALL_REFUSED and not taken and not self.progress.points:
                    raise StuckError(f"every line is refused, the last one with {why}; nothing was dropped")
                continue
            middle = len(part) // 2
            for half in (part[middle:], part[:middle]):
                try:
                    self._write(b"".join(half))
                    taken += len(half)
                except RefusedError as error:
                    todo.append((half, error))
        return bad

    def _put_aside(self, bad: list[tuple[str, str]], name: str) -> None:
        if not bad:
            return
        rows = (json.dumps({"reason": why, "line": line}, ensure_ascii=False) for line, why in bad)
        spools.replace_file(
            self._rejected / name, "".join(f"{row}\n" for row in rows).encode("utf-8", "replace")
        )
        with self._lock:
            for _, why in bad:
                self.progress.reject(why)


def _settle(done: tuple[Future[None], Part], note: Callable[[Part], None]) -> None:
    future, part = done
    future.result()
    note(part)


def push_spool(sender: Sender, spool: Path) -> None:
    """Send all that waits, oldest first, that of living writers too.

    A disk that is full keeps nothing from being sent: sending is what makes room on it.

    Raises:
        UnavailableError: the server is away, slow, full, or does not know us; what was not sent stays.
        StuckError: it refuses everything; all stays.
        OSError: the spool cannot be read; or all was sent, but not noted, and some of it will be sent again.
    """
    sender.progress.adopted += len(spools.adopt(spool))
    troubles = [trouble for path in spools.waiting(spool) if (trouble := _push_file(sender, spool, path))]
    spools.forget_marks(spool)
    if troubles:
        raise troubles[0]


def _push_file(sender: Sender, spool: Path, path: Path) -> OSError | None:
    """Send a file; return why it could not be noted how far it was sent, if that is still of interest."""
    start = spools.sent(spool, path.name)
    troubles: list[OSError] = []

    def send(chunk: _Chunk) -> None:
        name = f"{path.name}.{chunk.start}.jsonl"
        sender.send(b"".join(chunk.lines), name)
        for number, frame in enumerate(chunk.damaged):
            sender.put_damage_aside(frame, f"{name}.damaged{number}")

    def note(chunk: _Chunk) -> None:
        try:
            spools.note_sent(spool, path.name, chunk.end)
        except OSError as error:
            troubles.append(error)

    try:
        sender.in_order(_chunks(spools.frames(path, start), start), send, note)
    except FileNotFoundError:  # it has just moved, or another sender has sent and removed it
        moved = spool / "ready" / path.name
        return _push_file(sender, spool, moved) if path != moved and moved.exists() else None
    if path.parent.name == "ready":
        sender.progress.files += 1
        spools.remove_sent(spool, path.name)
    return troubles[0] if troubles and path.exists() else None


@dataclass
class _Chunk:
    """Frames that are sent in one request: bytes [start, end) of their file."""

    start: int
    end: int
    lines: list[bytes] = field(default_factory=list)
    damaged: list[Frame] = field(default_factory=list)


def _chunks(frames: Iterable[Frame], start: int) -> Iterator[_Chunk]:
    chunk = _Chunk(start, start)
    lines = size = 0
    for frame in frames:
        count = frame.lines.count(b"\n")
        if chunk.end > chunk.start and (lines + count > CHUNK_LINES or size + len(frame.lines) > CHUNK_BYTES):
            yield chunk
            chunk, lines, size = _Chunk(chunk.end, chunk.end), 0, 0
        if frame.whole:
            chunk.lines.append(frame.lines)
        else:
            chunk.damaged.append(frame)
        chunk.end = frame.end
        lines, size = lines + count, size + len(frame.lines)
    if chunk.end > chunk.start:
        yield chunk


def push_lines(sender: Sender, records: Iterable[list[str]], name: str) -> None:
    """Send the lines of records that are stored elsewhere; nothing is noted, as all can be sent again.

    Raises:
        UnavailableError: as :func:`push_spool`.
        StuckError: as :func:`push_spool`.
        OSError: what was refused cannot be put aside.
    """

    def send(data: bytes) -> None:
        digest = hashlib.blake2b(data, digest_size=6).hexdigest()
        sender.send(data, f"{name}-{digest}.jsonl")  # the same lines again replace the same file

    sender.in_order(_batches(records), send)


def _batches(records: Iterable[list[str]]) -> Iterator[bytes]:
    batch: list[str] = []
    size = 0
    for lines in records:
        batch += lines
        size += sum(map(len, lines))
        if len(batch) >= CHUNK_LINES or size >= CHUNK_BYTES:
            yield "".join(f"{line}\n" for line in batch).encode("utf-8", "replace")
            batch, size = [], 0
    yield "".join(f"{line}\n" for line in batch).encode("utf-8", "replace")


def retry_rejected(state_dir: Path) -> int:
    """Put what was refused back into the spool; return how many lines. What is damaged stays where it is.

    Raises:
        OSError: the spool cannot be read or written; nothing is lost.
    """
    folder = spools.make_folders(state_dir) / "rejected"
    count = 0
    for path in sorted(folder.glob("[!.]*.jsonl*")):  # the others were never finished
        lines = _refused_lines(path)
        if not lines:
            continue
        spools.replace_file(folder.parent / "ready" / spools.new_name(), spools.frame(lines))
        path.unlink(missing_ok=True)
        count += len(lines)
    return count


def _refused_lines(path: Path) -> list[str]:
    """Return the lines of a file of :meth:`Sender._put_aside`; none where it is damaged, or holds what a bad disk left."""
    # Not splitlines(): JSON leaves U+2028 and its like as they are, which are no ends of rows.
    rows = path.read_text(encoding="utf-8", errors="replace").split("\n")
    try:
        plain = [json.loads(row) for row in rows if row]
        return [str(row["line"]) for row in plain if not str(row["reason"]).startswith("damaged")]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
