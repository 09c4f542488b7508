"""A small stand-in for GitLab's REST API v4: issues of one project and their notes. No real GitLab can run in these tests.

What it does is what GitLab's documentation and sources (lib/api/issues.rb, lib/api/notes.rb) say, as far as a client that opens,
comments on, lists and closes issues can see it: paging with ``per_page`` of at most 100, ``scope``, ``state``, ``created_after``,
``order_by``, ``sort``; ``PRIVATE-TOKEN``; its words for 400, 401, 403 and 404; numeric and quoted projects; a token's user as
author; system notes. Its ``search`` finds nothing in what looks like a tag, as PostgreSQL's full text search does. Quick actions
are carried out (``/close``) unless they stand in a block of code.
"""

import json
import re
import urllib.parse
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from http_sink import HttpSink, Reply, Request, json_reply

_MOST_TITLE = 255
_PROJECT = re.compile(r"/api/v4/projects/([^/]+)/issues(?:/(\d+)(/notes)?)?")


@dataclass
class GitLab:
    """One project. ``token`` is that of user ``me``; ``scopes`` are what it may do."""

    token: str = "glpat-secret"  # noqa: S105 - of this stand-in
    me: int = 7
    project: str = "hpc/bench"
    number: int = 42
    may_write: bool = True
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    issues: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def answer(self, request: Request) -> Reply:
        url = urllib.parse.urlsplit(request.path)
        found = _PROJECT.fullmatch(url.path)
        if (refusal := self._refusal(request, found)) is not None or found is None:
            return refusal or json_reply({"error": "404 Not Found"}, 404)
        query = dict(urllib.parse.parse_qsl(url.query))
        _project, iid, notes = found.groups()
        if iid is None:
            return self._list(query) if request.method == "GET" else self._create(request.json)
        issue = next((issue for issue in self.issues if issue["iid"] == int(iid)), None)
        if issue is None:
            return json_reply({"message": "404 Not found"}, 404)
        if notes:
            return self._notes(issue, request, query)
        return self._update(issue, request.json)

    def _refusal(self, request: Request, found: re.Match[str] | None) -> Reply | None:
        if request.headers.get("private-token") != self.token:
            return json_reply({"message": "401 Unauthorized"}, 401)
        if found and urllib.parse.unquote(found.group(1)) not in {self.project, str(self.number)}:
            return json_reply({"message": "404 Project Not Found"}, 404)
        if request.method != "GET" and not self.may_write:
            words = "The request requires higher privileges than provided by the access token."
            refused = {"error": "insufficient_scope", "error_description": words, "scope": "api"}
            return json_reply(refused, 403)
        return None

    def add_issue(self, title: str, description: str, author: int) -> dict[str, Any]:
        """Add an issue as a person, or the token's user, does."""
        iid = len(self.issues) + 1
        issue = {
            "id": 1000 + iid, "iid": iid, "title": title, "description": description, "state": "opened", "labels": [],
            "confidential": False, "author": {"id": author, "username": f"user{author}"},
            "created_at": f"{self.now:%Y-%m-%dT%H:%M:%S}.000Z",
            "web_url": f"https://gitlab.example.org/{self.project}/-/issues/{iid}",
        }  # fmt: skip
        self.issues.append(issue)
        self.notes[iid] = []
        self._act(issue, description)
        return issue

    def add_note(
        self, issue: dict[str, Any], body: str, author: int, *, system: bool = False
    ) -> dict[str, Any]:
        notes = self.notes[issue["iid"]]
        note = {"id": 5000 + len(notes), "body": body, "author": {"id": author}, "system": system}
        notes.append(note)
        return note

    def _create(self, content: dict[str, Any]) -> Reply:
        title = str(content.get("title") or "")
        if not title:
            return json_reply({"error": "title is missing"}, 400)
        if len(title) > _MOST_TITLE:
            return json_reply({"message": {"title": ["is too long (maximum is 255 characters)"]}}, 400)
        issue = self.add_issue(title, str(content.get("description") or ""), self.me)
        issue["labels"] = [label for label in str(content.get("labels") or "").split(",") if label]
        issue["confidential"] = bool(content.get("confidential"))
        return json_reply(issue, 201)

    def _list(self, query: dict[str, str]) -> Reply:
        found = list(self.issues)
        if query.get("scope", "all") in {"created_by_me", "created-by-me"}:
            found = [issue for issue in found if issue["author"]["id"] == self.me]
        if query.get("state", "all") != "all":
            found = [issue for issue in found if issue["state"] == query["state"]]
        if after := query.get("created_after"):
            # Both are ISO 8601 in UTC, so that their order is that of their text.
            found = [issue for issue in found if issue["created_at"] >= after]
        if words := query.get("search"):
            found = [issue for issue in found if words in _without_tags(issue["description"])]
        return _page(found, query)

    def _notes(self, issue: dict[str, Any], request: Request, query: dict[str, str]) -> Reply:
        if request.method == "GET":
            return _page(self.notes[issue["iid"]], query)
        body = str(request.json.get("body") or "")
        if not body:
            return json_reply({"error": "body is missing"}, 400)
        note = self.add_note(issue, body, self.me)
        self._act(issue, body)
        return json_reply(note, 201)

    def _update(self, issue: dict[str, Any], content: dict[str, Any]) -> Reply:
        event = content.get("state_event")
        if event not in {None, "close", "reopen"}:
            return json_reply({"error": "state_event does not have a valid value"}, 400)
        if event is not None:
            issue["state"] = "closed" if event == "close" else "opened"
            self.add_note(issue, issue["state"], self.me, system=True)
        return json_reply(issue)

    def _act(self, issue: dict[str, Any], text: str) -> None:
        outside = re.sub(r"(?ms)^(`{3,})[^`\n]*\n.*?^\1`*$", "", text)
        if re.search(r"(?m)^/close\s*$", outside):
            issue["state"] = "closed"


def _page(items: list[dict[str, Any]], query: dict[str, str]) -> Reply:
    size, page = min(int(query.get("per_page", "20")), 100), int(query.get("page", "1"))
    ordered = items if query.get("sort", "desc") == "asc" else items[::-1]
    part = ordered[(page - 1) * size : page * size]
    after = str(page + 1) if page * size < len(ordered) else ""
    return Reply(200, json.dumps(part).encode(), {"Content-Type": "application/json", "X-Next-Page": after})


def _without_tags(text: str) -> str:
    return re.sub(r"<[^>]*>", " ", text)


def gitlab_sink(gitlab: GitLab) -> HttpSink:
    """Return a server of it."""
    return HttpSink(gitlab.answer)
