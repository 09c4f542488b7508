"""A server of HTTP for tests that keeps what it is sent and answers as it is told, with all the ways in which a peer fails.

As a program, `python http_sink.py PORT FILE`: it answers 200 and appends each request to FILE as a line of JSON.
"""

import contextlib
import http.server
import json
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

#: Kinds of :attr:`Reply.fault`, beside a status that is no success.
HANG, RESET, DRIP, GARBAGE = "hang", "reset", "drip", "garbage"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]  #: names in small letters
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """What is answered. ``fault``, after the request was taken: nothing ever comes, the connection breaks, a byte now and then,
    or something that is no HTTP."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""


def json_reply(content: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(content).encode(), {"Content-Type": "application/json", **headers})


class HttpSink:
    """Runs in a thread for a block; on a port of 127.0.0.1, over TLS with a certificate."""

    def __init__(
        self,
        answer: Callable[[Request], Reply] | None = None,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.answer = answer or (lambda _request: Reply())
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self._server.handle_error = _say_nothing  # type: ignore[method-assign]  # clients break off on purpose
        if tls is not None:
            late = {"server_side": True, "do_handshake_on_connect": False}
            self._server.socket = tls.wrap_socket(self._server.socket, **late)
        self._scheme = "http" if tls is None else "https"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def then(self, *replies: Reply) -> None:
        """Give these answers to the next requests, then the usual one again."""
        usual, left = self.answer, list(replies)

        def answer(request: Request) -> Reply:
            return left.pop(0) if left else usual(request)

        self.answer = answer

    def take(self, request: Request) -> Reply:
        reply = self.answer(request)
        self.requests.append(request)
        return reply


def _say_nothing(_request: object, _address: object) -> None:
    """Print no traceback for a client that broke off."""


def _handler(sink: HttpSink) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = sink.take(Request(self.command, self.path, headers, self.rfile.read(length)))
            if reply.fault:
                self._fail(reply.fault)
                return
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - http.server's names

        def _fail(self, fault: str) -> None:
            if fault == HANG:
                sink.closing.wait()
            elif fault == DRIP:
                _drip(self.wfile, sink.closing)
            elif fault == GARBAGE:
                self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
            elif fault == RESET:
                now = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, now)
            self.close_connection = True

        def log_message(self, *_words: object) -> None:
            """Print nothing."""

    return Handler


def _drip(out: BinaryIO, closing: threading.Event) -> None:
    out.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
    with contextlib.suppress(OSError):
        while not closing.wait(0.02):
            out.write(b"x")


def main(port: int, kept: Path) -> None:
    def keep(request: Request) -> Reply:
        line = {"method": request.method, "path": request.path, "headers": dict(request.headers)}
        line["body"] = request.body.decode(errors="replace")
        with kept.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
        return Reply()

    with HttpSink(keep, port=port) as sink:
        sink.closing.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
