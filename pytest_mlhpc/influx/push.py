"""Send records and events to InfluxDB: from the cursor of each file on, in chunks, until each chunk is acknowledged.

Open it when a push loses, doubles or refuses something, or takes too long.
"""

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from pytest_mlhpc.config.http import system_message
from pytest_mlhpc.errors import MlhpcError, StoreError, UsageError
from pytest_mlhpc.history.events import event_of_line, journal_entry_of
from pytest_mlhpc.influx import cursor as cursors
from pytest_mlhpc.influx.credentials import InfluxServer
from pytest_mlhpc.influx.cursor import Cursor, PendingFile, PushStart, RecordsAndEvents
from pytest_mlhpc.influx.schema import FORM, line_of_entry, line_of_event, lines_of
from pytest_mlhpc.node.files import read_json, sync_folder
from pytest_mlhpc.node.protocol.schema import NewerSchemaError
from pytest_mlhpc.store.store import parse_record, read_lines
from pytest_mlhpc.store.text import count, iso

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
            raise UnavailableError(
                f"{server.url} does not answer: {self._server.hide(system_message(error))}"
            ) from None
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


def hint(status: int, server: InfluxServer) -> str:
    """Return what to do about InfluxDB's answer *status*, to be put behind it."""
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


T = TypeVar("T")


class StuckError(MlhpcError):
    """The server refuses every line. None is lost."""


@dataclass
class Progress:
    """What was done so far."""

    points: int = 0  #: acknowledged
    rejected: int = 0  #: put aside, with the server's reason
    unread: int = 0  #: records, events or files that could not be read
    older: RecordsAndEvents = field(default_factory=RecordsAndEvents)  #: from before ``since_ns``
    since_ns: int = 0
    reformed: int = 0  #: files of which earlier records were sent in another form
    reasons: dict[str, int] = field(default_factory=dict)  #: of what was rejected

    def reject(self, reason: str) -> None:
        """Count a line that was put aside."""
        self.rejected += 1
        if reason in self.reasons or len(self.reasons) < 20:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def notes(self, rejected: Path) -> list[str]:
        """Return what the user has to know of it, a sentence each; *rejected* is where refused lines lie."""
        found = []
        if self.rejected:
            first, *more = (f"{times}: {why}" for why, times in self.reasons.items())
            others = f", and {len(more)} other reasons" if more else ""
            found.append(
                f"the server refused {count(self.rejected, 'line')} ({first}{others}), which lie in {rejected}; "
                "`mlhpc records push --retry-rejected` sends them once more"
            )
        if self.older.both:
            found.append(
                f"not sent: {self.older} from before {iso(self.since_ns)}; "
                "`mlhpc records push --since DATE` sends older ones"
            )
        if self.reformed:
            found.append(
                f"records are written as points of form {FORM} now; earlier points of {count(self.reformed, 'file')} stay in "
                "InfluxDB as they are"
            )
        return found


@dataclass(frozen=True)
class Patience:
    """How long to try while the server does not answer. ``wait(seconds)`` is for tests; None: return early if all is to end."""

    until: float = 0.0  #: time.monotonic()
    wait: Callable[[float], object] | None = None


