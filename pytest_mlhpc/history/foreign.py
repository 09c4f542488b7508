"""Results of other tools: how they are read as runs, and how these become records, each once whatever is killed.

ReFrame's perflogs and results.db, JSON lines, files of pytest-benchmark, JUnit XML. Open it when a line of another tool is read
wrongly. Each reader yields :class:`ForeignRun` or :class:`UnreadableRun`, in the order of the source. The forms are those of
ReFrame 4.10 (``perflog_compat`` off, columns in any order, ``FORMAT`` read from each file's header line) and of pytest-benchmark 5.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.metrics import base_unit, better_of
from pytest_mlhpc.jobs.spec import uuid7
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.schema import BETTER, Measurement, MetricValue, SchemaError, to_json
from pytest_mlhpc.store.definition import text_of
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Record, Verdict
from pytest_mlhpc.store.store import Store
from pytest_mlhpc.store.text import count, iso, nanoseconds, tell

#: Longest line that is read, in bytes.
MAX_LINE: Final = 1 << 20
#: Longest XML file that is read, in bytes.
MAX_XML: Final = 100 << 20
#: What names a column of ReFrame's perflog beside a metric.
_VALUE: Final = "_value"


@dataclass(frozen=True)
class ForeignRun:
    """One run that another tool made: where, when, and what it measured. ``failure`` is why it measured nothing."""

    time_ns: int
    benchmark: str
    system: str
    partition: str
    environment: str
    metrics: tuple[MetricValue, ...] = ()
    failure: str = ""
    nodes: tuple[str, ...] = ()
    job_id: str = ""
    commit: str = ""
    notes: tuple[str, ...] = ()  #: what of it was left out, and why


@dataclass(frozen=True)
class UnreadableRun:
    """Something that is no run, where it stands, and why."""

    where: str
    why: str


@dataclass(frozen=True)
class ForeignNames:
    """What the source does not say, or calls by other names.

    ``system``, ``partition`` and ``environment`` win over the source's own where they are set. ``better`` and ``units`` are by
    the name of a metric.
    """

    system: str = ""
    partition: str = ""
    environment: str = ""
    better: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)


Found = Iterator[ForeignRun | UnreadableRun]


def reframe(path: Path, names: ForeignNames) -> Found:
    """Read a folder of perflogs, one of them, or ReFrame's ``results.db``.

    Raises:
        UsageError: there is nothing of that kind.
    """
    if path.is_dir():
        files = sorted(path.rglob("*.log"))
        if not files:
            raise UsageError(
                f"{path} holds no perflog (*.log); name ReFrame's folder perflogs, or its results.db"
            )
        return (one for file in files for one in _perflog(file, names))
    with _opened(path) as file:
        database = file.read(16).startswith(b"SQLite format 3")
    return _database(path, names) if database else _perflog(path, names)


def json_lines(path: Path, names: ForeignNames) -> Found:
    """Read lines like ``{"time": "2026-11-27T02:00Z", "benchmark": "x", "metric": "rate", "value": 3.5, "unit": "MB/s"}``.

    ``metrics`` may hold several, as ``{name: {value, unit, better}}``. ``system``, ``partition``, ``environment`` and ``commit``
    are optional.
    """
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            found = read_json(line)
            if not isinstance(found, dict):
                yield UnreadableRun(where, "is no JSON object")
                continue
            one = {"value": found.get("value"), "unit": found.get("unit"), "better": found.get("better")}
            given = found.get("metrics") or ({found["metric"]: one} if "metric" in found else {})
            figures = [
                (
                    str(name),
                    metric.get("value"),
                    str(metric.get("unit") or "1"),
                    str(metric.get("better") or ""),
                )
                for name, metric in dict(given).items()
            ]
            yield _run(names, found, _moment(found.get("time")), figures)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            yield UnreadableRun(where, _why(error))


def pytest_benchmark(path: Path, names: ForeignNames) -> Found:
    """Read a file of ``--benchmark-json`` or a folder of them (``.benchmarks``): the median time of each benchmark."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    for file in files:
        try:
            with _opened(file) as opened:
                found = read_json(opened.read())
            moment = _moment(found["datetime"])
            node, commit = str(found["machine_info"].get("node", "")), found.get("commit_info") or {}
            for one in found["benchmarks"]:
                about = {
                    "benchmark": one.get("fullname") or one["name"],
                    "system": node,
                    "nodes": [node] if node else [],
                    "commit": commit.get("id", ""),
                }
                yield _run(names, about, moment, [("time", one["stats"]["median"], "s", "")])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            yield UnreadableRun(str(file), _why(error))


