"""What a channel is: the message that it carries, its two methods, and texts made fit to be shown and sent."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from pytest_mlhpc.errors import MlhpcError

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