class Sender:
    """Sends lines to a sink; keeps count in ``progress``. With several *lanes*, so many requests are under way at a time."""

    def __init__(
        self, sink: Sink, state_dir: Path, patience: Patience | None = None, *, lanes: int = 1
    ) -> None:
        """Take the sink, and the state directory, where refused lines are put aside."""
        self.progress = Progress()
        self.lanes = lanes
        self._lock = threading.Lock()  #: of ``progress``
        self._stop = threading.Event()
        self._sink = sink
        self.state_dir = state_dir
        self._patience = patience or Patience()

    def send(self, lines: bytes) -> Path | None:
        """Send whole lines; put those that are refused aside, durably, and return their file.

        Raises:
            UnavailableError: not all were acknowledged; send all again later.
            StuckError: every line is refused, which is not the lines' fault; send all again later.
            StoreError, OSError: what was refused cannot be put aside; send all again later.
        """
        if not lines:
            return None
        every = lines.splitlines(keepends=True)
        bad, aside = [], None
        try:
            self._write(lines)
        except RefusedError as error:
            bad = self._halve(every, error)
            aside = self._put_aside(bad)
        with self._lock:
            self.progress.points += len(every) - len(bad)
        return aside

    def in_order(
        self,
        chunks: Iterable[T],
        send: Callable[[T], object],
        acknowledge: Callable[[T], None],
    ) -> None:
        """Call *send* for each chunk, in as many threads as there are lanes. Call *acknowledge* in this one, in their order.

        A server spends most of its time for a request in one thread of its own: two at a time are almost twice as fast.
        """
        if self.lanes == 1:
            for chunk in chunks:
                send(chunk)
                acknowledge(chunk)
            return
        under_way: collections.deque[tuple[Future[object], T]] = collections.deque()
        with ThreadPoolExecutor(self.lanes, "influx") as pool:
            try:
                for chunk in chunks:
                    under_way.append((pool.submit(send, chunk), chunk))
                    if len(under_way) > self.lanes:
                        _settle(under_way.popleft(), acknowledge)
                while under_way:
                    _settle(under_way.popleft(), acknowledge)
            except BaseException:
                self._stop.set()  # whoever waits for the server
                pool.shutdown(wait=False, cancel_futures=True)
                raise

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

    def _put_aside(self, bad: list[tuple[str, str]]) -> Path | None:
        """Store refused lines in a file that is named after them, so that the same ones replace it."""
        if not bad:
            return None
        name = hashlib.blake2b("\n".join(line for line, _ in bad).encode(), digest_size=12).hexdigest()
        path = cursors.rejected_folder(self.state_dir) / f"{name}.jsonl"
        rows = (json.dumps({"reason": why, "line": line}) for line, why in bad)
        cursors.write_file(path, "".join(f"{row}\n" for row in rows), self.state_dir)
        sync_folder(path.parent)  # before a cursor says that these lines are done with
        with self._lock:
            for _, why in bad:
                self.progress.reject(why)
        return path


def _settle(done: tuple[Future[object], T], acknowledge: Callable[[T], None]) -> None:
    future, chunk = done
    future.result()
    acknowledge(chunk)


def push_records(sender: Sender, start: PushStart, tell: Callable[[str], None]) -> None:
    """Send what lies behind the cursors, oldest month first. Each cursor moves when the server has acknowledged what is before it.

    A disk that is full keeps nothing from being sent.

    Raises:
        UnavailableError: the server is away, slow, full, or does not know us; what was not sent waits.
        StuckError: it refuses everything; all waits.
        StoreError, OSError: records cannot be listed or refused lines not put aside; or all was sent, but a cursor cannot be
            written.
    """
    sender.progress.since_ns = start.since_ns
    troubles: list[StoreError] = []

    def acknowledge(chunk: _Chunk) -> None:
        for name, cursor in chunk.cursors.items():
            try:
                cursors.write_cursor(sender.state_dir, name, cursor)
            except StoreError as error:
                troubles.append(error)

    chunks = _chunks(_unsent(sender.state_dir, start, sender.progress, tell))
    sender.in_order(chunks, lambda chunk: sender.send(b"".join(chunk.lines)), acknowledge)
    cursors.forget_cursors(sender.state_dir)
    if troubles:
        raise StoreError(f"{troubles[0]}; all was sent, and some of it will be sent again")


@dataclass
class _Chunk:
    """Lines that are sent in one request, and how far each file was sent when the server has acknowledged it."""

    lines: list[bytes] = field(default_factory=list)
    cursors: dict[str, Cursor] = field(default_factory=dict)
    count: int = 0  #: of lines, and of records and events that have none
    size: int = 0


