"""New accepted values as a merge request: a commit on top of this one, pushed to a branch of its own.

Made with git's plumbing, so that neither branch, index nor files of the checkout change. The commit is the same whenever it
is made of the same (its dates are those of the commit below it): who was killed in the middle, or lost the answer to a push, does
it again, and finds it done or does it now. GitLab makes the merge request
itself, told by push options (https://docs.gitlab.com/topics/git/commit/#push-options-for-merge-requests); its description is the
commit's message.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError, UsageError
from pytest_mlhpc.judge import baseline_files
from pytest_mlhpc.judge.fence import drop
from pytest_mlhpc.store.text import one_line

#: Of one call of git, the network included, in seconds.
_LIMIT_S = 120.0
_BRANCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,200}\Z")
#: Values that are named in a message.
_MOST = 200


class GitError(MlhpcError):
    """Git could not do it; the text has its own words, and no token."""


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
        if _has(git, proposal, commit):
            return commit
        options = (
            "merge_request.create",
            f"merge_request.target={proposal.target}",
            "merge_request.remove_source_branch",
        )
        git(
            "push",
            *(word for option in options for word in ("-o", option)),
            proposal.remote or "origin",
            f"{commit}:refs/heads/{proposal.branch}",
        )
    return commit


def _has(git: _Git, proposal: Proposal, commit: str) -> bool:
    """Return whether the branch is there with this commit. Whether it may be read at all is left to the push to say.

    Git must not push what is there: with push options it then writes to a receiver that may have ended, and SIGPIPE ends it
    without a word (seen in 1 push of 100 with git 2.39).
    """
    name = f"refs/heads/{proposal.branch}"
    found = git.answer("ls-remote", proposal.remote or "origin", name)
    return f"{commit}\t{name}" in found.stdout.decode(errors="replace").splitlines()


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
            lines.append(f"- {name}: {now.value:.5g} {now.unit}, new")
        else:
            better = -drop(now.value, was.value, now.better)
            lines.append(f"- {name}: {was.value:.5g} to {now.value:.5g} {now.unit}, {better:+.1%} better")
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

    def __call__(self, *words: str, given: str = "", more: Mapping[str, str] | None = None) -> str:
        """Return what git prints. *more* are variables for this call.

        Raises:
            GitError: It refused.
        """
        done = self.answer(*words, given=given, more=more)
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-2000:]
            ended = (
                f"ended by signal {-done.returncode}"
                if done.returncode < 0
                else f"exit code {done.returncode}"
            )
            raise GitError(f"git {words[0]}: {self._hidden(said) or ended}")
        return done.stdout.decode(errors="surrogateescape")

    def answer(
        self, *words: str, given: str = "", more: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        """Return what became of one call.

        Raises:
            GitError: There is no git, or it did not end.
        """
        try:
            return subprocess.run(
                ["git", "-C", str(self._root), *words], input=given.encode(),
                env={**self._environment, **(more or {})},
                capture_output=True, timeout=_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise GitError(f"git {words[0]}: no end within {_LIMIT_S:g} s") from None
        except OSError as error:
            raise GitError(f"git: {error.strerror}") from error

    def _hidden(self, text: str) -> str:
        text = re.sub(r"(https?://)[^/@\s]*@", r"\1", text)
        return text.replace(self._token, "***") if self._token else text
