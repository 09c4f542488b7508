"""One HTTP request of a channel: bounded in time and size, cancellable, with nothing secret in its errors."""

from __future__ import annotations

import base64
import json
import ssl
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from urllib3.exceptions import HTTPError

from pytest_mlhpc.alert.channels.base import DeliveryError, quoted, secrets_of
from pytest_mlhpc.config.http import (
    CancellableConnection,
    causes_of,
    open_pool,
    system_message,
    use_line,
    within,
)
from pytest_mlhpc.node.files import read_json


def basic(user: str, password: str) -> str:
    """Return a header's value for a user and a password (RFC 7617)."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


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
        return quoted(text, (*self.secrets, *secrets_of(self.url)))


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
    except (HTTPError, HTTPException, OSError) as error:
        raise _unanswered(peer, error) from None
    if not 200 <= answer.status < 300:
        raise _refusal(peer, answer)
    return answer


def _unanswered(peer: Peer, error: Exception) -> DeliveryError:
    for cause in causes_of(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            text = f"its certificate is not trusted: {cause.verify_message}; set ca_file to the certificate authority of the site"
            return peer.error(text, retry=True)
    return peer.error(f"no answer: {peer.hide(system_message(error))}", retry=True)


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
    body = peer.hide(answer.body)
    text = f"answered {answer.status}{': ' if body else ''}{body}"
    return peer.error(text, retry=answer.status not in _FOR_GOOD)


def _host_of(location: str) -> str:
    try:
        parts = urllib.parse.urlsplit(location)
    except ValueError:
        return "elsewhere"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else "elsewhere"


def _exchange(peer: Peer, line: CancellableConnection, request: _Request) -> HttpResponse:
    parts = urllib.parse.urlsplit(request.url)
    sent = dict(request.headers)
    if parts.username is not None:
        user, password = urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        sent.setdefault("Authorization", basic(user, password))
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    url = urllib.parse.urlunsplit(parts._replace(path=parts.path or "/", fragment=""))
    with open_pool(url, peer.ca_file) as pool, use_line(line):
        response = pool.request(
            request.method, url, body=request.body, headers=sent, redirect=False, preload_content=False,
            timeout=peer.limit_s,
        )  # fmt: skip
        try:
            most = MOST_BYTES if 200 <= response.status < 300 else MOST_ERROR_BYTES
            found = {name.lower(): value for name, value in response.headers.items()}
            return HttpResponse(response.status, found, response.read(most))
        finally:
            response.close()