def _chunks(records: Iterable[tuple[str, Cursor, list[str]]]) -> Iterator[_Chunk]:
    chunk = _Chunk()
    for name, cursor, lines in records:
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
        number = max(1, len(lines))
        if chunk.count and (chunk.count + number > CHUNK_LINES or chunk.size + len(data) > CHUNK_BYTES):
            yield chunk
            chunk = _Chunk()
        chunk.lines.append(data)
        chunk.cursors[name] = cursor
        chunk.count += number
        chunk.size += len(data)
    if chunk.cursors:
        yield chunk


def _unsent(
    state_dir: Path, start: PushStart, progress: Progress, tell: Callable[[str], None]
) -> Iterator[tuple[str, Cursor, list[str]]]:
    """Yield, for each record or event that waits: its file, the cursor behind it, and its lines."""
    for file in cursors.pending(state_dir, start, tell):
        try:
            cursor = cursors.cursor_of(file, start, tell)
            for reached, lines in _unsent_of(file, cursor, start, progress, tell) if cursor else ():
                yield file.name, reached, lines
        except StoreError as error:
            progress.unread += 1
            tell(str(error))


def _unsent_of(
    file: PendingFile, cursor: Cursor, start: PushStart, progress: Progress, tell: Callable[[str], None]
) -> Iterator[tuple[Cursor, list[str]]]:
    """Yield the same for one file. A torn last line waits for its end; damaged lines are passed over.

    The cursor stays before what is of a newer schema, which a newer version can send; what follows it is sent each time.
    """
    stuck = False
    for offset, line in read_lines(file.path, start=cursor.offset):
        lines: list[str] = []
        try:
            made_ns, lines = _points(file, line)
            if made_ns < start.since_ns:
                lines = []
                progress.older = progress.older.and_one_of(file.name)
        except (ValueError, OverflowError) as error:  # as the index of the store has it
            newer = isinstance(error, NewerSchemaError)
            stuck |= newer
            progress.unread += 1
            tell(f"{file.path}: byte {offset}: {error} ({'waits' if newer else 'skipped, left as it is'})")
        if not stuck:
            progress.reformed += cursor.form != FORM
            cursor = replace(cursor, offset=offset + len(line), form=FORM)
        yield cursor, lines
    if cursor != file.cursor:
        yield cursor, []


def _points(file: PendingFile, line: bytes) -> tuple[int, list[str]]:
    """Return when what *line* holds was made, in ns UTC, and its points as line protocol.

    Raises:
        ValueError, OverflowError: it is damaged, or of another schema.
    """
    match file.name.partition("/")[0]:
        case cursors.EVENTS:
            event, removed = event_of_line(file.path, line)
            return max(event.at_ns, event.made_ns, event.until_ns), [line_of_event(event, removed=removed)]
        case cursors.JOURNAL:
            entry = journal_entry_of(line)
            return entry.at_ns, [line_of_entry(entry)]
        case _:
            record = parse_record(line)
            return record.created_ns, lines_of(record)


def retry_rejected(sender: Sender) -> int:
    """Send what was refused once more; return how many lines. What is damaged stays where it is.

    Raises:
        UnavailableError, StuckError: as :func:`push_records`; all stays.
        StoreError, OSError: a file cannot be read or removed, or what is refused again not be put aside; all stays.
    """
    number = 0
    folder = cursors.rejected_folder(sender.state_dir)
    for path in sorted(folder.glob("[!.]*.jsonl")):  # the others were never finished
        if lines := _refused_lines(path):
            if sender.send("".join(f"{line}\n" for line in lines).encode()) != path:
                path.unlink(missing_ok=True)
            number += len(lines)
    return number


def _refused_lines(path: Path) -> list[str]:
    """Return the lines of a file of refused ones; none where it is damaged."""
    try:
        rows = [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]
        return [str(row["line"]) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