def junit(path: Path, names: ForeignNames) -> Found:
    """Read a JUnit XML file or a folder of them: of each test case that ran its time, and properties that are figures.

    The system is the suite's ``hostname``, the moment its ``timestamp``. A case that failed measured nothing.
    """
    files = sorted(path.rglob("*.xml")) if path.is_dir() else [path]
    for file in files:
        try:
            with _opened(file) as opened:
                root = ET.fromstring(opened.read(MAX_XML + 1)[:MAX_XML])  # noqa: S314 - expat bounds entities since 2.4.1
            for suite in root.iter("testsuite"):
                moment = _moment(suite.attrib["timestamp"])
                for case in suite.findall("testcase"):
                    if case.find("skipped") is None:
                        yield _of_testcase(suite, case, moment, names)
        except (ET.ParseError, ValueError, KeyError, OverflowError) as error:
            yield UnreadableRun(str(file), _why(error))


def _of_testcase(suite: ET.Element, case: ET.Element, moment: int, names: ForeignNames) -> ForeignRun:
    trouble = next((one for kind in ("failure", "error") if (one := case.find(kind)) is not None), None)
    host = suite.get("hostname", "")
    about = {
        "benchmark": "::".join(filter(None, (case.get("classname"), case.attrib["name"]))),
        "system": host,
        "nodes": [host] if host else [],
    }
    if trouble is not None:
        return _run(names, about, moment, [], f"{trouble.tag}: {trouble.get('message', '')}"[:2000])
    figures = [("time", case.get("time"), "s", "")]
    figures += [
        (one.get("name", ""), one.get("value"), "1", "")
        for one in case.iter("property")
        if _number(one.get("value")) is not None
    ]
    return _run(names, about, moment, figures)


def _perflog(path: Path, names: ForeignNames) -> Found:
    """Read one perflog. Its first line names the columns, and so does each later one where they changed."""
    columns: list[str] = []
    for number, line in _lines(path):
        fields = line.decode("utf-8", "replace").rstrip("\n").split("|")
        if "job_completion_time" in fields or "job_completion_time_unix" in fields:
            columns = fields
            continue
        where = f"{path}:{number}"
        if not columns:
            yield UnreadableRun(where, "no line before it names the columns (ReFrame 4 writes one)")
        elif len(fields) != len(columns):
            yield UnreadableRun(where, f"has {len(fields)} columns, the header {len(columns)}")
        else:
            try:
                yield _of_perflog(dict(zip(columns, fields, strict=True)), names)
            except (ValueError, KeyError, OverflowError) as error:
                yield UnreadableRun(where, _why(error))


def _of_perflog(row: Mapping[str, str], names: ForeignNames) -> ForeignRun:
    figures = []
    for column in row:
        if not column.endswith(_VALUE) or row[column] in {"", "null", "None"}:
            continue
        name = column.removesuffix(_VALUE)
        bounds = [_number(row.get(f"{name}_{end}_thres")) for end in ("lower", "upper")]
        figures.append((name, row[column], row.get(f"{name}_unit") or "1", _direction(*bounds)))
    moment = row.get("job_completion_time_unix") or row["job_completion_time"]
    about = {
        "benchmark": row.get("name") or row.get("display_name") or row["check_name"],
        "system": row.get("system"), "partition": row.get("partition"), "environment": row.get("environ"),
        "job_id": row.get("jobid"), "nodes": [one for one in (row.get("job_nodelist") or "").split(",") if one],
    }  # fmt: skip
    failed = row.get("result", "pass") not in {"pass", "xpass", "xfail"} and not figures
    return _run(names, about, _moment(moment), figures, "ReFrame: " + row.get("result", "") if failed else "")


def _database(path: Path, names: ForeignNames) -> Found:
    """Read the sessions of ReFrame's SQLite file, which is opened read-only."""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT uuid, json_blob FROM sessions ORDER BY session_start_unix")
            for uuid, blob in rows:
                try:
                    cases = [case for run in read_json(blob)["runs"] for case in run["testcases"]]
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    yield UnreadableRun(f"{path}: session {uuid}", _why(error))
                    continue
                for case in cases:
                    try:
                        yield _of_case(case, names)
                    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                        yield UnreadableRun(f"{path}: {case.get('uuid', uuid)}", _why(error))
    except sqlite3.Error as error:
        raise UsageError(f"{path}: no results.db of ReFrame can be read there: {error}") from error


