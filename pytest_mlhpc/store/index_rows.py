"""What the index holds of a record: its tables, and the rows made of a line of a record file."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.schema import BETTER, METRIC_NAME, UNITS, SchemaError
from pytest_mlhpc.store.record import Record, calibration_rate, commit_of, environment_of, nodes_of, unfit_of
from pytest_mlhpc.store.store import Drill, parse_record, record_of
from pytest_mlhpc.store.text import written_out

TABLES: Final = """
CREATE TABLE IF NOT EXISTS files (
    path TEXT PRIMARY KEY, inode INTEGER, mtime_ns INTEGER, size INTEGER, taken INTEGER);
CREATE TABLE IF NOT EXISTS waiting (
    path TEXT PRIMARY KEY, inode INTEGER, mtime_ns INTEGER, size INTEGER, last_ns INTEGER, benchmarks INTEGER);
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
CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, text TEXT UNIQUE);
"""
#: What a record and its row call the same.
_COLUMNS: Final = (
    "session", "node_id", "benchmark", "definition", "system", "partition", "environment", "device_model", "fingerprint", "purpose",
    "branch", "attempt", "verdict", "created_ns", "node_hours",
)  # fmt: skip
_NAMES: Final = (
    *_COLUMNS, "path", "start", "record_id", "calibration", "commit_id", "more", "surroundings",
)  # fmt: skip
_INSERT: Final = f"INSERT INTO records ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"  # noqa: S608 - constants of this module
#: What no row holds, of a record and of its measurement. All of it may be left out of either.
_UNUSED: Final = ("asked", "parameters", "explanation", "judged_by", "fences", "options", "overrides")
_UNUSED_MEASURED: Final = ("step_times_s", "contention", "per_rank")

#: A figure as a row of the index: metric, unit, better, value.
Point = tuple[str, str, str, float]


def storable(value: Any) -> Any:
    """Return what the database holds in place of a value, in rows and in questions alike."""
    return written_out(value) if isinstance(value, str) else value


def read_row(line: bytes, drill: Drill | None) -> tuple[Record, list[Point]]:
    """Return what the index holds of the record in *line*: the record without figures and what no row holds, and its figures.

    Raises:
        SchemaError: it is damaged, of another schema, or a drill's and not of *drill*.
    """
    try:
        data = read_json(line)
    except ValueError as error:
        raise SchemaError(f"damaged line: {error}") from error
    measured = data.get("measurement") if isinstance(data, dict) else None
    points = _plain_points(measured.get("metrics")) if isinstance(measured, dict) else []
    if not isinstance(data, dict) or points is None:
        record = parse_record(line, drill)
        figures = record.measurement.metrics if record.measurement else ()
        return record, [(one.name, one.unit, one.better, one.value) for one in figures]
    for name in _UNUSED:
        data.pop(name, None)
    if isinstance(measured, dict):
        measured["metrics"] = []
        for name in _UNUSED_MEASURED:
            measured.pop(name, None)
    return record_of(data, drill), points


def _plain_points(metrics: Any) -> list[Point] | None:
    """Return the figures of a record's JSON form; None where one is not plainly right."""
    if not isinstance(metrics, list):
        return None
    found: dict[str, Point] = {}
    for one in metrics:
        if type(one) is not dict:
            return None
        name, unit, better, value = one.get("name"), one.get("unit"), one.get("better"), one.get("value")
        if not (type(name) is str and type(unit) is str and type(better) is str and type(value) is float):
            return None
        if not (unit in UNITS and better in BETTER and math.isfinite(value) and METRIC_NAME.match(name)):
            return None
        found[name] = (name, unit, better, value)
    return list(found.values()) if len(found) == len(metrics) else None


def insert(
    database: sqlite3.Connection, record: Record, points: Iterable[Point], path: str, start: int
) -> None:
    """Insert *record*, which is the line at byte *start* of *path*, and its figures.

    Raises:
        ValueError, OverflowError: it holds a number that the database cannot.
    """
    measurement = record.measurement
    row = (
        *(getattr(record, column) for column in _COLUMNS),
        path,
        start,
        record.id,
        calibration_rate(measurement) if measurement else None,
        commit_of(record),
        _more(record),
        text_id(database, environment_of(record)),
    )
    number = database.execute(_INSERT, tuple(map(storable, row))).lastrowid
    rows = [(number, storable(name), unit, better, value) for name, unit, better, value in points]
    if rows:
        database.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?)", rows)


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


def text_id(database: sqlite3.Connection, data: Mapping[str, str] | list[str] | None) -> int:
    """Return the row of an environment, which thousands of records share, or of a file's benchmarks, which nights share."""
    text = (json.dumps(data, separators=(",", ":"), sort_keys=True),)
    while (found := database.execute("SELECT id FROM texts WHERE text = ?", text).fetchone()) is None:
        database.execute("INSERT OR IGNORE INTO texts (text) VALUES (?)", text)
    return int(found[0])
