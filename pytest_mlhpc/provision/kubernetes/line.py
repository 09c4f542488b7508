"""How the connections of urllib3 come to be held by the lines of those who make requests, and how long a line may last."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from pytest_mlhpc.line import Line, LineCut


@contextlib.contextmanager
def on(line: Line) -> Iterator[None]:
    """Let connections that this thread makes or takes from a pool be held by *line*."""
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)


@contextlib.contextmanager
def limited(line: Line, seconds: float, why: str) -> Iterator[None]:
    """Cut *line* after *seconds*, however busily the other side dribbles; socket time limits only know of silence."""
    timer = threading.Timer(seconds, line.cut, (why,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def hold_connections(manager: PoolManager) -> None:
    """Make the connections of *manager* known to the lines of the threads that use them."""
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


#: The line of the request that this thread is making. A context variable, as urllib3 hands nothing through to connections.
_LINE: ContextVar[Line | None] = ContextVar("mlhpc_kubernetes_line", default=None)


def _hold(connected: socket.socket | None) -> None:
    line = _LINE.get()
    if line is None or connected is None:
        return
    try:
        line.hold(connected)
    except LineCut:
        connected.close()
        raise


class _Http(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        # The one place between connecting and TLS, whose handshake may hang too; urllib3's SOCKS support overrides it as well.
        connected = super()._new_conn()
        _hold(connected)
        return connected

    def request(self, *args: Any, **kwargs: Any) -> None:
        _hold(self.sock)
        super().request(*args, **kwargs)


class _Https(_Http, HTTPSConnection):
    """As above, with TLS after the connection is made."""


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https
