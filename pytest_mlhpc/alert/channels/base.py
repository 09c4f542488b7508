"""What a channel is: the message it carries and the two things it must be able to do.

A module of a channel (``smtp.py``, ``webhook.py`` ...) offers two names:

* ``Settings``, a frozen dataclass of plain values with defaults where there is one, checked by pydantic when ``alerts.yaml``
  is read. Its ``__post_init__`` raises ValueError, with a text that shows no secret, for what no type can say. A secret is
  ``field(repr=False)``. Values of the form ``${NAME}`` were replaced from the environment before.
* ``open_channels(name, settings) -> Sequence[Channel]``: usually one; one for each receiver where each of them may refuse
  alone (mail), so that the outbox keeps account of each. It connects to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


class State(StrEnum):
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
    state: State = State.NEW
    hint: str = ""  #: what to look at: a command, or what else changed


@dataclass(frozen=True)
class Message:
    """One change of the state of one incident, ready to be sent.

    ``id`` is the same whenever this change is sent again, and no other change has it: keys for exactly-once come from it.
    ``incident`` is the same from the first message of an incident to its last: threads, issues and alerts hang on it.
    Both hold only ``[a-z0-9-]``, at most 64. ``labels`` are the same over the life of an incident, names ``[a-z_]``.
    """

    id: str
    incident: str
    kind: Kind
    state: State
    title: str  #: one line, at most 160 characters, no control characters
    text: str
    html: str  #: a fragment for a body, everything from outside escaped
    labels: Mapping[str, str]
    started_ns: int  #: of the incident; never changes
    created_ns: int  #: of this change
    ended_ns: int | None = None  #: set when resolved
    problems: tuple[Affected, ...] = ()

    @property
    def resolved(self) -> bool:
        """Whether this ends its incident."""
        return self.state is State.RESOLVED


class ChannelError(MlhpcError):
    """A message was not delivered.

    Its text begins with the channel's name and a colon, then names the address without secrets and says what the peer answered.

    ``retry`` is false only where the peer will never take this very message, which is then given up: after 400, 413 and 422 of
    HTTP, after a 5yz answer of SMTP to the receiver or the mail, and where lists of GitLab have no end. After all else the
    message is kept and sent again, also where only a person can help (401, 403, 404, a redirect, a password, a certificate).
    """

    def __init__(self, text: str, *, retry: bool) -> None:
        self.retry = retry
        super().__init__(text)


class Channel(Protocol):
    """One way out. Each call ends within its time limit, whatever the peer does."""

    @property
    def name(self) -> str:
        """Of the channel in alerts.yaml, with the receiver where there are several: the account in the outbox."""

    def send(self, message: Message) -> None:
        """Deliver *message*. Called again with the same one if the process died before the outbox noted its success.

        Raises:
            ChannelError: it was not delivered, or nobody knows.
        """

    def resend_open(self, messages: Sequence[Message]) -> None:
        """Tell again of all open incidents, each by its newest message, where the peer forgets; else do nothing.

        Called on every run of ``mlhpc alert send``, after all was sent.

        Raises:
            ChannelError: it was not delivered, or nobody knows.
        """


def as_json(message: Message) -> dict[str, Any]:
    """Return what programs receive: *message* as plain values, with its schema's number."""
    plain = asdict(message)
    plain["kind"], plain["state"] = message.kind.value, message.state.value
    plain["problems"] = [{**line, "state": line["state"].value} for line in plain["problems"]]
    return {"schema": SCHEMA, **plain}
