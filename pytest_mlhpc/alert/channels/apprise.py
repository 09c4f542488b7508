"""A message to one of the services that apprise knows (chats, phones, pagers), one URL of apprise for each channel.

Apprise runs in a process of its own, this module as a program. It can be ended when a service hangs, and its log is read: there
it says why something was not delivered, with addresses that are hidden here.

The process reads one request as JSON (``url``, ``title``, ``body``, ``type``: info, success, warning or failure) and prints one
answer: ``known`` (whether apprise has a service for the URL), ``delivered``, ``log`` (what apprise said beyond INFO).
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_mlhpc.alert.channels.base import (
    AlertMessage,
    Channel,
    DeliveryError,
    IncidentState,
    check_limits,
    cut,
    plain,
    quoted,
    secrets_of,
)
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.processes import run_to_end

_CHILD = "pytest_mlhpc.alert.channels.apprise"
#: Of a message's text, in characters; apprise cuts or splits it further as each service needs.
_MOST_TEXT = 32_000
#: Which of apprise's four kinds of notification a state is.
_TYPES = {IncidentState.RESOLVED: "success", IncidentState.CONTINUING: "warning"}


@dataclass(frozen=True)
class Settings:
    """One URL as apprise's documentation gives it for the service: ``mmost://...``, ``slack://...``, ``matrixs://...``."""

    url: str = field(repr=False)
    limit_s: float = 60.0

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        object.__setattr__(self, "url", self.url.strip())
        scheme, found, rest = self.url.partition("://")
        if not found or not rest or not scheme.isalnum() or not self.url.isprintable():
            raise ValueError("url must be a URL of apprise, such as mmost://HOST/TOKEN")
        check_limits(self.limit_s, "")


def open_channels(name: str, settings: Settings) -> Sequence[Channel]:
    """Return the channel.

    Raises:
        UsageError: Apprise is not installed.
    """
    if importlib.util.find_spec("apprise") is None:
        raise UsageError(f"alerts: channel {name} needs apprise: pip install 'pytest-mlhpc[notify]'")
    return (Apprise(name, settings),)


class Apprise:
    """One service behind one URL."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  #: of the channel in alerts.yaml
        self._settings = settings

    def send(self, message: AlertMessage) -> None:
        """Hand *message* to apprise.

        Raises:
            ChannelError: Apprise does not know the URL, or could not deliver.
        """
        request = {
            "url": self._settings.url,
            "title": plain(message.title),
            "body": plain(cut(message.text.removeprefix(message.title).lstrip(), _MOST_TEXT)),
            "type": _TYPES.get(message.state, "failure"),
        }
        answer = self._run(json.dumps(request).encode())
        if answer.get("delivered") is True:
            return
        known = answer.get("known") is True
        complaint = self._hide(str(answer.get("log", "")))
        text = complaint or ("not delivered" if known else "apprise knows no service for this url")
        raise self._error(text, retry=True)

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Do nothing: a chat keeps its messages."""

    def _run(self, request: bytes) -> dict[str, Any]:
        argv = [sys.executable, "-P", "-m", _CHILD]  # -P: a folder's own apprise.py is not what we mean
        try:
            done = run_to_end(argv, self._settings.limit_s, given=request)
        except subprocess.TimeoutExpired:
            raise self._error(f"not delivered within {self._settings.limit_s:g} s", retry=True) from None
        try:
            found: dict[str, Any] = read_json(done.stdout)
        except ValueError:
            complaint = self._hide(done.stderr[-500:]) or f"exit code {done.returncode}"
            raise self._error(f"apprise failed: {complaint}", retry=True) from None
        return found

    def _hide(self, text: bytes | str) -> str:
        return quoted(text, (self._settings.url, *secrets_of(self._settings.url)))

    def _error(self, text: str, *, retry: bool) -> DeliveryError:
        scheme = self._settings.url.partition("://")[0]
        return DeliveryError(f"{self.name}: {scheme}://: {text}", retry=retry)


def main() -> int:
    """Answer one request."""
    request = json.load(sys.stdin.buffer)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setLevel(logging.WARNING)
    logging.getLogger("apprise").addHandler(handler)
    answer = _notify(request)
    json.dump({**answer, "log": log.getvalue()}, sys.stdout)
    return 0


def _notify(request: dict[str, Any]) -> dict[str, bool]:
    import apprise

    # In memory: what services want to remember between messages may hold secrets, and belongs to no account of ours.
    asset = apprise.AppriseAsset(
        app_id="pytest-mlhpc", app_desc="pytest-mlhpc", storage_mode=apprise.PersistentStoreMode.MEMORY
    )
    services = apprise.Apprise(asset=asset)
    if not services.add(request["url"]):
        return {"known": False, "delivered": False}
    delivered = services.notify(
        title=request["title"],
        body=request["body"],
        notify_type=apprise.NotifyType(request["type"]),
        body_format=apprise.NotifyFormat.TEXT,
    )
    return {"known": True, "delivered": bool(delivered)}


if __name__ == "__main__":
    sys.exit(main())
