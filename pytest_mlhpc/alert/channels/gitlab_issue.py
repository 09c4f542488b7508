"""An issue of GitLab for each incident: opened with it, commented on at each change, closed when it is resolved.

Which issue belongs to an incident, and which messages stand there already, is read from GitLab each time, by marks in the
descriptions and comments that readers do not see. They are found in lists: GitLab's own search drops what resembles a tag
and lags behind. Only issues and comments of the token's own user count, so that nobody else can make a mark.

What people do wins: an issue that they closed is commented on, not opened again.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pytest_mlhpc.alert.channels.base import (
    AlertMessage,
    Channel,
    Peer,
    check_limits,
    check_url,
    cut,
    fenced,
    json_of,
    plain,
    secret,
    send_json,
)

#: Of a description or a comment, in characters; GitLab takes a million (its limit on descriptions and notes).
_MOST_TEXT = 500_000
#: Items of a page, GitLab's most, and pages that are read at most: 5,000 issues since an incident began.
_PAGE, _MOST_PAGES = 100, 50
#: By how much the clocks of GitLab and of this machine may differ, generously: it only bounds a list.
_CLOCKS = timedelta(days=1)


@dataclass(frozen=True)
class Settings:
    """Which project, with what token (scope ``api``, role Reporter or higher; a project access token is best)."""

    url: str = field(repr=False)  #: of GitLab, ``${CI_SERVER_URL}`` in its own pipelines
    project: str | int  #: number or path, ``${CI_PROJECT_PATH}`` in its own pipelines
    token: str = field(repr=False)
    labels: tuple[str, ...] = ("mlhpc",)
    confidential: bool = False
    ca_file: str = ""
    limit_s: float = 20.0

    def __post_init__(self) -> None:
        """Check what types cannot say."""
        url = check_url(self.url).rstrip("/").removesuffix("/api/v4")
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "token", secret(self.token, "token"))
        object.__setattr__(self, "project", str(self.project).strip().strip("/"))
        if not self.token:
            raise ValueError("token is empty")
        if not self.project:
            raise ValueError("project is empty")
        if any("," in label for label in self.labels):
            raise ValueError("labels: a label of GitLab cannot contain a comma")
        check_limits(self.limit_s, self.ca_file)


def open_channels(name: str, settings: Settings) -> Sequence[Channel]:
    """Return the channel."""
    return (GitLabIssues(name, settings),)


class GitLabIssues:
    """The issues of one project."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name  #: of the channel in alerts.yaml
        self._settings = settings
        headers = {"PRIVATE-TOKEN": settings.token}
        self._peer = Peer(name, settings.url, headers, (settings.token,), settings.ca_file, settings.limit_s)
        project = urllib.parse.quote(str(settings.project), safe="")
        self._issues = f"{settings.url}/api/v4/projects/{project}/issues"

    def send(self, message: AlertMessage) -> None:
        """Open, comment on or close the issue of *message*'s incident; what is done already is not done again.

        Raises:
            ChannelError: Something was not done; sending again goes on where it ended.
        """
        issue = self._find(message)
        if issue is None:
            if message.resolved:
                return  # nobody was notified of it here
            self._create(message)
            return
        if not self._is_posted(issue, message):
            self._ask("POST", f"{self._path(issue)}/notes", {"body": _body(message)})
        if message.resolved and issue.get("state") == "opened":
            self._ask("PUT", self._path(issue), {"state_event": "close"})

    def resend_open(self, messages: Sequence[AlertMessage]) -> None:
        """Do nothing: GitLab keeps its issues."""

    def _create(self, message: AlertMessage) -> None:
        content = {
            "title": plain(message.title),
            "description": f"{_body(message)}\n{_incident_mark(message)}",
            "labels": ",".join(self._settings.labels),
            "confidential": self._settings.confidential,
        }
        self._ask("POST", self._issues, content)

    def _find(self, message: AlertMessage) -> dict[str, Any] | None:
        since = datetime.fromtimestamp(message.started_ns // 1_000_000_000, UTC) - _CLOCKS
        query = {
            "scope": "created_by_me",
            "state": "all",
            "created_after": f"{since:%Y-%m-%dT%H:%M:%SZ}",
            "order_by": "created_at",
            "sort": "asc",
        }
        mark = _incident_mark(message)
        found = (issue for issue in self._list(self._issues, query) if _has(issue.get("description"), mark))
        return next(found, None)

    def _is_posted(self, issue: dict[str, Any], message: AlertMessage) -> bool:
        mark = _message_mark(message)
        if _has(issue.get("description"), mark):
            return True
        author = _author(issue)
        notes = self._list(f"{self._path(issue)}/notes", {"order_by": "created_at", "sort": "desc"})
        return any(_has(note.get("body"), mark) and _author(note) == author for note in notes)

    def _path(self, issue: dict[str, Any]) -> str:
        return f"{self._issues}/{int(issue['iid'])}"

    def _list(self, url: str, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield all items of a list.

        Raises:
            ChannelError: It cannot be read, or is no list, or has no end.
        """
        for page in range(1, _MOST_PAGES + 1):
            query_string = urllib.parse.urlencode({**query, "per_page": str(_PAGE), "page": str(page)})
            items = self._ask("GET", f"{url}?{query_string}")
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise self._peer.error("did not answer with a list, as GitLab does; check url", retry=True)
            yield from items
            if len(items) < _PAGE:
                return
        raise self._peer.error(f"lists more than {_PAGE * _MOST_PAGES} issues or comments", retry=False)

    def _ask(self, method: str, url: str, content: Any = None) -> Any:
        return json_of(self._peer, send_json(self._peer, method, url, content))


def _body(message: AlertMessage) -> str:
    # As a block of code: GitLab carries out lines like `/assign @somebody` that stand anywhere else, and notifies `@all`.
    text = fenced(_unmarked(plain(cut(message.text, _MOST_TEXT))))
    return f"{text}\n\n{_message_mark(message)}"


def _unmarked(text: str) -> str:
    """Return *text* without anything that could be taken for a mark."""
    return text.replace("<!--", "<! --")


def _incident_mark(message: AlertMessage) -> str:
    return f"<!-- mlhpc-incident {message.incident} -->"


def _message_mark(message: AlertMessage) -> str:
    return f"<!-- mlhpc-message {message.id} -->"


def _has(text: Any, mark: str) -> bool:
    return isinstance(text, str) and mark in (line.strip() for line in text.splitlines())


def _author(item: dict[str, Any]) -> Any:
    author = item.get("author")
    return author.get("id") if isinstance(author, dict) else None
