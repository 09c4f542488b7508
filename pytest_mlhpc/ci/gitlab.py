"""GitLab: comments of merge requests, one for each system, and merge requests that propose accepted values."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.alert.channels.base import Peer, check_url, json_of, secret, send_json
from pytest_mlhpc.ci.comparison import CommitComparison, marker, render
from pytest_mlhpc.errors import MlhpcError, StoreError, UsageError
from pytest_mlhpc.judge import baseline_files
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json, to_json
from pytest_mlhpc.store.locations import open_regular, replace_file
from pytest_mlhpc.store.text import from_to, one_line, quantity

#: A file of more is none of ours; GitLab itself takes comments of a million characters.
_MOST_BYTES = 4_000_000
_MOST_TEXT = 500_000
_PAGE, _MOST_PAGES = 100, 50
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")


def write(folder: Path, comparisons: Iterable[CommitComparison]) -> list[Path]:
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


def read(folder: Path) -> list[CommitComparison]:
    """Return what :func:`write` wrote to *folder*; nothing where there is none.

    Raises:
        StoreError: A file is damaged, or not ours; names it.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            with open_regular(path) as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise SchemaError(f"longer than {_MOST_BYTES:,} bytes")
            found.append(from_json(CommitComparison, read_json(data)))
        except (OSError, ValueError, RecursionError) as error:
            raise StoreError(f"{path}: {error}") from error
    return found


@dataclass(frozen=True)
class NotesPlace:
    """Where comments go: the API of a GitLab, a project, and of a pipeline of a merge request its number and commit."""

    api: str
    project: str
    token: str = field(repr=False)
    request: str = ""
    commit: str = ""


def place_of(environ: Mapping[str, str]) -> NotesPlace:
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
    return NotesPlace(api, environ["CI_PROJECT_ID"], token, request, environ.get("CI_COMMIT_SHA", ""))


class MergeRequestNotes:
    """The comments of one project's merge requests."""

    def __init__(self, place: NotesPlace, *, limit_s: float = 20.0) -> None:
        self._place = place
        self._peer = Peer(
            "GitLab", place.api, {"PRIVATE-TOKEN": place.token}, (place.token,), limit_s=limit_s
        )
        self._project = f"{place.api}/projects/{urllib.parse.quote(place.project, safe='')}"
        self._me: Any = None

    def post(self, comparison: CommitComparison) -> list[str]:
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


#: Of one call of git, the network included, in seconds.
_LIMIT_S = 120.0
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}\Z")
#: Pushes that are begun while others write to the same branch.
_MOST_PUSHES = 3
#: How git ends that writes to a receiver that has ended: by the signal, or as its own thread reports it.
_BROKEN_PIPE = (-signal.SIGPIPE, 128 + signal.SIGPIPE)
#: Values that are named in a message.
_MOST = 200


class GitError(MlhpcError):
    """Git could not do it; the text has its own message, and no token."""


@dataclass(frozen=True)
class Proposal:
    """What to propose, and to whom. An empty *remote* is ``origin``."""

    root: Path
    folder: Path  #: that of the baseline files, below *root*
    branch: str
    reason: str
    target: str = "main"
    remote: str = ""
    token: str = ""


def propose(proposal: Proposal) -> str:
    """Commit what differs in the baseline files, push it, and return the commit; an empty text where nothing differs.

    A branch appears on the server whole or not at all. What a killed call may leave are unnamed objects, which git collects, and
    a folder ``mlhpc-index-*`` among the temporary ones.

    Raises:
        UsageError: The branch has no name that git takes, or this is no checkout.
        GitError: Git or the server refused.
        ConfigError: A baseline file is damaged.
    """
    if not _BRANCH.match(proposal.branch) or ".." in proposal.branch:
        raise UsageError(f"--branch {proposal.branch!r} is no name of a branch")
    folder = str(proposal.folder)
    with tempfile.TemporaryDirectory(prefix="mlhpc-index-") as scratch:
        git = _Git(proposal.root, {"GIT_INDEX_FILE": str(Path(scratch) / "index")}, proposal.token)
        git("read-tree", "HEAD")
        git("add", "--all", "--", f":(glob){folder}/*.yaml")
        changed = git("diff", "--cached", "--name-only", "-z", "HEAD", "--", folder).split("\0")[:-1]
        if not changed:
            return ""
        tree = git("write-tree").strip()
        message = _message(proposal, {name: _before(git, name) for name in changed})
        made = git("show", "--no-patch", "--format=%cI", "HEAD").strip()
        dates = {"GIT_AUTHOR_DATE": made, "GIT_COMMITTER_DATE": made}
        commit = git("commit-tree", tree, "-p", "HEAD", "-F", "-", given=message, more=dates).strip()
        _push(git, proposal, commit)
    return commit


