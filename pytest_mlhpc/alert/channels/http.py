"""One HTTP request of a channel: bounded in time and size, cancellable, with nothing secret in its errors."""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import json
import os
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pytest_mlhpc.alert.channels.base import DeliveryError, said, secrets_of
from pytest_mlhpc.node.files import read_json


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
            LineCut: The line was cut before there was a connection.
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


def basic(user: str, password: str) -> str:
    """Return a header's value for a user and a password (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def connect(
    parts: urllib.parse.SplitResult, line: CancellableConnection, limit_s: float, ca_file: str
) -> tuple[http.client.HTTPConnection, dict[str, str]]:
    """Return a connection to a server, made when it is first used, and headers for a proxy that wants whole addresses.

    Args:
        parts: The address.
        line: Holds the connection.
        limit_s: Of each step, in seconds.
        ca_file: Certificates to trust; empty: the system's.
    """
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    proxy = _proxy(parts)

    def make(to: str, at_port: int) -> http.client.HTTPConnection:
        return _Https(to, at_port, line, limit_s, ca_file) if secure else _Http(to, at_port, line, limit_s)

    if proxy is None:
        return make(host, port), {}
    extra = {"Host": parts.netloc.rpartition("@")[2]}
    if proxy.username is not None:
        user, password = urllib.parse.unquote(proxy.username), urllib.parse.unquote(proxy.password or "")
        extra["Proxy-Authorization"] = basic(user, password)
    at, its_port = proxy.hostname or "", proxy.port or 3128
    if not secure:
        return make(at, its_port), extra
    connection = make(at, its_port)
    connection.set_tunnel(host, port, {key: value for key, value in extra.items() if key != "Host"})
    return connection, {}


def _proxy(parts: urllib.parse.SplitResult) -> urllib.parse.SplitResult | None:
    """Return the proxy of ``http_proxy``, ``https_proxy`` and ``no_proxy``; none for this machine, which no other could reach.

    Raises:
        OSError: What is named is no address; the text does not show it, as it may hold a password.
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


