"""A SQLite index over the record files: it can be rebuilt at any time and is never the truth."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.store.index_rows import TABLES, insert, read_row, storable, text_id
from pytest_mlhpc.store.locations import index_path
from pytest_mlhpc.store.record import (
    AGAINST,
    Epoch,
    Record,
    SeriesKey,
    excused,
    ratio,
)
from pytest_mlhpc.store.store import (
    FOREVER_NS,
    benchmarks_in,
    drill_of,
    newest_possible,
    read_lines,
    record_at,
    record_names,
    starts_of_records,
)

_UUID7: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}\Z")
#: Seconds to wait for another process that writes the index, before the files are scanned instead.
LOCK_WAIT_S = 10.0
#: How far back from the newest record files are taken in for a question for the newest ones, before all are.
_REACHES_NS: Final = tuple(days * 86_400 * 10**9 for days in (2, 31, 366))
#: Bytes of record files that are taken in by one transaction, more or less.
_TOGETHER: Final = 4 << 20
#: Where a record is, and when it was made.
_LINE: Final = "path, start, record_id, created_ns"
_SERIES = ("system", "partition", "environment", "fingerprint", "benchmark")
_SAME_SERIES = " AND ".join(f"{name} = :{name}" for name in _SERIES)
_SAME_EPOCH = "definition = :definition AND device_model = :device_model"


class Index:
    """Finds series and records fast.

    A question first takes in what was appended since the last one, unless that was less than *patience_s* seconds ago. Of files that
    were never taken in, those are that may hold what it asks for: the newest ones answer most questions, and a question for one
    benchmark takes in those that name it. *on_problem* receives damaged lines when they are first read. May be used from several
    threads, one at a time.
    """

    def __init__(
        self,
        state_dir: Path,
        on_problem: Callable[[str], None] | None = None,
        *,
        path: Path | None = None,
        patience_s: float = 1.0,
    ) -> None:
        self._records = state_dir / "records"
        self._state_dir = state_dir
        self._tell = on_problem or (lambda _text: None)
        self._path = path or index_path(state_dir)
        self._patience_s = patience_s
        self._taken_at = -math.inf
        #: Since when all records are taken in: those of a benchmark, or of all of them ("").
        self._taken_since: dict[str, int] = {}
        #: Lists of benchmarks by their row.
        self._benchmarks: dict[int, frozenset[str] | None] = {}
        self._drill = drill_of(state_dir)
        self._database: sqlite3.Connection | None = None
        self._in_memory = False

    def history(
        self,
        key: SeriesKey,
        epoch: Epoch,
        *,
        limit: int = 30,
        since_ns: int = 0,
        default_branch: str = "main",
        calibration_reference: float | None = None,
    ) -> list[float]:
        """Return the last *limit* values of *key* in *epoch* that may feed the judge, oldest first.

        Attempt 0, verdict ``passed``; nightly records of the default branch only - on `local` (``key.fingerprint`` is
        set), which has no nightly runs, manual ones of any branch too. What is older than ``since_ns`` belongs to an earlier
        baseline epoch. A record that is there twice counts once. With ``calibration_reference``, figures of a machine that was slower
        then are corrected for it, as the judge corrects tonight's.

        Raises:
            StoreError: the record files cannot be read.
        """
        feed = "(purpose = 'nightly' AND branch = :branch)"
        if key.fingerprint:
            feed = f"({feed} OR purpose = 'manual')"
        query = (
            "SELECT value, unit, calibration FROM records JOIN points ON points.record = records.id"  # noqa: S608 - constants of this module
            f" WHERE {_SAME_SERIES} AND {_SAME_EPOCH} AND metric = :metric AND attempt = 0 AND verdict = 'passed'"
            f" AND created_ns >= :since AND {feed} GROUP BY record_id ORDER BY created_ns DESC, record_id DESC LIMIT :limit"
        )
        values = {
            **_series(key),
            **epoch._asdict(),
            "metric": key.metric,
            "since": since_ns,
            "branch": default_branch,
        }
        rows = self.ask(query, {**values, "limit": limit}, since_ns, benchmark=key.benchmark)
        return [_corrected(value, unit, rate, calibration_reference) for value, unit, rate in reversed(rows)]

    def newest_epoch(self, key: SeriesKey) -> Epoch | None:
        """Return the epoch of the newest figure of *key*, or None."""
        query = (
            "SELECT definition, device_model, created_ns FROM records JOIN points ON points.record = records.id"  # noqa: S608 - constants of this module
            f" WHERE {_SAME_SERIES} AND metric = :metric AND attempt = 0 ORDER BY created_ns DESC, id DESC LIMIT 1"
        )
        rows = self._ask_newest(query, {**_series(key), "metric": key.metric}, benchmark=key.benchmark)
        return Epoch(*rows[0][:2]) if rows else None

    def last_good(self, key: SeriesKey, epoch: Epoch) -> Record | None:
        """Return the newest record of the benchmark of *key* (metric aside) in *epoch* that passed, or None."""
        query = (
            f"SELECT {_LINE} FROM records WHERE {_SAME_SERIES} AND {_SAME_EPOCH} AND attempt = 0"  # noqa: S608 - constants of this module
            " AND verdict IN ('passed', 'improved', 'wrong_baseline', 'new') ORDER BY created_ns DESC, id DESC LIMIT 3"
        )
        rows = self._ask_newest(query, {**_series(key), **epoch._asdict()}, benchmark=key.benchmark)
        return next(iter(self._read(rows)), None)

    def benchmarks(self) -> list[str]:
        """Return the identities of all tests that were recorded, by name."""
        return [row[0] for row in self.ask("SELECT DISTINCT benchmark FROM records ORDER BY benchmark", {})]

    def identities_of(self, node_id: str) -> list[str]:
        """Return the identities of the tests whose node id is *node_id* but for the brackets at its end, by name."""
        query = (
            "SELECT DISTINCT benchmark FROM records WHERE substr(node_id, 1, :n) = :text ORDER BY benchmark"
        )
        text = f"{node_id}["
        return [row[0] for row in self.ask(query, {"n": len(text), "text": text})]

    def newest(
        self, *, session: str = "", test: str = "", limit: int = 50, compared: bool = True
    ) -> Sequence[Record]:
        """Return the newest records, newest first, of a session or a test where given, by its node id or identity.

        Without *compared*, those of comparisons (``--mlhpc-against``) are left out.
        """
        query = (
            f"SELECT {_LINE} FROM records WHERE (:session = '' OR session = :session)"  # noqa: S608 - constants of this module
            " AND (:test = '' OR node_id = :test OR benchmark = :test) AND (:compared OR purpose != :against)"
            " ORDER BY created_ns DESC, id DESC LIMIT :limit"
        )
        values = {"session": session, "test": test, "limit": limit, "compared": compared, "against": AGAINST}
        if session:
            return list(self._read(self.ask(query, values, FOREVER_NS, session)))
        return list(self._read(self._ask_newest(query, values, limit)))

    def find(self, text: str) -> Sequence[Record]:
        """Return records whose id starts with *text*, newest first, at most 10."""
        query = f"SELECT {_LINE} FROM records WHERE substr(record_id, 1, :n) = :text ORDER BY created_ns DESC LIMIT 10"  # noqa: S608 - constants of this module
        return list(self._read(self.ask(query, {"text": text, "n": len(text)}, _made_ns(text))))

    def has(self, record_id: str) -> bool:
        """Return whether a record with exactly this id is stored."""
        query = "SELECT 1 FROM records WHERE record_id = :id LIMIT 1"
        return bool(self.ask(query, {"id": record_id}, _made_ns(record_id)))

    def newest_of(self, key: SeriesKey) -> Record | None:
        """Return the newest first attempt of the benchmark of *key* (metric aside), whatever its verdict, or None."""
        query = (
            f"SELECT {_LINE} FROM records WHERE {_SAME_SERIES} AND attempt = 0"  # noqa: S608 - constants of this module
            " ORDER BY created_ns DESC, id DESC LIMIT 1"
        )
        return next(iter(self._read(self._ask_newest(query, _series(key), benchmark=key.benchmark))), None)

    def since(self, moment_ns: int) -> Sequence[Record]:
        """Return all records made since *moment_ns*, newest first."""
        query = f"SELECT {_LINE} FROM records WHERE created_ns >= :since ORDER BY created_ns DESC, id DESC"  # noqa: S608 - constants of this module
        return list(self._read(self.ask(query, {"since": moment_ns}, moment_ns)))

    def ask(
        self, query: str, values: Mapping[str, Any], since_ns: int = 0, session: str = "", benchmark: str = ""
    ) -> list[Any]:
        """Return the rows of a SELECT over the tables above.

        It asks for nothing made before *since_ns*, for *session* or for *benchmark* alone: each may spare reading old files.

        Raises:
            StoreError: the record files cannot be read.
        """
        return self.ask_at_once([query], values, since_ns, session, benchmark)[0]

    def ask_at_once(
        self,
        queries: Sequence[str],
        values: Mapping[str, Any],
        since_ns: int = 0,
        session: str = "",
        benchmark: str = "",
    ) -> list[list[Any]]:
        """Return the rows of several such SELECTs as of one moment: between two questions another process may take in a file anew.

        A damaged index is made anew, one that cannot be used is replaced by one in memory.
        """
        for _ in range(3):
            try:
                database = self._open()
                if time.monotonic() - self._taken_at >= self._patience_s:
                    self._taken_at, self._taken_since = time.monotonic(), {}
                taken = [since for name, since in self._taken_since.items() if name in ("", benchmark)]
                if session or not taken or since_ns < min(taken):
                    self._take_in(database, since_ns, session, benchmark)
                    self._taken_since[benchmark] = min(since_ns, self._taken_since.get(benchmark, since_ns))
                asked = {name: storable(value) for name, value in values.items()}
                with _transaction(database, "DEFERRED"):
                    return [database.execute(query, asked).fetchall() for query in queries]
            except sqlite3.DatabaseError as error:
                self._recover(error)
        raise StoreError(f"{self._path}: no index can be made of {self._records}")

    def read(self, lines: Iterable[tuple[str, int, str]]) -> Iterator[Record]:
        """Yield the records at (path, start, record_id), as the table has them; what cannot be read is reported and left out."""
        return self._read(lines)

    def rebuild(self) -> int:
        """Forget everything, take in all record files again, and return the number of records."""
        self.close()
        self._remove()
        return int(self.ask("SELECT count(*) FROM records", {})[0][0])

    def close(self) -> None:
        """Close the database. Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None
        self._taken_at, self._benchmarks = -math.inf, {}

    def _ask_newest(
        self, query: str, values: dict[str, Any], enough: int = 1, benchmark: str = ""
    ) -> list[Any]:
        """Return the rows of a query for the newest *enough* records, whose rows end with ``created_ns``."""
        newest = "SELECT max(ns) FROM (SELECT max(created_ns) AS ns FROM records UNION ALL SELECT max(last_ns) FROM waiting)"
        latest = self.ask(newest, {}, FOREVER_NS)[0][0] or 0
        for reach_ns in _REACHES_NS:
            rows = self.ask(query, values, latest - reach_ns, benchmark=benchmark)
            if len(rows) >= enough and rows[enough - 1][-1] >= latest - reach_ns:
                return rows
        return self.ask(query, values, benchmark=benchmark)

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            # Whoever only reads leaves no folder behind where the state directory is another one.
            self._in_memory = self._in_memory or not self._state_dir.exists()
            if not self._in_memory:
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                except OSError:  # a state directory that may only be read
                    self._in_memory = True
            name = ":memory:" if self._in_memory else str(self._path)
            self._database = sqlite3.connect(
                name, timeout=LOCK_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA synchronous = OFF")  # a lost index is made again
            self._database.executescript(TABLES)
        return self._database

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        # A journal that stayed behind would be played back into the new database.
        self._path.with_name(f"{self._path.name}-journal").unlink(missing_ok=True)

    def _recover(self, error: sqlite3.DatabaseError) -> None:
        self.close()
        # damaged, but its place can be read and written
        usable = not isinstance(error, sqlite3.OperationalError)
        if usable:
            with contextlib.suppress(OSError):
                self._remove()
                return
        self._in_memory = True

    def _take_in(self, database: sqlite3.Connection, since_ns: int, session: str, benchmark: str) -> None:
        """Take in what files have grown by, and those new to us that may hold records made since then or of *session*.

        With a *benchmark*, files that do not name it go on waiting.
        """
        known = {row[0]: row[1:] for row in database.execute("SELECT path, inode, mtime_ns, size FROM files")}
        waiting = {row[0]: row[1:] for row in database.execute("SELECT * FROM waiting")}
        present, changes, due = set(), [], []
        for name in record_names(self._state_dir):
            try:
                info = os.stat(f"{self._records}/{name}")  # noqa: PTH116 - there are thousands
            except OSError:  # removed a moment ago
                continue
            present.add(name)
            state = info.st_ino, info.st_mtime_ns, info.st_size
            if known.get(name) == state:
                continue
            if name not in known and name.partition("/")[2] != f"{session}.jsonl":
                before = waiting.get(name, ())
                row = before if before[:3] == state else state
                now = self._examined(database, name, row, since_ns, benchmark)
                if now != before:
                    changes.append((name, *now))
                if now[3] < since_ns or (benchmark and not self._may_include(database, now[4], benchmark)):
                    continue
            due.append((name, info))
        with _transaction(database) if changes else contextlib.nullcontext():
            database.executemany("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?, ?, ?, ?)", changes)
        for together in _portions(due):
            with _transaction(database):
                for name, info in together:
                    self._take_in_file(database, name, info)
        for name in (known.keys() | waiting.keys()) - present:
            with _transaction(database):
                _forget(database, name)

    def _examined(
        self, database: sqlite3.Connection, name: str, row: tuple[Any, ...], since_ns: int, benchmark: str
    ) -> tuple[Any, ...]:
        """Return the row of a file that waits (inode, mtime, size, last_ns, benchmarks), with as much as the question needs."""
        path = self._records / name
        inode, mtime_ns, size, *rest = row
        last_ns, benchmarks = rest or (newest_possible(path), None)
        if benchmark and last_ns >= since_ns and benchmarks is None:
            benchmarks = text_id(database, benchmarks_in(path))
        return inode, mtime_ns, size, last_ns, benchmarks

    def _may_include(self, database: sqlite3.Connection, row: int, benchmark: str) -> bool:
        """Return whether the benchmarks of a file, which are in that *row*, may include *benchmark*."""
        if row not in self._benchmarks:
            (text,) = database.execute("SELECT text FROM texts WHERE id = ?", (row,)).fetchone()
            names = json.loads(text)
            self._benchmarks[row] = None if names is None else frozenset(names)
        names = self._benchmarks[row]
        return names is None or benchmark in names

    def _take_in_file(self, database: sqlite3.Connection, name: str, info: os.stat_result) -> None:
        query = "SELECT inode, mtime_ns, size, taken FROM files WHERE path = ?"
        row = database.execute(query, (name,)).fetchone()
        if row is not None and row[:3] == (info.st_ino, info.st_mtime_ns, info.st_size):
            return  # another process was first
        grown = row is not None and row[0] == info.st_ino and info.st_size > row[2]
        start, path = row[3] if grown else 0, self._records / name
        if not grown:
            _forget(database, name)
        try:
            for offset, line in read_lines(path, start=start):
                start = offset + len(line)
                self._take_in_line(database, path, name, offset, line)
        except StoreError as error:
            self._tell(str(error))
        taken = (name, info.st_ino, info.st_mtime_ns, info.st_size, start)
        database.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", taken)

    def _take_in_line(
        self, database: sqlite3.Connection, path: Path, name: str, offset: int, line: bytes
    ) -> None:
        try:
            insert(database, *read_row(line, self._drill), name, offset)
        except (ValueError, OverflowError) as error:
            self._tell(f"{path}: byte {offset}: {error} (skipped, left as it is)")

    def _read(self, rows: Iterable[Any]) -> Iterator[Record]:
        replaced: dict[str, dict[str, int]] = {}
        for name, start, record_id, *_ in rows:
            path = self._records / name
            record = None if name in replaced else record_at(path, start, record_id, self._drill)
            try:
                if record is None:  # the file was replaced since it was taken in
                    if name not in replaced:
                        replaced[name] = starts_of_records(path, self._drill)
                    record = record_at(path, replaced[name].get(record_id, start), record_id, self._drill)
            except StoreError as error:
                self._tell(str(error))
                continue
            if record is None:
                self._tell(f"{path}: byte {start}: record {record_id} is not there any more")
            else:
                yield record


def _portions(files: Iterable[tuple[str, os.stat_result]]) -> Iterator[list[tuple[str, os.stat_result]]]:
    """Yield files in portions of some MB, or of one large file."""
    portion: list[tuple[str, os.stat_result]] = []
    for name, info in files:
        portion.append((name, info))
        if sum(one.st_size for _, one in portion) >= _TOGETHER:
            yield portion
            portion = []
    if portion:
        yield portion


def _corrected(value: float, unit: str, rate: float | None, reference: float | None) -> float:
    return excused(value, unit, ratio(rate, reference))


def _series(key: SeriesKey) -> dict[str, str]:
    return {name: getattr(key, name) for name in _SERIES}


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection, lock: str = "IMMEDIATE") -> Iterator[None]:
    database.execute(f"BEGIN {lock}")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _forget(database: sqlite3.Connection, name: str) -> None:
    database.execute("DELETE FROM points WHERE record IN (SELECT id FROM records WHERE path = ?)", (name,))
    for table in ("records", "files", "waiting"):
        database.execute(f"DELETE FROM {table} WHERE path = ?", (name,))  # noqa: S608 - constants of this module


def _made_ns(record_id: str) -> int:
    """Return when a UUIDv7 was made (RFC 9562, section 5.7), less a day by which clocks may differ; 0 where *record_id* is none."""
    if not _UUID7.match(record_id):
        return 0
    return max(0, int(record_id[:8] + record_id[9:13], 16) * 10**6 - 86_400 * 10**9)