def _push(git: _Git, proposal: Proposal, commit: str) -> None:
    """Push *commit*, unless the branch is there with it.

    Git must be given nothing that it does not send, be it there already or refused by git itself: with push options it then writes
    to a receiver that may have ended, and SIGPIPE ends it without a message (measured: 1 push of 100 with git 2.39). So the branch is
    looked up first, and again where git was ended so: somebody else pushed in between.
    """
    remote, name = proposal.remote or "origin", f"refs/heads/{proposal.branch}"
    options = (
        "merge_request.create",
        f"merge_request.target={proposal.target}",
        "merge_request.remove_source_branch",
    )
    arguments = ["push", *(word for option in options for word in ("-o", option)), remote, f"{commit}:{name}"]
    for _ in range(_MOST_PUSHES):
        there = _branch_head(git, remote, name)
        if there == commit:
            return
        if there and git.answer("merge-base", "--is-ancestor", there, commit).returncode != 0:
            raise GitError(
                f"git push: {proposal.branch} is at {there[:12]} on {remote}, and the new values do not follow it: "
                "choose another --branch, or delete that one"
            )
        done = git.answer(*arguments)
        if done.returncode not in _BROKEN_PIPE:
            git.check("push", done)
            return
    raise GitError(f"git push: {remote} hung up {_MOST_PUSHES} times; try again later")


def _branch_head(git: _Git, remote: str, name: str) -> str:
    """Return the commit of a branch on the server; empty if there is none, or it may not be read, which is left to the push to say."""
    found = git.answer("ls-remote", remote, name).stdout.decode(errors="replace").splitlines()
    return next((line.partition("\t")[0] for line in found if line.partition("\t")[2] == name), "")


def _message(proposal: Proposal, before: Mapping[str, bytes]) -> str:
    systems = sorted(Path(name).stem for name in before)
    lines = [f"Accept new values on {', '.join(systems)}", "", proposal.reason.strip(), ""]
    changes = [line for name, data in sorted(before.items()) for line in _changes(proposal.root / name, data)]
    lines += changes[:_MOST]
    if len(changes) > _MOST:
        lines.append(f"and {len(changes) - _MOST} more")
    # GitLab makes a description of it, in which a line that begins with a slash is a command.
    text = "\n".join(lines)
    return "".join(f" {line}\n" if line.startswith("/") else f"{line}\n" for line in text.splitlines())


def _changes(path: Path, data: bytes) -> Sequence[str]:
    """Return a line for each value of a baseline file that is new, another, or gone."""
    old = baseline_files.parse(data, f"{path.name} before", path.stem) if data else None
    new = baseline_files.read(path, path.stem)
    olds, news = (dict(one.entries) if one else {} for one in (old, new))
    lines = []
    for key in sorted({*olds, *news}, key=str):
        was, now = olds.get(key), news.get(key)
        if was == now:
            continue
        name = f"{one_line(key.benchmark)} {key.metric} ({key.partition})"
        if now is None:
            lines.append(f"- {name}: removed")
        elif was is None:
            lines.append(f"- {name}: {quantity(now.value, now.unit)}, new")
        else:
            better = -drop(now.value, was.value, now.better)
            lines.append(f"- {name}: {from_to(was.value, now.value, now.unit, ' to ')}, {better:+.1%} better")
    return lines


def _before(git: _Git, name: str) -> bytes:
    found = git.answer("cat-file", "blob", f"HEAD:{name}")
    return found.stdout if found.returncode == 0 else b""  # a new file


class _Git:
    """Git in one checkout. The token travels in the environment, never in an address or an argument that others can see."""

    def __init__(self, root: Path, variables: Mapping[str, str], token: str) -> None:
        self._root = root
        self._token = token
        settings = {
            "credential.helper": "",
            "user.name": "pytest-mlhpc",
            "user.email": "pytest-mlhpc@localhost",
            "commit.gpgSign": "false",
        }
        if token:
            basic = base64.b64encode(f"oauth2:{token}".encode()).decode()
            settings["http.extraHeader"] = f"Authorization: Basic {basic}"
        configured = {"GIT_CONFIG_COUNT": str(len(settings))}
        for at, (key, value) in enumerate(settings.items()):
            configured |= {f"GIT_CONFIG_KEY_{at}": key, f"GIT_CONFIG_VALUE_{at}": value}
        self._environment = {**os.environ, **configured, **variables, "GIT_TERMINAL_PROMPT": "0"}

    def __call__(self, *arguments: str, given: str = "", more: Mapping[str, str] | None = None) -> str:
        """Return what git prints. *more* are variables for this call.

        Raises:
            GitError: It refused.
        """
        done = self.answer(*arguments, given=given, more=more)
        self.check(arguments[0], done)
        return done.stdout.decode(errors="surrogateescape")

    def check(self, verb: str, done: subprocess.CompletedProcess[bytes]) -> None:
        """Raise a GitError where a call of git failed."""
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-2000:]
            ended = (
                f"ended by signal {-done.returncode}"
                if done.returncode < 0
                else f"exit code {done.returncode}"
            )
            raise GitError(f"git {verb}: {self._hidden(said) or ended}")

    def answer(
        self, *arguments: str, given: str = "", more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Return what became of one call.

        Raises:
            GitError: There is no git, or it did not end.
        """
        try:
            return subprocess.run(
                ["git", "-C", str(self._root), *arguments], input=given.encode(),
                env={**self._environment, **(more or {})},
                capture_output=True, timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise GitError(f"git {arguments[0]}: no end within {_LIMIT_S:g} s") from None
        except OSError as error:
            raise GitError(f"git: {error.strerror}") from error

    def _hidden(self, text: str) -> str:
        text = re.sub(r"(https?://)[^/@\s]*@", r"\1", text)
        return text.replace(self._token, "***") if self._token else text
