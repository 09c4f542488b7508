"""The write path of InfluxDB 2.x before a real InfluxDB 1.6, as 1.8 documents it, and faults on demand. Run as a program.

`python influx_v2_door.py PORT SERVER_PORT FAULT_FILE`. What it does, and nothing more:

* `POST /api/v2/write?bucket=DB[/RP]&precision=P` becomes `POST /write?db=DB&rp=RP&precision=P` (`us` becomes `u`); the body
  goes through untouched, compressed or not. `Authorization: Token USER:PASSWORD` becomes basic authentication.
  Errors come back as 2.x words them: `{"code", "message"}`.
* `GET /health`, `GET /ping` and `/query` go through, the same token translated.

Its fidelity to 1.8 rests on documentation (InfluxDB 1.8, "InfluxDB 2.0 API compatibility endpoints"). No 2.x or 3 server
can be had on Debian; what differs there (shard-group checks of 2.x, partial writes of 3) is not covered by it.

Faults: the file FAULT_FILE-DB, if it is there, holds for writes to that database one line `KIND [COUNT]`: 503, 429, 401, 404, 413 (answered so), `hang`
(the answer never comes), `reset` (connection cut before the write), `cut` (cut after the write was done: the client cannot
know). After COUNT writes the file is removed; without a count it stays.
"""

from __future__ import annotations

import base64
import http.client
import http.server
import json
import os
import socket
import struct
import sys
import threading
import urllib.parse
from pathlib import Path
from typing import ClassVar

_WORDS = {
    400: "invalid",
    401: "unauthorized",
    404: "not found",
    413: "request too large",
    429: "too many requests",
}


class Door(http.server.BaseHTTPRequestHandler):
    """One connection; it keeps one of its own to the server."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    server_port: ClassVar[int]
    fault_file: ClassVar[Path]
    fault_lock: ClassVar[threading.Lock] = threading.Lock()
    behind: http.client.HTTPConnection | None = None

    def log_message(self, *_words: object) -> None:
        """Say nothing: a log of every write is of no use."""

    def do_POST(self) -> None:
        """Write, or a query by POST."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urllib.parse.urlsplit(self.path)
        if place.path == "/query":
            self._forward("POST", self.path, body, {"Content-Type": self.headers.get("Content-Type", "")})
        elif place.path == "/api/v2/write":
            self._write(dict(urllib.parse.parse_qsl(place.query)), body)
        else:
            self._fail(404, "path not found")

    def do_GET(self) -> None:
        """Health, ping, queries."""
        path = urllib.parse.urlsplit(self.path).path
        if path == "/health":
            try:
                self._ask("GET", "/ping", b"", {})
            except OSError as error:
                self._fail(503, str(error))
            else:
                self._reply(
                    200, b'{"name":"influxdb","status":"pass","version":"1.8-door"}', "application/json"
                )
        elif path in {"/ping", "/query"}:
            self._forward("GET", self.path, b"", {})
        else:
            self._fail(404, "path not found")

    def _write(self, query: dict[str, str], body: bytes) -> None:
        database, _, policy = query.get("bucket", "").partition("/")
        fault = self._fault(database)
        if fault == "hang":
            threading.Event().wait(3600)
        if fault == "reset":
            self._cut()
            return
        if fault.isdecimal():
            self._fail(int(fault), "asked for by a test")
            return
        precision = query.get("precision", "ns")
        words = {"db": database, "precision": "u" if precision == "us" else precision}
        if policy:
            words["rp"] = policy
        passed = {name: self.headers[name] for name in ("Content-Encoding",) if self.headers.get(name)}
        try:
            status, _, answer = self._ask("POST", f"/write?{urllib.parse.urlencode(words)}", body, passed)
        except (OSError, http.client.HTTPException) as error:
            self._fail(503, str(error))
            return
        if fault == "cut":
            self._cut()
        elif status == 204:
            self._reply(204)
        else:
            self._fail(status, json.loads(answer or b"{}").get("error", ""))

    def _forward(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        try:
            status, kind, answer = self._ask(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self._fail(503, str(error))
        else:
            self._reply(status, answer, kind)

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, str, bytes]:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind == "Basic":
            headers = {**headers, "Authorization": f"Basic {token}"}
        elif kind == "Token" and ":" in token:
            headers = {**headers, "Authorization": f"Basic {base64.b64encode(token.encode()).decode()}"}
        for again in (True, False):
            try:
                self.behind = self.behind or http.client.HTTPConnection(
                    "127.0.0.1", self.server_port, timeout=600
                )
                self.behind.request(method, path, body, headers)
                answer = self.behind.getresponse()
                return answer.status, answer.getheader("Content-Type", ""), answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.behind = None
                if not again or isinstance(error, ConnectionRefusedError):
                    raise
        raise AssertionError

    def _fault(self, database: str) -> str:
        path = self.fault_file.with_name(f"{self.fault_file.name}-{Path(database).name}")
        with self.fault_lock:
            try:
                kind, _, left = path.read_text(encoding="ascii").strip().partition(" ")
            except FileNotFoundError:
                return ""
            if left and int(left) > 1:
                path.write_text(f"{kind} {int(left) - 1}", encoding="ascii")
            elif left:
                path.unlink()
            return kind

    def _cut(self) -> None:
        """Send a reset: close with linger 0."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.shutdown(socket.SHUT_RD)
        os.close(self.connection.detach())

    def _fail(self, status: int, text: str) -> None:
        words = {"code": _WORDS.get(status, "internal error"), "message": text}
        self._reply(status, json.dumps(words).encode(), "application/json")

    def _reply(self, status: int, body: bytes = b"", kind: str = "") -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        if status in {429, 503}:
            self.send_header("Retry-After", "1")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http.server.ThreadingHTTPServer):
    """Many connections at once."""

    daemon_threads = True
    request_queue_size = 64


if __name__ == "__main__":
    Door.server_port = int(sys.argv[2])
    Door.fault_file = Path(sys.argv[3])
    Server(("127.0.0.1", int(sys.argv[1])), Door).serve_forever()
