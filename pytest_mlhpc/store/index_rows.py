"""The tables of the index, and what of a record goes into them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from pytest_mlhpc.store.calibration import calibration_rate
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.surroundings import commit_of, environment_of, nodes_of, unfit_of

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
    """Return what the database holds in place of a value, in rows and in questions alike.

    A byte of a name that is no UTF-8 (half of a surrogate pair in Python) is written out.
    """
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    return value


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
    }
    return json.dumps({name: value for name, value in found.items() if value}, separators=(",", ":"))


def _surroundings(database: sqlite3.Connection, environment: Mapping[str, str]) -> int:
    """Return the row of an environment; thousands of records share one."""
    text = json.dumps(dict(environment), separators=(",", ":"), sort_keys=True)
    database.execute("INSERT OR IGNORE INTO surroundings (text) VALUES (?)", (text,))
    (row,) = database.execute("SELECT id FROM surroundings WHERE text = ?", (text,)).fetchone()
    return int(row)
