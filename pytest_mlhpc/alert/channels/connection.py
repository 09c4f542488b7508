"""Connections of HTTP, with and without TLS and proxies, that their line holds from the moment in which they are there."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import ssl
import urllib.parse
import urllib.request

from pytest_mlhpc.alert.line import Line


def basic(user: str, password: str) -> str:
    """Return a header's value for a user and a password (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def connect(
    parts: urllib.parse.SplitResult, line: Line, limit_s: float, ca_file: str
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

    def __init__(self, host: str, port: int, line: Line, limit_s: float) -> None:
        super().__init__(host, port, timeout=limit_s)
        self._line = line

    def connect(self) -> None:
        super().connect()
        self._line.hold(self.sock)


class _Https(http.client.HTTPSConnection):
    """The same with TLS, whose handshake may hang too."""

    def __init__(self, host: str, port: int, line: Line, limit_s: float, ca_file: str) -> None:
        context = ssl.create_default_context(cafile=ca_file or None)
        super().__init__(host, port, timeout=limit_s, context=context)
        self._line = line
        self._peer_context = context

    def connect(self) -> None:
        http.client.HTTPConnection.connect(self)  # the tunnel included
        self._line.hold(self.sock)
        name = getattr(self, "_tunnel_host", None) or self.host
        self.sock = self._peer_context.wrap_socket(self.sock, server_hostname=name)
