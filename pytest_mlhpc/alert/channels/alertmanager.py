"""Alerts to Prometheus' Alertmanager, API v2: one alert for each incident.

Alertmanager tells alerts apart by their labels alone, and forgets all of them when it restarts; an alert that nobody repeats
until its ``endsAt`` counts as resolved. Hence the same labels and the same first ``startsAt`` over an incident's life, an
``endsAt`` some way after the next night while it is open, and all open ones again on every run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pytest_mlhpc.alert.channels.base import (
    AlertMessage,
    Channel,
    Peer,
    basic,
    check_limits,
    check_url,
    cut,
    plain,
    secret,
    send_json,
)

#: Of the annotation ``description``, in characters: it stands in every notification.
_MOST_TEXT = 8_000
#: Alerts in one request; its answer says which of them are wrong, and takes the others.
_MOST_AT_ONCE = 100
_NS = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """Where it is. ``labels`` are added to every alert (``severity`` is ``warning`` without them)."""

    url: str = field(repr=False)  #: without ``/api/v2``
    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)  #: sent as ``Authorization: Bearer``
    labels: Mapping[str, str] = field(default_factory=dict)
    link: str = ""  #: ``generatorURL``: the report or the dashboard that people should look at
    #: an open alert ends by itself so long after its last repetition: a night and some delay
    hold_h: float = 30.0
    ca_file: str = ""
    limit_s: float = 20.0

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        object.__setattr__(self, "url", check_url(self.url).rstrip("/"))
        for name in ("password", "token"):
            object.__setattr__(self, name, secret(getattr(self, name), name))
        if self.user and self.token:
            raise ValueError("user and token are both set; set one of them")
        if self.link:
            check_url(self.link)
        if not 1 <= self.hold_h <= 24 * 31:
            raise ValueError("hold_h must be between 1 and 744 hours")
        check_limits(self.limit_s, self.ca_file)


def open_channels(name: str, settings: Settings) -> Sequence[Channel]:
    """Return the channel."""
    return (Alertmanager(name, settings),)


class Alertmanager:
    """One Alertmanager. Of a cluster each needs a channel of its own; they agree among themselves who notifies."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  #: of the channel in alerts.yaml
        self._settings = settings
        secrets = (settings.password, settings.token)
        self._peer = Peer(
            name, settings.url, _authorization(settings), secrets, settings.ca_file, settings.limit_s
        )

    def send(self, message: AlertMessage) -> None:
        """Post the alert of *message*'s incident, as it is now.

        Raises:
            ChannelError: It was not taken.
        """
        self._post([message])

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Post the alerts of all open incidents: a restart forgot them, and their ``endsAt`` comes nearer.

        Raises:
            ChannelError: Not all were taken.
        """
        for first in range(0, len(messages), _MOST_AT_ONCE):
            self._post(messages[first : first + _MOST_AT_ONCE])

    def _post(self, messages: Sequence[AlertMessage]) -> None:
        now_ns = time.time_ns()
        alerts = [alert_of(message, self._settings, now_ns) for message in messages]
        send_json(self._peer, "POST", f"{self._settings.url}/api/v2/alerts", alerts)


def alert_of(message: AlertMessage, settings: Settings, now_ns: int) -> dict[str, Any]:
    """Return the alert of *message*'s incident; equal but for ``endsAt`` and annotations over its whole life."""
    ends_ns = message.ended_ns if message.resolved else now_ns + int(settings.hold_h * 3600 * _NS)
    # It refuses an alert that ends before it starts: clocks are set back, too.
    ends_ns = max(ends_ns or now_ns, message.started_ns + _NS)
    alert = {
        "labels": labels_of(message, settings.labels),
        "annotations": {
            "summary": plain(message.title),
            "description": plain(cut(message.text, _MOST_TEXT)),
            "state": message.state.value,
        },
        "startsAt": _rfc3339(message.started_ns),
        "endsAt": _rfc3339(ends_ns),
    }
    return alert | ({"generatorURL": settings.link} if settings.link else {})


def labels_of(message: AlertMessage, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of *message*'s incident: those of the settings, of the message, and our own; later ones win.

    ``alertname``, by which a site's routes and inhibitions select, is MlhpcRegression, MlhpcStale and so on, one for each kind. A
    name that Alertmanager refuses gets ``_`` for each wrong character; empty values count as absent there.
    """
    given = {"severity": "warning", **extra, **message.labels}
    ours = {"alertname": f"Mlhpc{message.kind.value.title()}", "incident": message.incident}
    named = {label_name(name): str(plain(value)) for name, value in given.items()} | ours
    return {name: value for name, value in named.items() if value}


def label_name(name: str) -> str:
    """Return a name that Alertmanager takes: ``[a-zA-Z_][a-zA-Z0-9_]*``."""
    name = re.sub("[^a-zA-Z0-9_]", "_", name)
    return f"_{name}" if not name or name[0].isdigit() else name


def _rfc3339(ns: int) -> str:
    seconds, rest = divmod(ns, _NS)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{rest:09d}Z"


def _authorization(settings: Settings) -> dict[str, str]:
    if settings.token:
        return {"Authorization": f"Bearer {settings.token}"}
    if settings.user:
        return {"Authorization": basic(settings.user, settings.password)}
    return {}