def _of_case(case: Mapping[str, Any], names: ForeignNames) -> ForeignRun:
    figures = [
        (key.rpartition(":")[2], value, str(unit or "1"), _direction(_number(low), _number(high)))
        for key, (value, _, low, high, unit, *_) in (case.get("perfvalues") or {}).items()
    ]
    about = {
        "benchmark": case.get("display_name") or case["name"],
        "system": case.get("system"), "partition": case.get("partition"), "environment": case.get("environ"),
        "job_id": case.get("jobid"), "nodes": case.get("job_nodelist") or [],
    }  # fmt: skip
    failed = case.get("result") not in {"pass", "xpass", "xfail"} and not figures
    why = f"ReFrame: {case.get('fail_phase')}: {case.get('fail_reason')}"[:2000] if failed else ""
    return _run(names, about, _moment(case["job_completion_time_unix"]), figures, why)


def _run(
    names: ForeignNames,
    about: Mapping[str, Any],
    time_ns: int,
    figures: Sequence[tuple[str, Any, str, str]],
    failure: str = "",
) -> ForeignRun:
    """Return the run of *about*; *figures* are (name, value, unit, direction or empty).

    Raises:
        KeyError, ValueError: it names no benchmark or no system.
    """
    system = names.system or str(about.get("system") or "")
    if not system:
        raise ValueError("names no system; give --system NAME")
    metrics, notes = [], []
    for name, value, unit, better in figures:
        made = _metric(names, name, value, unit, better)
        if isinstance(made, str):
            notes.append(made)
        else:
            metrics.append(made)
    unique = tuple({one.name: one for one in metrics}.values())
    if not unique and not failure:
        failure = "it has no figure that can be recorded" + (f": {notes[0]}" if notes else "")
    return ForeignRun(
        time_ns,
        str(about["benchmark"])[:200],
        system,
        names.partition or str(about.get("partition") or "default"),
        names.environment or str(about.get("environment") or "default"),
        unique,
        failure,
        tuple(map(str, about.get("nodes") or ())),
        str(about.get("job_id") or ""),
        str(about.get("commit") or ""),
        tuple(notes),
    )


def _metric(names: ForeignNames, given: str, value: Any, unit: str, better: str) -> MetricValue | str:
    """Return the metric in base units, or why there is none."""
    name = re.sub(r"[^a-z0-9_]+", "_", given.lower()).strip("_")[:64]
    if name[:1].isdigit():
        name = f"m{name}"[:64]
    number = _number(value)
    if number is None:
        return f"{given} is {str(value)[:40]!r}, which is no finite number"
    try:
        base, factor = base_unit(names.units.get(given) or names.units.get(name) or unit)
        direction = names.better.get(given) or names.better.get(name) or better or better_of(base) or "none"
        return MetricValue(
            name, number * factor, base, direction, (number * factor,), number * factor, number * factor
        )
    except (SchemaError, ValueError) as error:
        return f"{given}: {error}" + (f"; say --unit {given}=UNIT" if "unit" in str(error) else "")


def _direction(lower: float | None, upper: float | None) -> str:
    """Return which direction is better where a reference is bounded on one side only."""
    if (lower is None) == (upper is None):
        return ""
    return "higher" if upper is None else "lower"


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def _moment(value: Any) -> int:
    """Return the time in ns UTC of a date (ISO 8601; without a zone, UTC) or of seconds since 1970.

    Raises:
        ValueError: it is neither, or before 1990 or beyond 2200.
    """
    number = _number(value)
    found = round(number * 1e6) * 1000 if number is not None else nanoseconds(str(value))
    if not dt.datetime(1990, 1, 1, tzinfo=dt.UTC).timestamp() < found / 1e9 < 7.3e9:
        raise ValueError(f"its time {str(value)[:40]!r} cannot be")
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number and text of each complete line that is not empty; a last one without its end is still being written."""
    with _opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if line.strip() and line.endswith(b"\n"):
                yield number, line


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error


def _why(error: Exception) -> str:
    return f"has no {error}" if isinstance(error, KeyError) else str(error)[:200]


#: Option of ``mlhpc records ingest`` -> its reader.
READERS: Final[Mapping[str, Callable[[Path, ForeignNames], Found]]] = {
    "reframe": reframe,
    "jsonl": json_lines,
    "pytest-benchmark": pytest_benchmark,
    "junit": junit,
}

#: Directions that ``--better`` takes.
DIRECTIONS: Final = tuple(BETTER)


#: Problems and notes that a report shows, at most.
SHOWN = 5


@dataclass
class Ingested:
    """What became of a source's runs."""

    stored: int = 0
    known: int = 0  #: were stored before
    failed: int = 0  #: of the stored ones, those that measured nothing
    benchmarks: set[str] = field(default_factory=set)
    systems: set[str] = field(default_factory=set)
    first_ns: int = 0
    last_ns: int = 0
    problems: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    undirected: set[str] = field(default_factory=set)  #: metrics of which no direction is better

    def text(self) -> str:
        """Return some lines for people."""
        if not (self.stored or self.known or self.problems):
            return "no run was found in it\n"
        lines = [f"{count(self.stored, 'record')} stored, {self.known} there already"]
        if self.stored:
            about = f"{count(len(self.benchmarks), 'benchmark')} of {', '.join(sorted(self.systems))}"
            lines[0] += f": {about}, {iso(self.first_ns)} to {iso(self.last_ns)}"
        if self.failed:
            lines.append(f"{self.failed} of them measured nothing")
        if self.undirected:
            names = ", ".join(sorted(self.undirected)[:SHOWN])
            lines.append(
                f"recorded, and not watched, as it is not known which direction is better: {names}; say --better METRIC=higher"
            )
        lines += [
            f"left out {count(number, 'time')}: {note}" for note, number in list(self.notes.items())[:SHOWN]
        ]
        lines += [f"not read: {one}" for one in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"not read: {len(self.problems) - SHOWN} more")
        return "\n".join(lines) + "\n"


