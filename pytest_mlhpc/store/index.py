"""A SQLite index over the record files: it can be rebuilt at any time and is never the truth."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.protocol.schema import SchemaError
from pytest_mlhpc.store.locations import index_path
from pytest_mlhpc.store.record import (
    AGAINST,
    Epoch,
    Record,
    SeriesKey,
    calibration_rate,
    commit_of,
    environment_of,
    excused,
    nodes_of,
    ratio,
    unfit_of,
)
from pytest_mlhpc.store.store import drill_of, parse_record, read_lines, record_files
from pytest_mlhpc.store.text import written_out

TABLES = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, inode INTEGER, mtime_ns INTEGER, size INTEGER, taken INTEGER);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, path TEXT, start INTEGER, record_id TEXT, session TEXT, node_id TEXT, benchmark TEXT, definition TEXT,
    system TEXT, partition TEXT, environment TEXT, device_model TEXT, fingerprint TEXT, purpose TEXT, branch TEXT,
    attempt INTEGER, verdict TEXT, created_ns INTEGER, node_hours REAL, calibration REAL, commit_id TEXT, more TEXT, surroundings INTEGER);
CREATE INDEX IF NOT EXISTS by_series ON records (benchmark, system, partition, created_ns);
CREATE INDEX IF NOT EXISTS by_session ON records (session, created_ns);
CREATE INDEX IF NOT EXISTS by_time ON records (created_ns);
CREATE INDEX IF NOT EXISTS by_path ON records (path);
CREATE INDEX IF NOT EXISTS by_id ON records (record_id);
CREATE TABLE IF NOT EXISTS points (
    record INTEGER REFERENCES records (id), metric TEXT, unit TEXT, better TEXT, value REAL, PRIMARY KEY (record, metric))
    WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS surroundings (id INTEGER PRIMARY KEY, text TEXT UNIQUE);
"""
#: What a record and its row call the same.
COLUMNS = (
    "session", "node_id", "benchmark", "definition", "system", "partition", "environment", "device_model", "fingerprint", "purpose",
    "branch", "attempt", "verdict", "created_ns", "node_hours",
)  # fmt: skip


def storable(value: Any) -> Any:
    """Return what the database holds in place of a value, in rows and in questions alike."""
    return written_out(value) if isinstance(value, str) else value


def insert(database: sqlite3.Connection, record: Record, path: str, start: int) -> None:
    """Insert *record*, which is the line at byte *start* of *path*.

    Raises:
        ValueError, OverflowError: it holds a number that the database cannot.
    """
    measurement = record.measurement
    row = {
        "path": path,
        "start": start,
        "record_id": record.id,
        "calibration": calibration_rate(measurement) if measurement else None,
        "commit_id": commit_of(record),
        "more": _more(record),
        "surroundings": _surroundings(database, environment_of(record)),
        **{column: getattr(record, column) for column in COLUMNS},
    }
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    stored = {name: storable(value) for name, value in row.items()}
    cursor = database.execute(f"INSERT INTO records ({names}) VALUES ({places})", stored)  # noqa: S608 - our own words
    points = [
        (cursor.lastrowid, *map(storable, (m.name, m.unit, m.better, m.value)))
        for m in (measurement.metrics if measurement else ())
    ]
    database.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?)", points)


def _more(record: Record) -> str:
    """Return, as JSON, what nobody asks the database for but wants to have without reading the record."""
    found = {
        "failure": record.failure,
        "nodes": nodes_of(record),
        "unfit": dict(unfit_of(record)),
        "judged": record.judged,
        "owner": record.owner,
        "partition_owner": record.partition_owner,
        "job_id": record.job_id,
        "pipeline": record.pipeline,
    }
    return json.dumps({name: value for name, value in found.items() if value}, separators=(",", ":"))


def _surroundings(database: sqlite3.Connection, environment: Mapping[str, str]) -> int:
    """Return the row of an environment; thousands of records share one."""
    text = json.dumps(dict(environment), separators=(",", ":"), sort_keys=True)
    database.execute("INSERT OR IGNORE INTO surroundings (text) VALUES (?)", (text,))
    (row,) = database.execute("SELECT id FROM surroundings WHERE text = ?", (text,)).fetchone()
    return int(row)


#: Seconds to wait for another process that writes the index, before the files are scanned instead.
LOCK_WAIT_S = 10.0
_SERIES = ("system", "partition", "environment", "fingerprint", "benchmark")
_SAME_SERIES = " AND ".join(f"{name} = :{name}" for name in _SERIES)
_SAME_EPOCH = "definition = :definition AND device_model = :device_model"


