"""HTTP to servers that hang, dribble or lie: an overall deadline, connections that are cut from outside, proxies, certificates.

urllib3 makes the requests. Its own time limits end a silence, not an exchange, and reach no resolver of names. Open this when
a request takes too long or goes the wrong way; what is asked of a server is in ``alert/channels``, ``influx`` and
``provision/kubernetes``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import urllib3
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection

from pytest_mlhpc.node.agents.nodes import is_loopback

#: Most bytes that one read takes.
READ_BYTES = 256 * 1024


class LineCut(OSError):  # noqa: N818 - what happened
    """The line was cut before there was a connection."""


class CancellableConnection:
    """The connection of one exchange. ``why`` it was cut is empty as long as it was not."""

    def __init__(self) -> None:
        self.why = ""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def hold(self, connected: socket.socket) -> None:
        """Remember the connection, by a descriptor of our own: TLS takes the socket's away while it shakes hands.

        Raises:
            LineCut: the line was cut before there was a connection.
        """
        with self._lock:
            if self.why:
                raise LineCut(self.why)
            self._drop()
            self._socket = socket.socket(fileno=os.dup(connected.fileno()))

    def cut(self, why: str) -> None:
        """End the connection: who reads from it or writes to it is woken at once. The first reason stays."""
        with self._lock:
            self.why = self.why or why
            if self._socket is not None:
                with contextlib.suppress(OSError):  # the other side was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Let go of the connection, which may serve another exchange now."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


T = TypeVar("T")
#: How long an exchange whose connection was cut may take to notice, in seconds.
_NOTICE_S = 2.0


def within(limit_s: float, work: Callable[[CancellableConnection], T]) -> T:
    """Return what *work* returns, if it does so in time.

    No time limit of a socket reaches the resolver of names: hence a thread, left behind as a daemon in the worst case, when the
    resolver hangs.

    Args:
        limit_s: of the whole exchange, in seconds.
        work: does it, and has the line that it receives hold its connection.

    Raises:
        TimeoutError: it was not done in time.
        BaseException: what *work* raised.
    """
    line = CancellableConnection()
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work(line))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            failed.append(error)
        finally:
            line.release()

    thread = threading.Thread(target=run, name="mlhpc-exchange", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        line.cut("its deadline has passed")
        thread.join(_NOTICE_S)
        raise TimeoutError  # also if it returned something now: what is cut off may look whole
    if failed:
        if _is_timeout(failed[0]):  # a socket's own limit is that of the exchange
            raise TimeoutError from failed[0]
        raise failed[0]
    return done[0]


def _is_timeout(error: BaseException) -> bool:
    """Return whether a limit has passed. For urllib3 a refused connection is one whose limit to connect has passed, too."""
    refused = urllib3.exceptions.NewConnectionError
    return isinstance(error, urllib3.exceptions.TimeoutError) and not isinstance(error, refused)


#: The line of this thread's request. A context variable, as urllib3 passes no arguments to its connections.
_LINE: ContextVar[CancellableConnection | None] = ContextVar("mlhpc_line", default=None)


@contextlib.contextmanager
def use_line(line: CancellableConnection) -> Iterator[None]:
    """Have *line* track the connections that this thread opens or takes from a pool."""
    token = _LINE.set(line)
    try:
        yield
    finally:
        _LINE.reset(token)


def _track(connected: socket.socket | None) -> None:
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
        # The only place between connecting and TLS, whose handshake may hang too; urllib3's SOCKS support overrides it as well.
        connected = super()._new_conn()
        _track(connected)
        return connected

    def request(self, *args: Any, **kwargs: Any) -> None:
        _track(self.sock)
        super().request(*args, **kwargs)


class _Https(_Http, HTTPSConnection):
    """The same with TLS."""


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


def track_connections(manager: PoolManager) -> None:
    """Have the connections of *manager* tracked by the lines of the threads that use them."""
    manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


def open_pool(url: str, ca_file: str = "") -> PoolManager:
    """Return a pool for the server of *url* that neither retries nor keeps what a proxy is to know in its addresses.

    Args:
        url: of the server; its proxy is that of the environment.
        ca_file: certificates to trust; empty: the system's.

    Raises:
        OSError: the environment names no usable proxy, or the file has no certificate.
    """
    parts = urllib.parse.urlsplit(url)
    options: dict[str, Any] = {"num_pools": 1, "retries": False}
    if parts.scheme == "https":
        options["ssl_context"] = ssl.create_default_context(cafile=ca_file or None)
    proxy = proxy_of(parts)
    manager = PoolManager(**options) if proxy is None else _proxy_pool(proxy, options)
    track_connections(manager)
    return manager


def _proxy_pool(proxy: urllib.parse.SplitResult, options: dict[str, Any]) -> PoolManager:
    host = f"[{proxy.hostname}]" if ":" in (proxy.hostname or "") else proxy.hostname
    login = {}
    if proxy.username is not None:
        user, password = urllib.parse.unquote(proxy.username), urllib.parse.unquote(proxy.password or "")
        login = urllib3.make_headers(proxy_basic_auth=f"{user}:{password}")
    return urllib3.ProxyManager(f"http://{host}:{proxy.port or 3128}", proxy_headers=login, **options)


def proxy_of(parts: urllib.parse.SplitResult) -> urllib.parse.SplitResult | None:
    """Return the proxy of ``http_proxy``, ``https_proxy`` and ``no_proxy``; none for this machine, which no other could reach.

    Raises:
        OSError: what is named is no address; the text does not show it, as it may hold a password.
    """
    host = parts.hostname or ""
    named = urllib.request.getproxies_environment().get(parts.scheme)
    if not named or is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    problem = OSError(f"the variable {parts.scheme}_proxy is not the address of a proxy")
    try:
        found = urllib.parse.urlsplit(named if "//" in named else f"//{named}")
        usable = bool(found.hostname) and found.port != 0
    except ValueError:
        raise problem from None
    if not usable:
        raise problem
    return found


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error of urllib3 and what lies below it, the innermost last."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        inner = cause.args[0] if cause.args and isinstance(cause.args[0], OSError) else None
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__) or inner


def system_message(error: BaseException) -> str:
    """Return the operating system's message below urllib3's exceptions, without object representations."""
    found = list(causes_of(error))
    for cause in found:
        if isinstance(cause, OSError) and cause.strerror:
            return str(cause.strerror)
    return str(found[-1]).rpartition(">: ")[2] or type(found[-1]).__name__


def read_body(response: urllib3.BaseHTTPResponse, most: int, *, cut: bool = False) -> bytes:
    """Return the whole answer; beyond *most* bytes it is cut, or refused.

    Raises:
        OSError: the answer has more than *most* bytes.
    """
    pieces, size = [], 0
    while piece := response.read1(READ_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            if cut:
                break
            raise OSError(0, f"the answer has more than {most} bytes")
    return b"".join(pieces)


def split_lines(pieces: Iterable[bytes], most: int, rest: list[bytes]) -> Iterator[bytes]:
    """Return lines without their newline; longer ones in pieces of about *most* bytes.

    A last line without newline is appended to *rest*.
    """
    tail: list[bytes] = []
    size = 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        tail.append(first)
        size += len(first)
        if others:
            yield b"".join(tail)
            yield from others[:-1]
            tail, size = [others[-1]], len(others[-1])
        elif size >= most:
            yield b"".join(tail)
            tail, size = [], 0
    rest.append(b"".join(tail))