def is_loopback(host: str) -> bool:
    """Whether a name or an address is of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class _Http(http.client.HTTPConnection):
    """A connection that its line holds from the moment in which it is there."""

    def __init__(self, host: str, port: int, line: CancellableConnection, limit_s: float) -> None:
        super().__init__(host, port, timeout=limit_s)
        self._line = line

    def connect(self) -> None:
        super().connect()
        self._line.hold(self.sock)


class _Https(http.client.HTTPSConnection):
    """The same with TLS, whose handshake may hang too."""

    def __init__(
        self, host: str, port: int, line: CancellableConnection, limit_s: float, ca_file: str
    ) -> None:
        context = ssl.create_default_context(cafile=ca_file or None)
        super().__init__(host, port, timeout=limit_s, context=context)
        self._line = line
        self._peer_context = context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # the tunnel included
        self._line.hold(self.sock)
        name = getattr(self, "_tunnel_host", None) or self.host
        self.sock = self._peer_context.wrap_socket(self.sock, server_hostname=name)


T = TypeVar("T")
#: How long an exchange whose connection was cut may take to notice, in seconds.
_NOTICE_S = 2.0


def within(limit_s: float, work: Callable[[CancellableConnection], T]) -> T:
    """Return what *work* returns, if it does so in time.

    A socket's own time limit knows only of silence, and none reaches the resolver of names: hence a thread, left behind as a
    daemon in the worst case, when the resolver hangs.

    Args:
        limit_s: Of the whole exchange, in seconds.
        work: Does it, and gives its connection to the line it receives.

    Raises:
        TimeoutError: It was not done in time.
        BaseException: What *work* raised.
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

    thread = threading.Thread(target=run, name="mlhpc-alert", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        line.cut("its time is over")
        thread.join(_NOTICE_S)
        raise TimeoutError  # also if it returned something now: what is cut off may look whole
    if failed:
        raise failed[0]
    return done[0]


#: Largest answer that is read, in bytes: a page of 100 issues of GitLab with long descriptions; and of one that is no success.
MOST_BYTES, MOST_ERROR_BYTES = 32 * 1024 * 1024, 64 * 1024
#: Longest time limit that makes sense after a nightly run, in seconds.
MOST_LIMIT_S = 600.0
#: Statuses (RFC 9110) that refuse this one message for good. After all others the same may be taken later: when the server is
#: well again, or when somebody has mended token, address or certificate, until which nothing may be lost.
_FOR_GOOD = {400, 413, 422}


@dataclass(frozen=True)
class Peer:
    """A server as a channel knows it. ``channel`` is its name in errors; ``secrets`` are hidden in what the server says."""

    channel: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    ca_file: str = ""
    limit_s: float = 20.0

    @property
    def place(self) -> str:
        """Scheme, host and port: all of the address that is no secret."""
        parts = urllib.parse.urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{parts.scheme}://{host}{port}"

    def error(self, text: str, *, retry: bool) -> DeliveryError:
        """Return an error that names channel and server."""
        return DeliveryError(f"{self.channel}: {self.place}: {text}", retry=retry)

    def hide(self, text: bytes | str) -> str:
        """Return what the server said as one line without secrets."""
        return said(text, (*self.secrets, *secrets_of(self.url)))


@dataclass(frozen=True)
class _Request:
    method: str
    url: str
    body: bytes | None
    headers: Mapping[str, str]


@dataclass(frozen=True)
class HttpResponse:
    """What came back. The names of ``headers`` are in small letters."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def check_url(url: str) -> str:
    """Return an address without white space around it.

    Raises:
        ValueError: It is none; the text does not show it, as it may hold a token.
    """
    url = url.strip()
    problem = "url must be http://HOST... or https://HOST..."
    try:
        parts = urllib.parse.urlsplit(url)
        port_is_fine = parts.port is None or parts.port > 0
    except ValueError:
        raise ValueError(problem) from None
    visible = all("!" <= char <= "~" for char in url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port_is_fine or not visible:
        raise ValueError(problem)
    return url


def check_limits(limit_s: float, ca_file: str) -> None:
    """Check what the settings of all channels have in common.

    Raises:
        ValueError: A time limit that is none, or a file of certificates that is not there.
    """
    if not 0 < limit_s <= MOST_LIMIT_S:
        raise ValueError(f"limit_s must be more than 0 and at most {MOST_LIMIT_S:g} seconds")
    if ca_file and not Path(ca_file).is_file():
        raise ValueError(f"ca_file: there is no file {ca_file}")


def send_json(peer: Peer, method: str, url: str, content: Any = None) -> HttpResponse:
    """Send one request and return its success.

    Args:
        peer: The server.
        method: Of HTTP.
        url: Of the same server, quoted.
        content: Sent as JSON unless it is None; bytes are JSON already.

    Raises:
        ChannelError: There was no answer or no success; ``retry`` says whether it may be taken later.
    """
    body = content if isinstance(content, bytes | None) else json.dumps(content, allow_nan=False).encode()
    headers = {"User-Agent": "pytest-mlhpc", "Accept": "application/json", **peer.headers}
    if body is not None:
        headers["Content-Type"] = "application/json"
    request = _Request(method, url, body, headers)
    try:
        answer = within(peer.limit_s, lambda line: _exchange(peer, line, request))
    except TimeoutError:
        raise peer.error(f"no answer within {peer.limit_s:g} s", retry=True) from None
    except ssl.SSLCertVerificationError as error:
        text = f"its certificate is not trusted: {error.verify_message}; set ca_file to the certificate authority of the site"
        raise peer.error(text, retry=True) from None
    except (http.client.HTTPException, OSError) as error:
        reason = peer.hide(str(error)) or type(error).__name__
        raise peer.error(f"no answer: {reason}", retry=True) from None
    if not 200 <= answer.status < 300:
        raise _refusal(peer, answer)
    return answer


def json_of(peer: Peer, answer: HttpResponse) -> Any:
    """Return the JSON data of an answer.

    Raises:
        ChannelError: It is none.
    """
    try:
        return read_json(answer.body)
    except ValueError:
        shown = peer.hide(answer.body[:1000])
        raise peer.error(f"did not answer with JSON ({shown}); check url", retry=True) from None


def _refusal(peer: Peer, answer: HttpResponse) -> DeliveryError:
    if 300 <= answer.status < 400:
        # Following it would send the message, and a token, to whom nobody has named.
        there = peer.hide(_host_of(answer.headers.get("location", "")))
        text = f"answered {answer.status}, a redirect to {there}; url must be the last address"
        return peer.error(text, retry=True)
    words = peer.hide(answer.body)
    text = f"answered {answer.status}{': ' if words else ''}{words}"
    return peer.error(text, retry=answer.status not in _FOR_GOOD)


def _host_of(location: str) -> str:
    try:
        parts = urllib.parse.urlsplit(location)
    except ValueError:
        return "elsewhere"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "elsewhere"


def _exchange(peer: Peer, line: CancellableConnection, request: _Request) -> HttpResponse:
    parts = urllib.parse.urlsplit(request.url)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    sent = dict(request.headers)
    if parts.username is not None:
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        sent.setdefault("Authorization", basic(user, password))
    connection, absolute = connect(parts, line, peer.limit_s, peer.ca_file)
    if absolute:
        target = f"{peer.place}{target}"
        sent |= absolute
    try:
        connection.request(request.method, target, body=request.body, headers=sent)
        response = connection.getresponse()
        most = MOST_BYTES if 200 <= response.status < 300 else MOST_ERROR_BYTES
        found = {name.lower(): value for name, value in response.getheaders()}
        return HttpResponse(response.status, found, response.read(most))
    finally:
        connection.close()
