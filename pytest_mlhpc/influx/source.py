"""History from InfluxDB by InfluxQL, with the answers that the local store gives."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from operator import attrgetter
from typing import Any

from urllib3 import BaseHTTPResponse, PoolManager
from urllib3.exceptions import HTTPError, ProtocolError

from pytest_mlhpc.config.http import READ_BYTES, open_pool, split_lines, system_message
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.series import Night, NightFigure, Series, assemble
from pytest_mlhpc.influx.credentials import InfluxServer, server_of
from pytest_mlhpc.influx.schema import (
    EVENT,
    METRIC,
    RUN,
    SCHEMA,
    SECOND_NS,
    SERIES_TAGS,
    from_field,
    from_json,
    from_tag,
    tag_of,
)
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.store.locations import page
from pytest_mlhpc.store.record import AGAINST, SeriesKey

#: Rows of one piece of an answer; what is in memory at a time.
CHUNK_ROWS = 10_000
#: Longest silence of a server before its next piece, in seconds.
SILENCE_S = 60.0
#: A longer piece is no answer of InfluxDB: 10,000 rows of the longest texts are below.
_LONGEST_LINE = 1 << 30
_LONGEST_REASON = 500
#: What reading an answer raises that is JSON of somebody else, or none.
_NOT_ROWS = (ValueError, RecursionError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class ResultBlock:
    """Rows of one group of an answer: its tags (empty without ``GROUP BY``), names of columns, and rows in that order.

    A large group comes in several blocks, one after the other.
    """

    tags: Mapping[str, str]
    columns: tuple[str, ...]
    rows: list[list[Any]]


def literal(text: str) -> str:
    """Return a text as a literal of InfluxQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class InfluxConnection:
    """Asks one server, one question after the other. Close it in the end."""

    def __init__(self, server: InfluxServer, *, silence_s: float = SILENCE_S) -> None:
        """Connect to nothing yet."""
        self._server = server
        self._silence_s = silence_s
        self._pool: PoolManager | None = None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    def ask(self, question: str) -> Iterator[ResultBlock]:
        """Yield the blocks of an answer, times in ns.

        Raises:
            StoreError: no answer, an error, or an answer that ends too early; names the server and says why.
        """
        database, _, policy = self._server.bucket.partition("/")
        clauses = {
            "db": database,
            "q": question,
            "epoch": "ns",
            "chunked": "true",
            "chunk_size": str(CHUNK_ROWS),
        }
        if policy:
            clauses["rp"] = policy
        try:
            yield from self._blocks(self._send(f"{self._server.url}/query?{urllib.parse.urlencode(clauses)}"))
        except (OSError, HTTPError, HTTPException, *_NOT_ROWS) as error:
            self.close()
            said = self._server.hide(system_message(error))
            raise StoreError(f"InfluxDB at {self._server.url} cannot be read: {said}") from None
        except BaseException:
            self.close()  # the rest of the answer would be taken for the next one
            raise

    def _send(self, url: str) -> BaseHTTPResponse:
        """Ask; once more where a persistent connection turns out to be closed."""
        headers = {"Accept": "application/json", "User-Agent": "pytest-mlhpc"}
        if self._server.authorization:
            headers["Authorization"] = self._server.authorization
        pooled = self._pool is not None
        while True:
            self._pool = self._pool or open_pool(self._server.url, self._server.ca)
            try:
                return self._pool.request(
                    "GET",
                    url,
                    headers=headers,
                    redirect=False,
                    preload_content=False,
                    timeout=self._silence_s,
                )
            except ProtocolError:
                self.close()
                if not pooled:
                    raise
                pooled = False

    def _blocks(self, answer: BaseHTTPResponse) -> Iterator[ResultBlock]:
        if answer.status != 200:
            text = answer.read(65536).decode("utf-8", "replace")
            self.close()
            raise StoreError(
                f"InfluxDB at {self._server.url} answered {answer.status} to a query: {self._reason(text)}{_hint(answer.status)}"
            )
        unfinished = False
        rest: list[bytes] = []
        for line in split_lines(iter(lambda: answer.read1(READ_BYTES), b""), _LONGEST_LINE, rest):
            unfinished = yield from self._piece(line, unfinished=unfinished)
        unfinished = yield from self._piece(b"".join(rest), unfinished=unfinished)
        answer.release_conn()  # all was read: the next question goes the same way
        if unfinished:
            raise ValueError("the answer was cut short")

    def _piece(self, line: bytes, *, unfinished: bool) -> Generator[ResultBlock, None, bool]:
        """Yield the blocks of one line of an answer; return whether more of them is to come."""
        if not line.strip():
            return unfinished
        unfinished = False
        for result in self._results(read_json(line)):
            unfinished = bool(result.get("partial"))
            for group in result.get("series", ()):
                unfinished = unfinished or bool(group.get("partial"))
                yield ResultBlock(group.get("tags", {}), tuple(group["columns"]), group.get("values", []))
        return unfinished

    def _results(self, piece: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        results: list[Mapping[str, Any]] = piece.get("results", [])
        for said in (piece, *results):
            if "error" in said:
                raise StoreError(
                    f"InfluxDB at {self._server.url} refused a query: {self._reason(str(said['error']))}"
                )
        return results

    def _reason(self, text: str) -> str:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):  # else it is a text
            said = read_json(text)
            text = str(said.get("error") or said.get("message") or text)
        return self._server.hide(" ".join(text.split()))[:_LONGEST_REASON] or "no reason given"


