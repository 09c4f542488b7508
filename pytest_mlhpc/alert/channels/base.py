"""What channels share: the message that they carry, their two methods, texts fit to be sent, and one HTTP request.

A request is bounded in time and size and can be cancelled; its errors hold nothing secret.
"""

from __future__ import annotations

import base64
import json
import math
import re
import ssl
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol

from urllib3.exceptions import HTTPError

from pytest_mlhpc.config.http import (
    CancellableConnection,
    causes_of,
    open_pool,
    system_message,
    use_line,
    within,
)
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.node.files import read_json

#: Version of what :func:`as_json` gives to programs.
SCHEMA = 2


class Kind(StrEnum):
    """What a message is about. People who read one of these are often not those who read the others."""

    REGRESSION = "regression"  #: figures became worse and stayed so
    STALE = "stale"  #: expected by the schedule, and not recorded
    FAILURE = "failure"  #: runs that broke, or measured nothing or not what was asked
    NODES = "nodes"  #: nodes that vetting left out
    MORNING = "morning"  #: the page of a whole night: no incident, and only for channels that name it


class IncidentState(StrEnum):
    """What became of an incident; each change of it is one message."""

    NEW = "new"
    WORSE = "worse"
    CONTINUING = "continuing"  #: sent only when an acknowledgement or a mute ends and the problem has not
    ACKNOWLEDGED = "acknowledged"  #: only among the open ones of ``resend_open``, never sent
    RESOLVED = "resolved"


@dataclass(frozen=True)
class Affected:
    """One line of a message: a series, a stale benchmark or a node, as far as each field applies."""

    system: str
    partition: str = ""
    environment: str = ""
    benchmark: str = ""
    metric: str = ""
    unit: str = ""
    before: float | None = None  #: in the unit
    after: float | None = None
    worse_by: float = 0.0  #: fraction of ``before``, positive is worse
    since_ns: int = 0
    node: str = ""
    reason: str = ""
    state: IncidentState = IncidentState.NEW
    hint: str = ""  #: what to look at: a command, or what else changed
    owner: str = ""  #: who is asked about it; several are one text with commas


@dataclass(frozen=True)
class AlertMessage:
    """One change of the state of one incident, or the page of one night, ready to be sent.

    ``id`` is the same whenever this change is sent again, and no other change has it: keys for exactly-once come from it.
    ``incident`` is the same from the first message of an incident to its last: threads, issues and alerts hang on it.
    Both hold only ``[a-z0-9-]``, at most 64. ``labels`` are the same over the life of an incident, names ``[a-z_]``.
    """

    id: str
    incident: str
    kind: Kind
    state: IncidentState
    title: str  #: one line, at most 160 characters, no control characters
    text: str
    html: str  #: a fragment for a body, everything from outside escaped
    labels: Mapping[str, str]
    started_ns: int  #: of the incident; never changes
    created_ns: int  #: of this change
    ended_ns: int | None = None  #: set when resolved
    problems: tuple[Affected, ...] = ()
    owners: tuple[str, ...] = ()  #: names of all who are asked about it, sorted
    ticket: str = ""  #: where people work on it, an address or a key

    @property
    def resolved(self) -> bool:
        """Whether this ends its incident."""
        return self.state is IncidentState.RESOLVED


class DeliveryError(MlhpcError):
    """A message was not delivered.

    Its text begins with the channel's name and a colon, then names the address without secrets and says what the peer answered.

    ``retry`` is false only where the peer will never take this very message, which is then given up: after 400, 413 and 422 of
    HTTP, after a 5yz answer of SMTP to the receiver or the mail, and where lists of GitLab have no end. After all else the
    message is stored and sent again, also where only a person can help (401, 403, 404, a redirect, a password, a certificate).
    """

    def __init__(self, text: str, *, retry: bool) -> None:
        self.retry = retry
        super().__init__(text)


class Channel(Protocol):
    """One way out. Each call ends within its time limit, whatever the peer does."""

    @property
    def name(self) -> str:
        """Of the channel in alerts.yaml, with the receiver where there are several: the account in the outbox."""

    def send(self, message: AlertMessage) -> None:
        """Deliver *message*. Called again with the same one if the process died before the outbox noted its success.

        Raises:
            ChannelError: it was not delivered, or nobody knows.
        """

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Tell again of all open incidents, each by its newest message, where the peer forgets; else do nothing.

        Called on every run of ``mlhpc alert send``, after all was sent.

        Raises:
            ChannelError: it was not delivered, or nobody knows.
        """


def as_json(message: AlertMessage) -> dict[str, Any]:
    """Return what programs receive: *message* as plain values, with its schema's number."""
    plain = asdict(message)
    plain["kind"], plain["state"] = message.kind.value, message.state.value
    plain["problems"] = [{**line, "state": line["state"].value} for line in plain["problems"]]
    return {"schema": SCHEMA, **plain}


#: Of what a peer said, in characters: a sentence or two.
MOST_SAID = 300
#: Shorter texts are no secrets, and hiding them would leave nothing readable.
_SHORTEST_SECRET = 4
_HIDDEN = "***"


def quoted(answer: bytes | str, secrets: Iterable[str] = ()) -> str:
    """Return what a peer answered as one line without control characters and without our secrets, which it may repeat."""
    text = answer.decode("utf-8", errors="replace") if isinstance(answer, bytes) else answer
    text = hidden(text, secrets)
    text = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return text if len(text) <= MOST_SAID else text[: MOST_SAID - 3] + "..."


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with each secret replaced, also in the form in which it stands in an address."""
    forms = {form for secret in secrets for form in (secret, urllib.parse.quote(secret, safe=""))}
    for form in sorted(forms, key=len, reverse=True):  # one may be a part of another
        if len(form) >= _SHORTEST_SECRET:
            text = text.replace(form, _HIDDEN)
    return text


def secrets_of(url: str) -> tuple[str, ...]:
    """Return what is secret in an address: user and password, and all behind the host: hooks have their token in the path."""
    parts = urllib.parse.urlsplit(url)
    values = [value for _name, value in urllib.parse.parse_qsl(parts.query)]
    lines = [
        *parts.path.split("/"),
        parts.path,
        parts.query,
        *values,
        parts.username or "",
        parts.password or "",
    ]
    return tuple({form for word in lines for form in (word, urllib.parse.unquote(word)) if form})


def secret(value: str, what: str) -> str:
    """Return a secret without white space around it, as files and variables often end with a newline.

    Raises:
        ValueError: It cannot stand in a header; the text does not show it.
    """
    value = value.strip()
    if not all(" " <= char <= "~" for char in value):
        raise ValueError(f"{what} contains a character that a header cannot contain, such as a line break")
    return value


def plain(value: Any) -> Any:
    """Return JSON data that every receiver can read: no NaN, no infinity, no half of a character."""
    if isinstance(value, str):
        return value.encode("utf-8", errors="replace").decode("utf-8")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


def cut(text: str, most: int) -> str:
    """Return at most *most* characters of *text*, saying so where something was left out."""
    note = "\n[cut: too long for this channel]"
    return text if len(text) <= most else text[: most - len(note)] + note


def whole(message: AlertMessage) -> str:
    """Return a message's text under its title, which the text often begins with."""
    text = message.text
    return text if text.startswith(message.title) else f"{message.title}\n\n{text}"


def fenced(text: str) -> str:
    """Return *text* as a block of code in Markdown: nothing in it is a command, a link, or the name of somebody to notify."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


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
