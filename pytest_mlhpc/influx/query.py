"""Questions in InfluxQL by plain HTTP: what 1.x, 2.x and 3 Core all answer. Answers are read as they come, in chunks."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.config.files import page
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.influx.credentials import Server
from pytest_mlhpc.node.foreign import read_json

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
class Block:
    """Rows of one group of an answer: its tags (empty without ``GROUP BY``), names of columns, and rows in that order.

    A large group comes in several blocks, one after the other.
    """

    tags: Mapping[str, str]
    columns: tuple[str, ...]
    rows: list[list[Any]]


def literal(text: str) -> str:
    """Return a text as a literal of InfluxQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class Connection:
    """Asks one server, one question after the other. Close it in the end."""

    def __init__(self, server: Server, *, silence_s: float = SILENCE_S) -> None:
        """Connect to nothing yet."""
        self._server = server
        self._silence_s = silence_s
        self._parts = urllib.parse.urlsplit(server.url)
        self._connection: http.client.HTTPConnection | None = None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def ask(self, question: str) -> Iterator[Block]:
        """Yield the blocks of an answer, times in ns.

        Raises:
            StoreError: no answer, an error, or an answer that ends too early; names the server and says why.
        """
        database, _, policy = self._server.bucket.partition("/")
        words = {
            "db": database,
            "q": question,
            "epoch": "ns",
            "chunked": "true",
            "chunk_size": str(CHUNK_ROWS),
        }
        if policy:
            words["rp"] = policy
        path = f"{self._parts.path.rstrip('/')}/query?{urllib.parse.urlencode(words)}"
        try:
            yield from self._blocks(self._send(path))
        except (OSError, http.client.HTTPException, *_NOT_ROWS) as error:
            self.close()
            said = self._server.hide(str(error)) or type(error).__name__
            raise StoreError(f"InfluxDB at {self._server.url} cannot be read: {said}") from None
        except BaseException:
            self.close()  # the rest of the answer would be taken for the next one
            raise

    def _send(self, path: str) -> http.client.HTTPResponse:
        """Ask; once more where a connection that was kept open turns out to be closed."""
        headers = {"Accept": "application/json", "User-Agent": "pytest-mlhpc"}
        if self._server.authorization:
            headers["Authorization"] = self._server.authorization
        kept = self._connection is not None
        while True:
            try:
                self._connection = self._connection or self._connect()
                self._connection.request("GET", path, headers=headers)
                return self._connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):
                self.close()
                if not kept:
                    raise
                kept = False

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._silence_s)
        context = ssl.create_default_context(cafile=self._server.ca or None)
        return http.client.HTTPSConnection(host, port, timeout=self._silence_s, context=context)

    def _blocks(self, answer: http.client.HTTPResponse) -> Iterator[Block]:
        if answer.status != 200:
            text = answer.read(65536).decode("utf-8", "replace")
            self.close()
            raise StoreError(
                f"InfluxDB at {self._server.url} answered {answer.status} to a query: {self._reason(text)}{_hint(answer.status)}"
            )
        unfinished = False
        while line := answer.readline(_LONGEST_LINE):
            if not line.strip():
                continue
            unfinished = False
            piece = read_json(line)
            for result in self._results(piece):
                unfinished = bool(result.get("partial"))
                for group in result.get("series", ()):
                    unfinished = unfinished or bool(group.get("partial"))
                    yield Block(group.get("tags", {}), tuple(group["columns"]), group.get("values", []))
        answer.close()  # all was read: the next question goes the same way
        if unfinished:
            raise ValueError("the answer was cut short")

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