def _hint(status: int) -> str:
    if status in {401, 403}:
        return " (check MLHPC_INFLUX_TOKEN and its right to read)"
    if status == 404:
        return f" (check MLHPC_INFLUX_URL and MLHPC_INFLUX_BUCKET; 2.x also needs a DBRP mapping, see {page('influxdb')})"
    return ""


#: The span of one question for nights: what is sorted in memory.
_SPAN_NS = 92 * 86400 * SECOND_NS
_KEY = tuple(tag.name for tag in SERIES_TAGS)
_MEASURED = ("metric", "unit", "better")
_EVENT_COLUMNS = ("system", "partition", "id", "text", "by", "at_ns", "made_ns", "until_ns", "removed")
_TEXTS = (
    "id", "session", "node_id", "branch", "commit", "failure", "job_id", "pipeline", "owner", "partition_owner",
)  # fmt: skip
_COLUMNS = (
    *RUN.tag_names, "schema", "created_ns", *_TEXTS, "definition_text", "nodes", "unfit", "judged", "changes", "node_hours", "calibration",
)  # fmt: skip


class InfluxSource:
    """A :class:`~pytest_mlhpc.history.series.Source`: what the sessions of any machines wrote to one InfluxDB.

    Series come one benchmark after the other, so that no more than one benchmark's figures are in memory. Nights of another
    schema are left out and reported to *on_problem*.
    """

    def __init__(self, server: InfluxServer, on_problem: Callable[[str], None] | None = None) -> None:
        self._server = server
        self._connection = InfluxConnection(server)
        self._tell = on_problem or (lambda _text: None)
        #: parsed JSON by its text: thousands of nights share one environment
        self._shared: dict[str, Any] = {}

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._connection.close()

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield all records made in [since_ns, until_ns), oldest first.

        Raises:
            StoreError: the server does not answer, or not with nights of ours.
        """
        first = self._edge("first")
        last = self._edge("last")
        if first is None or last is None:
            return
        start = max(since_ns, first) // SECOND_NS * SECOND_NS
        end = (last // SECOND_NS + 1) * SECOND_NS  # in its second, others may be later
        end = end if until_ns is None else min(until_ns, end)
        while start < end:
            span = start, min(start + _SPAN_NS, end)
            found = [night for night in self._nights(*span) if span[0] <= night.created_ns < span[1]]
            # A point's time within its second is made of its id (schema.time_of).
            found.sort(key=attrgetter("created_ns", "id"))
            yield from (night for night in found if night.created_ns >= since_ns)
            start = span[1]

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield every series with a figure in [since_ns, until_ns), by key, of one system or benchmark where given.

        Raises:
            StoreError: the server does not answer, or not with nights of ours.
        """
        span = _span(since_ns, until_ns)
        asked = {name: text for name, text in (("system", system), ("benchmark", benchmark)) if text}
        groups = self._connection.ask(
            f'SELECT last("value") FROM "{METRIC.name}" WHERE {_where(span, asked)} GROUP BY {_names(_KEY)}'  # noqa: S608 - constants of this module and literals
        )
        found = {tuple(from_tag(group.tags.get(name) or "-") for name in _KEY) for group in groups}
        for key in sorted(found):
            values = dict(zip(_KEY, key, strict=True))
            nights = {
                night.id: night
                for night in self._nights(*span, values)
                if since_ns <= night.created_ns and (until_ns is None or night.created_ns < until_ns)
            }
            yield from self._of_benchmark(values, span, nights)

    def events(self) -> tuple[Event, ...]:
        """Return all changes and maintenances that were not removed; what became of alerts begins no epoch and is left out.

        Raises:
            StoreError: the server does not answer, or not with events of ours.
        """
        question = f'SELECT {_names(_EVENT_COLUMNS)} FROM "{EVENT.name}" WHERE "kind" = \'change\' OR "kind" = \'maintenance\''  # noqa: S608 - constants of this module
        found = []
        for block in self._connection.ask(question):
            rows = (dict(zip(block.columns, row, strict=True)) for row in block.rows)
            found += [self._event(row) for row in rows if not row["removed"]]
        return tuple(found)

    def _event(self, row: Mapping[str, Any]) -> Event:
        values: dict[str, Any] = {name: from_tag(row[name] or "-") for name in ("system", "partition")}
        values |= {name: from_field(row[name] or "") for name in ("id", "text", "by")}
        values |= {name: int(row[name] or 0) for name in ("at_ns", "made_ns", "until_ns")}
        return Event(**values)

    def _of_benchmark(
        self, values: Mapping[str, str], span: tuple[int, int | None], nights: Mapping[str, Night]
    ) -> Iterator[Series]:
        metrics: dict[str, list[NightFigure]] = {}
        question = f'SELECT "value", "id" FROM "{METRIC.name}" WHERE {_where(span, values)} GROUP BY {_names(_MEASURED)}'  # noqa: S608 - constants of this module and literals
        for block in self._connection.ask(question):
            metric, unit, better = (from_tag(block.tags.get(name) or "-") for name in _MEASURED)
            figures = metrics.setdefault(metric, [])
            for _, value, name in block.rows:
                night = nights.get(from_field(name or ""))
                # Without either, its run was written between the two questions.
                if night is not None and value is not None:
                    figures.append(NightFigure(night, float(value), unit, better))
        for metric in sorted(metrics):
            if metrics[metric]:
                yield assemble(SeriesKey(**values, metric=metric), metrics[metric])

    def _nights(
        self, since_ns: int, until_ns: int | None, values: Mapping[str, str] | None = None
    ) -> Iterator[Night]:
        question = f'SELECT {_names(_COLUMNS)} FROM "{RUN.name}" WHERE {_where(_span(since_ns, until_ns), values or {})}'  # noqa: S608 - constants of this module and literals
        for block in self._connection.ask(question):
            for row in block.rows:
                night = self._night(dict(zip(block.columns, row, strict=True)))
                if night is not None:
                    yield night

    def _night(self, row: Mapping[str, Any]) -> Night | None:
        found = int(row.get("schema") or 0)
        if found != SCHEMA:
            age, edge = ("newer", "newest") if found > SCHEMA else ("older", "oldest")
            self._tell(
                f"InfluxDB at {self._server.url}: record {row.get('id')}: schema {found} is {age} than {SCHEMA}, the {edge} "
                "this version reads (left out)"
            )
            return None
        tags = {name: from_tag(row.get(name) or "-") for name in RUN.tag_names if name != "definition"}
        texts = {name: from_field(row.get(name) or "") for name in _TEXTS}
        try:
            return Night(
                attempt=int(tags.pop("attempt")),
                **tags,
                **texts,
                definition=from_field(row.get("definition_text") or ""),
                created_ns=int(row["created_ns"]),
                nodes=tuple(self._json(row, "nodes", "[]")),
                unfit=self._json(row, "unfit", "{}"),
                node_hours=float(row.get("node_hours") or 0.0),
                judged=tuple(self._json(row, "judged", "[]")),
                changes=self._json(row, "changes", "{}"),
                calibration=row.get("calibration"),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            self._tell(
                f"InfluxDB at {self._server.url}: record {row.get('id')} is damaged: {error} (left out)"
            )
            return None

    def _json(self, row: Mapping[str, Any], name: str, default: str) -> Any:
        text = row.get(name) or default
        if text not in self._shared:
            self._shared[text] = from_json(text)
        return self._shared[text]

    def _edge(self, which: str) -> int | None:
        """Return the time of the first or last point; None if there is none."""
        question = f'SELECT {which}("created_ns") FROM "{RUN.name}"'  # noqa: S608 - constants of this module and literals
        return next(
            (int(row[1]) for block in list(self._connection.ask(question)) for row in block.rows), None
        )


def _span(since_ns: int, until_ns: int | None) -> tuple[int, int | None]:
    """Return whole seconds around a span: within a second, points are at times that are not their records'."""
    until = None if until_ns is None else -(-until_ns // SECOND_NS) * SECOND_NS
    return since_ns // SECOND_NS * SECOND_NS, until


#: Comparisons of two sides are no part of any history.
_OF_NIGHTS = f"\"purpose\" != '{AGAINST}'"


def _where(span: tuple[int, int | None], values: Mapping[str, str]) -> str:
    clauses = [_OF_NIGHTS, f"time >= {span[0]}"]
    if span[1] is not None:
        clauses.append(f"time < {span[1]}")
    clauses += [f'"{name}" = {literal(tag_of(text))}' for name, text in values.items()]
    return " AND ".join(clauses)


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def influx_source(environ: Mapping[str, str]) -> InfluxSource:
    """Return the InfluxDB of ``$MLHPC_INFLUX_URL``. Connects to nothing yet.

    Raises:
        UsageError: none is named, or wrongly.
    """
    return InfluxSource(server_of(environ))
