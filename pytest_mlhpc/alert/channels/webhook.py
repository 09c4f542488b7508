"""A message as JSON to any server of HTTP: to a program of the site, or to a chat that takes ``{"text": ...}``.

The receiver tells a repeated message by its ``Idempotency-Key``, which is the message's ``id``. With a ``secret`` the body is
signed: ``X-MLHPC-Signature: sha256=HEX``, the HMAC-SHA256 of the body's bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pytest_mlhpc.alert.channels.base import (
    AlertMessage,
    Channel,
    Peer,
    as_json,
    check_limits,
    check_url,
    cut,
    fenced,
    plain,
    secret,
    send_json,
    whole,
)

#: Mattermost takes 16,383 characters, Slack and Rocket.Chat more; fences and title need some.
_MOST_CHAT = 12_000


@dataclass(frozen=True)
class Settings:
    """Where to, with what credentials. ``style`` is ``json`` (all fields) or ``chat`` (Mattermost, Slack, Rocket.Chat ...)."""

    url: str = field(repr=False)
    style: Literal["json", "chat"] = "json"
    token: str = field(default="", repr=False)  #: sent as ``Authorization: Bearer``
    secret: str = field(default="", repr=False)  #: signs the body
    ca_file: str = ""
    limit_s: float = 20.0

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        object.__setattr__(self, "url", check_url(self.url))
        object.__setattr__(self, "token", secret(self.token, "token"))
        check_limits(self.limit_s, self.ca_file)


def open_channels(name: str, settings: Settings) -> Sequence[Channel]:
    """Return the channel."""
    return (Webhook(name, settings),)


class Webhook:
    """One server that takes messages by POST."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  #: of the channel in alerts.yaml
        self._settings = settings
        bearer = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        self._peer = Peer(
            name, settings.url, bearer, (settings.token, settings.secret), settings.ca_file, settings.limit_s
        )

    def send(self, message: AlertMessage) -> None:
        """Post *message*; any 2xx is success.

        Raises:
            ChannelError: There was none.
        """
        body = json.dumps(self._content(message), allow_nan=False).encode()
        headers = {**self._peer.headers, "Idempotency-Key": message.id}
        if self._settings.secret:
            digest = hmac.new(self._settings.secret.encode(), body, hashlib.sha256).hexdigest()
            headers["X-MLHPC-Signature"] = f"sha256={digest}"
        send_json(replace(self._peer, headers=headers), "POST", self._settings.url, body)

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Do nothing: a receiver keeps its messages."""

    def _content(self, message: AlertMessage) -> Any:
        if self._settings.style == "json":
            return plain(as_json(message))
        return {"text": plain(fenced(cut(whole(message), _MOST_CHAT)))}