class Ingester:
    """Stores runs as records of one session.

    Args:
        state_dir: where they are stored.
        tool: whose runs they are.
        branch: the default branch, whose nights are watched.
    """

    def __init__(self, state_dir: Path, tool: str, branch: str) -> None:
        self._state_dir, self._tool, self._branch = state_dir, tool, branch
        self._session = uuid7()
        self._index = Index(state_dir, tell)
        self._stores: dict[str, Store] = {}
        self._new: set[str] = set()
        self.found = Ingested()

    def take(self, runs: Iterable[ForeignRun | UnreadableRun]) -> None:
        """Store those of *runs* that are not stored yet.

        Raises:
            StoreError: the disk is full, or not writable; what was stored before stays.
        """
        found = self.found
        for run in runs:
            if isinstance(run, UnreadableRun):
                if (text := f"{run.where}: {run.why}") not in found.problems:
                    found.problems.append(text)
                continue
            record = record_of(run, self._session, self._tool, self._branch)
            if record.id in self._new or self._index.has(record.id):
                found.known += record.id not in self._new
                continue
            self._store(run.time_ns).append(record)
            self._new.add(record.id)
            self._count(run)

    def close(self) -> None:
        """Close the files."""
        for store in self._stores.values():
            store.close()
        self._index.close()

    def _store(self, time_ns: int) -> Store:
        """Return the store of the month in which the run was made: records lie by month."""
        month = iso(time_ns)[:7]
        if month not in self._stores:
            self._stores[month] = Store(self._state_dir, self._session)
        return self._stores[month]

    def _count(self, run: ForeignRun) -> None:
        found = self.found
        found.stored += 1
        found.failed += not run.metrics
        found.benchmarks.add(run.benchmark)
        found.systems.add(run.system)
        found.first_ns = min(found.first_ns or run.time_ns, run.time_ns)
        found.last_ns = max(found.last_ns, run.time_ns)
        found.undirected |= {one.name for one in run.metrics if one.better == "none"}
        for note in run.notes:
            found.notes[note] = found.notes.get(note, 0) + 1


def record_of(run: ForeignRun, session: str, tool: str, branch: str) -> Record:
    """Return the record of *run*. The same run has the same id whenever it is read."""
    run_id = _id_of(run)
    measurement = None
    if run.metrics:
        measurement = Measurement(
            run_id=run_id, nonce="", attempt=0, workload="command", device_type="none", device_model="",
            nodes=run.nodes, ranks=1, devices=0, steps=0, samples=0, started_ns=run.time_ns, ended_ns=run.time_ns,
            metrics=run.metrics,
        )  # fmt: skip
    return Record(
        id=run_id,
        session=session,
        node_id=run.benchmark,
        benchmark=run.benchmark,
        definition=text_of("program", {"from": tool}),
        system=run.system,
        partition=run.partition,
        environment=run.environment,
        device_model="",
        attempt=0,
        created_ns=run.time_ns,
        verdict=Verdict.UNJUDGED.value if measurement else "no_result",
        purpose="nightly",
        branch=branch,
        commit=run.commit,
        failure="" if measurement else f"no_result: {run.failure}",
        nodes=run.nodes,
        job_id=run.job_id,
        judged=tuple(one.name for one in run.metrics if one.better != "none"),
        measurement=measurement,
    )


def _id_of(run: ForeignRun) -> str:
    """Return a UUIDv7 of the run's time, whose random part is a digest of what the run is."""
    place = [run.system, run.partition, run.environment, run.benchmark, run.job_id, run.time_ns]
    said = json.dumps([place, [to_json(one) for one in run.metrics]], sort_keys=True)
    digest = hashlib.sha256(said.encode("utf-8", "surrogateescape")).digest()
    return uuid7(run.time_ns, digest[:10])
