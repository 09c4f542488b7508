"""Servers on loopback that do what real ones seldom do, and a wire to a real one that can be cut."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml


class Listener:
    """Serves each connection in a thread of its own; closing ends them all and waits for them."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.accepted = 0
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                self.accepted += 1
                self._open.add(connection)
                thread = threading.Thread(target=self._one, args=(connection,))
                self._threads.append(thread)
            thread.start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._serve(connection)
        with self._lock:
            self._open.discard(connection)

    def cut(self) -> int:
        """End all connections that are open, in the middle of whatever they carry; return how many."""
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
            return len(self._open)

    def refuse(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def close(self) -> None:
        self.refuse()
        deadline = time.monotonic() + 300
        while any(thread.is_alive() for thread in self._threads):
            assert time.monotonic() < deadline, "a connection's thread does not end"
            self.cut()
            for thread in self._threads:
                thread.join(0.05)


class Wire(Listener):
    """Carries bytes to and from a real server until it is cut. While ``blocked`` it hangs up on everybody."""

    def __init__(self, host: str, port: int) -> None:
        self.blocked = False
        self._target = (host, port)
        super().__init__(self._carry)

    def _carry(self, near: socket.socket) -> None:
        if self.blocked:
            return
        with socket.create_connection(self._target) as far:
            back = threading.Thread(target=_copy, args=(far, near))
            back.start()
            _copy(near, far)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Asked:
    """One request as it came in, and ways to answer it."""

    def __init__(self, connection: socket.socket, head: str, body: bytes) -> None:
        first, *lines = head.split("\r\n")
        self.method, target, _ = first.split(" ")
        self.path = urlsplit(target).path
        self.query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        self.lines = lines
        pairs = [line.partition(":") for line in lines]
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.body = json.loads(body) if body else None
        self.connection = connection

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.connection.sendall("\r\n".join([*lines, "", ""]).encode() + data)

    def refuse(self, status: int, message: str = "", reason: str = "", **headers: str) -> None:
        answer = {"kind": "Status", "code": status, "message": message, "reason": reason}
        self.answer({**answer, "details": {"name": "x"}}, status, **headers)

    def begin(self) -> None:
        """Begin an answer without end."""
        self.connection.sendall(b"HTTP/1.1 200 Said\r\nTransfer-Encoding: chunked\r\n\r\n")

    def piece(self, data: bytes) -> None:
        self.connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, kind: str, content: Any) -> None:
        self.piece(json.dumps({"type": kind, "object": content}).encode() + b"\n")

    def end(self) -> None:
        self.connection.sendall(b"0\r\n\r\n")

    def hang(self) -> None:
        """Say nothing until the other side goes away."""
        while self.connection.recv(4096):
            pass


class Scripted(Listener):
    """A server of HTTP, plain or with TLS, whose answers a function gives; what was asked is kept."""

    def __init__(self, answer: Callable[[Asked], None], tls: ssl.SSLContext | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self.asked: list[Asked] = []
        super().__init__(self._talk)

    def _talk(self, connection: socket.socket) -> None:
        wrapped = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
        with wrapped:
            for head, body in _requests(wrapped):
                asked = Asked(wrapped, head, body)
                self.asked.append(asked)
                self._answer(asked)


def _requests(connection: socket.socket) -> Iterator[tuple[str, bytes]]:
    data = b""
    while True:
        while b"\r\n\r\n" not in data:
            if not (more := connection.recv(65536)):
                return
            data += more
        head, _, data = data.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        while len(data) < size:
            data += connection.recv(65536)
        yield head.decode(), data[:size]
        data = data[size:]


def kubeconfig(path: Path, server: str, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    """Write a kubeconfig with one context, `main`, of namespace `mine`."""
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "main",
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": {"token": "secret-token"} if user is None else user}],
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u", "namespace": "mine"}}],
    }  # fmt: skip
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def through(wire: Wire, real: Path, path: Path) -> Path:
    """Write *real*, a kubeconfig, so that its server is reached through *wire*."""
    config = yaml.safe_load(real.read_text(encoding="utf-8"))
    for entry in config["clusters"]:
        cluster = entry["cluster"]
        cluster.setdefault("tls-server-name", urlsplit(cluster["server"]).hostname)
        cluster["server"] = f"https://127.0.0.1:{wire.port}"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def wire_to(real: Path) -> Wire:
    """Return a wire to the server of a kubeconfig with one cluster."""
    config = yaml.safe_load(real.read_text(encoding="utf-8"))
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    return Wire(server.hostname or "", server.port or 443)
