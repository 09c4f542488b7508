"""Comments of merge requests on GitLab: one for each system, written over when there is a newer comparison."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.alert.channels.http import Peer, check_url, json_of, send_json
from pytest_mlhpc.alert.channels.texts import secret
from pytest_mlhpc.ci.comparison import Comparison
from pytest_mlhpc.ci.markdown import marker, render
from pytest_mlhpc.errors import StoreError, UsageError
from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json, to_json
from pytest_mlhpc.store.files import replace_file

#: A file of more is none of ours; GitLab itself takes comments of a million characters.
_MOST_BYTES = 4_000_000
_MOST_TEXT = 500_000
_PAGE, _MOST_PAGES = 100, 50
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")


def write(folder: Path, comparisons: Iterable[Comparison]) -> list[Path]:
    """Write one file for each comparison and return their paths.

    Raises:
        OSError: The folder cannot be made.
        StoreError: One cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in comparisons:
        name = re.sub("[^A-Za-z0-9._-]", "_", f"{one.system}.{one.commit[:40] or 'no-commit'}")
        path = folder / f"{name}.json"
        replace_file(path, json.dumps(to_json(one), indent=1) + "\n")
        written.append(path)
    return written


def read(folder: Path) -> list[Comparison]:
    """Return what :func:`write` wrote to *folder*; nothing where there is none.

    Raises:
        StoreError: A file is damaged, or not ours; names it.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise SchemaError(f"longer than {_MOST_BYTES:,} bytes")
            found.append(from_json(Comparison, read_json(data)))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{path}: {error}") from error
    return found


@dataclass(frozen=True)
class Place:
    """Where comments go: the API of a GitLab, a project, and of a pipeline of a merge request its number and commit."""

    api: str
    project: str
    token: str = field(repr=False)
    request: str = ""
    commit: str = ""


def place_of(environ: Mapping[str, str]) -> Place:
    """Return it from GitLab's variables and ``MLHPC_GITLAB_TOKEN``.

    Raises:
        UsageError: One is missing; the text shows no token.
    """
    missing = [
        name for name in ("CI_API_V4_URL", "CI_PROJECT_ID", "MLHPC_GITLAB_TOKEN") if not environ.get(name)
    ]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} is not set; comments are posted in jobs of GitLab, with a project access token"
        )
    try:
        api = check_url(environ["CI_API_V4_URL"]).rstrip("/")
        token = secret(environ["MLHPC_GITLAB_TOKEN"], "MLHPC_GITLAB_TOKEN")
    except ValueError as error:
        raise UsageError(str(error)) from None
    request = environ.get("CI_MERGE_REQUEST_IID", "")
    return Place(api, environ["CI_PROJECT_ID"], token, request, environ.get("CI_COMMIT_SHA", ""))


class Notes:
    """The comments of one project's merge requests."""

    def __init__(self, place: Place, *, limit_s: float = 20.0) -> None:
        self._place = place
        self._peer = Peer(
            "GitLab", place.api, {"PRIVATE-TOKEN": place.token}, (place.token,), limit_s=limit_s
        )
        self._project = f"{place.api}/projects/{urllib.parse.quote(place.project, safe='')}"
        self._me: Any = None

    def post(self, comparison: Comparison) -> list[str]:
        """Write or replace the comment of each open merge request of the comparison's commit; return their numbers.

        Raises:
            ChannelError: Something was not done; doing it again goes on where it ended.
        """
        requests = self._requests(comparison.commit)
        for request in requests:
            self._put(request, comparison.system, render(comparison)[:_MOST_TEXT])
        return requests

    def _requests(self, commit: str) -> list[str]:
        if self._place.request:
            # The files were made by the merge request's own code: it may speak of itself and of no other.
            return [self._place.request] if commit in {"", self._place.commit} else []
        if not _COMMIT.match(commit):
            return []
        found = self._ask(
            "GET", f"{self._project}/repository/commits/{commit}/merge_requests?per_page={_PAGE}"
        )
        return [
            str(int(one["iid"])) for one in found if isinstance(one, dict) and one.get("state") == "opened"
        ]

    def _put(self, request: str, system: str, text: str) -> None:
        notes = f"{self._project}/merge_requests/{int(request)}/notes"
        earlier = next((note for note in self._ours(notes) if marker(system) in str(note.get("body"))), None)
        if earlier is None:
            self._ask("POST", notes, {"body": text})
        elif earlier.get("body") != text:
            self._ask("PUT", f"{notes}/{int(earlier['id'])}", {"body": text})

    def _ours(self, notes: str) -> Iterator[dict[str, Any]]:
        """Yield the token's own comments: those of others cannot be written over, whatever they hold."""
        if self._me is None:
            self._me = self._ask("GET", f"{self._place.api}/user").get("id")
        for page in range(1, _MOST_PAGES + 1):
            found = self._ask("GET", f"{notes}?per_page={_PAGE}&page={page}&sort=desc&order_by=created_at")
            yield from (one for one in found if (one.get("author") or {}).get("id") == self._me)
            if len(found) < _PAGE:
                return

    def _ask(self, method: str, url: str, content: Any = None) -> Any:
        found = json_of(self._peer, send_json(self._peer, method, url, content))
        expected = list if method == "GET" and not url.endswith("/user") else dict
        if not isinstance(found, expected) or (
            expected is list and not all(isinstance(one, dict) for one in found)
        ):
            raise self._peer.error(
                "answered with something that is not GitLab's; is CI_API_V4_URL right?", retry=False
            )
        return found