class Index:
    """Finds series and records fast.

    A question first takes in what was appended since the last one, unless that was less than *patience_s* seconds ago.
    *on_problem* is told of damaged lines when they are first met. May be used from several threads, one at a time.
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
            "SELECT value, unit, calibration FROM records JOIN points ON points.record = records.id"  # noqa: S608 - our own words
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
        rows = self._ask(query, {**values, "limit": limit})
        return [_corrected(value, unit, rate, calibration_reference) for value, unit, rate in reversed(rows)]

    def newest_epoch(self, key: SeriesKey) -> Epoch | None:
        """Return the epoch of the newest figure of *key*, or None."""
        query = (
            "SELECT definition, device_model FROM records JOIN points ON points.record = records.id"  # noqa: S608 - our own words
            f" WHERE {_SAME_SERIES} AND metric = :metric AND attempt = 0 ORDER BY created_ns DESC, id DESC LIMIT 1"
        )
        rows = self._ask(query, {**_series(key), "metric": key.metric})
        return Epoch(*rows[0]) if rows else None

    def last_good(self, key: SeriesKey, epoch: Epoch) -> Record | None:
        """Return the newest record of the benchmark of *key* (metric aside) in *epoch* that passed, or None."""
        query = (
            f"SELECT path, start, record_id FROM records WHERE {_SAME_SERIES} AND {_SAME_EPOCH} AND attempt = 0"  # noqa: S608 - our own words
            " AND verdict IN ('passed', 'improved', 'new') ORDER BY created_ns DESC, id DESC LIMIT 3"
        )
        return next(iter(self._read(self._ask(query, {**_series(key), **epoch._asdict()}))), None)

    def benchmarks(self) -> list[str]:
        """Return the identities of all tests that were recorded, by name."""
        return [row[0] for row in self._ask("SELECT DISTINCT benchmark FROM records ORDER BY benchmark", {})]

    def identities_of(self, node_id: str) -> list[str]:
        """Return the identities of the tests whose node id is *node_id* but for the brackets at its end, by name."""
        query = (
            "SELECT DISTINCT benchmark FROM records WHERE substr(node_id, 1, :n) = :text ORDER BY benchmark"
        )
        text = f"{node_id}["
        return [row[0] for row in self._ask(query, {"n": len(text), "text": text})]

    def newest(
        self, *, session: str = "", test: str = "", limit: int = 50, compared: bool = True
    ) -> Sequence[Record]:
        """Return the newest records, newest first, of a session or a test where given, by its node id or identity.

        Without *compared*, those of comparisons (``--mlhpc-against``) are left out.
        """
        query = (
            "SELECT path, start, record_id FROM records WHERE (:session = '' OR session = :session)"
            " AND (:test = '' OR node_id = :test OR benchmark = :test) AND (:compared OR purpose != :against)"
            " ORDER BY created_ns DESC, id DESC LIMIT :limit"
        )
        values = {"session": session, "test": test, "limit": limit, "compared": compared, "against": AGAINST}
        return list(self._read(self._ask(query, values)))

    def find(self, text: str) -> Sequence[Record]:
        """Return records whose id starts with *text*, newest first, at most 10."""
        query = "SELECT path, start, record_id FROM records WHERE substr(record_id, 1, :n) = :text ORDER BY created_ns DESC LIMIT 10"
        return list(self._read(self._ask(query, {"text": text, "n": len(text)})))

    def has(self, record_id: str) -> bool:
        """Return whether a record with exactly this id is stored."""
        return bool(list(self._ask("SELECT 1 FROM records WHERE record_id = :id LIMIT 1", {"id": record_id})))

    def newest_of(self, key: SeriesKey) -> Record | None:
        """Return the newest first attempt of the benchmark of *key* (metric aside), whatever its verdict, or None."""
        query = (
            f"SELECT path, start, record_id FROM records WHERE {_SAME_SERIES} AND attempt = 0"  # noqa: S608 - our own words
            " ORDER BY created_ns DESC, id DESC LIMIT 1"
        )
        return next(iter(self._read(self._ask(query, _series(key)))), None)

    def since(self, moment_ns: int) -> Sequence[Record]:
        """Return all records made since *moment_ns*, newest first."""
        query = "SELECT path, start, record_id FROM records WHERE created_ns >= :since ORDER BY created_ns DESC, id DESC"
        return list(self._read(self._ask(query, {"since": moment_ns})))

    def ask(self, query: str, values: Mapping[str, Any]) -> list[Any]:
        """Return the rows of a SELECT over the tables above, for questions that are one caller's own.

        Raises:
            StoreError: the record files cannot be read.
        """
        return self._ask(query, dict(values))

    def read(self, lines: Iterable[tuple[str, int, str]]) -> Iterator[Record]:
        """Yield the records at (path, start, record_id), as the table has them; what cannot be read is told and left out."""
        return self._read(lines)

    def rebuild(self) -> int:
        """Forget everything, take in all record files again, and return the number of records."""
        self.close()
        self._remove()
        return int(self._ask("SELECT count(*) FROM records", {})[0][0])

    def close(self) -> None:
        """Close the database. Idempotent."""
        if self._database is not None:
            self._database.close()
            self._database = None
        self._taken_at = -math.inf

    def _ask(self, query: str, values: dict[str, Any]) -> list[Any]:
        """Return the rows; a damaged index is made anew, one that cannot be used is replaced by one in memory."""
        for _ in range(3):
            try:
                database = self._open()
                if time.monotonic() - self._taken_at >= self._patience_s:
                    self._take_in(database)
                    self._taken_at = time.monotonic()
                asked = {name: storable(value) for name, value in values.items()}
                return database.execute(query, asked).fetchall()
            except sqlite3.DatabaseError as error:
                self._recover(error)
        raise StoreError(f"{self._path}: no index can be made of {self._records}")

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            # Whoever only looks leaves no folder behind where the state directory is another one.
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
        usable = not isinstance(
            error, sqlite3.OperationalError
        )  # damaged, but its place can be read and written
        if usable:
            with contextlib.suppress(OSError):
                self._remove()
                return
        self._in_memory = True

    def _take_in(self, database: sqlite3.Connection) -> None:
        known = {row[0]: row[1:] for row in database.execute("SELECT path, inode, mtime_ns, size FROM files")}
        present = set()
        for path in record_files(self._state_dir):
            name = str(path.relative_to(self._records))
            try:
                info = path.stat()
            except OSError:  # removed a moment ago
                continue
            present.add(name)
            if known.get(name) != (info.st_ino, info.st_mtime_ns, info.st_size):
                self._take_in_file(database, path, name, info)
        for name in known.keys() - present:
            with _transaction(database):
                _forget(database, name)

    def _take_in_file(
        self, database: sqlite3.Connection, path: Path, name: str, info: os.stat_result
    ) -> None:
        with _transaction(database):
            row = database.execute("SELECT inode, size, taken FROM files WHERE path = ?", (name,)).fetchone()
            grown = row is not None and row[0] == info.st_ino and info.st_size > row[1]
            start = row[2] if grown else 0
            if not grown:
                _forget(database, name)
            try:
                for offset, line in read_lines(path, start=start):
                    start = offset + len(line)
                    self._take_in_line(database, path, name, offset, line)
            except StoreError as error:
                self._tell(str(error))
            database.execute(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)",
                (name, info.st_ino, info.st_mtime_ns, info.st_size, start),
            )

    def _take_in_line(
        self, database: sqlite3.Connection, path: Path, name: str, offset: int, line: bytes
    ) -> None:
        try:
            insert(database, parse_record(line, self._drill), name, offset)
        except (ValueError, OverflowError) as error:
            self._tell(f"{path}: byte {offset}: {error} (skipped, left as it is)")

    def _read(self, rows: Iterable[Any]) -> Iterator[Record]:
        replaced: dict[str, dict[str, int]] = {}
        for name, start, record_id in rows:
            path = self._records / name
            record = None if name in replaced else self._record_at(path, start, record_id)
            try:
                if record is None:  # the file was replaced since it was taken in
                    if name not in replaced:
                        replaced[name] = self._starts(path)
                    record = self._record_at(path, replaced[name].get(record_id, start), record_id)
            except StoreError as error:
                self._tell(str(error))
                continue
            if record is None:
                self._tell(f"{path}: byte {start}: record {record_id} is not there any more")
            else:
                yield record

    def _record_at(self, path: Path, start: int, record_id: str) -> Record | None:
        """Return the record of that id that begins at byte *start*; None if none does."""
        try:
            record = next(
                (parse_record(line, self._drill) for _, line in read_lines(path, start=start)), None
            )
        except (StoreError, SchemaError):
            return None
        return record if record is not None and storable(record.id) == record_id else None

    def _starts(self, path: Path) -> dict[str, int]:
        """Return where the line of each record begins, by its id.

        Raises:
            StoreError: the file cannot be read.
        """
        found = {}
        for start, line in read_lines(path):
            with contextlib.suppress(SchemaError):
                found[storable(parse_record(line, self._drill).id)] = start
        return found


def _corrected(value: float, unit: str, rate: float | None, reference: float | None) -> float:
    return excused(value, unit, ratio(rate, reference))


def _series(key: SeriesKey) -> dict[str, str]:
    return {name: getattr(key, name) for name in _SERIES}


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _forget(database: sqlite3.Connection, name: str) -> None:
    database.execute("DELETE FROM points WHERE record IN (SELECT id FROM records WHERE path = ?)", (name,))
    database.execute("DELETE FROM records WHERE path = ?", (name,))
    database.execute("DELETE FROM files WHERE path = ?", (name,))
