"""What a session is about: its purpose, and the commit under test."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PURPOSES = ("nightly", "change", "manual")
#: Sources of pipelines of GitLab and events of GitHub; all others are changes.
_PURPOSE_OF = {
    "schedule": "nightly", "web": "manual", "api": "manual", "trigger": "manual", "workflow_dispatch": "manual",
}  # fmt: skip


@dataclass(frozen=True)
class Provenance:
    """``commit`` and ``branch`` are empty outside a repository; ``root`` is pytest's root directory."""

    purpose: str = "manual"
    branch: str = ""
    commit: str = ""
    default_branch: str = "main"
    root: str = ""


def provenance_of(root: Path, environ: Mapping[str, str] = os.environ) -> Provenance:
    """Return it from ``$MLHPC_PURPOSE``, the variables of GitLab CI or GitHub Actions, else from git itself.

    A pipeline that a person started is neither a night nor a change. A pipeline of a merge request is on no branch: the one that
    it merges is meant.
    """
    event = environ.get("CI_PIPELINE_SOURCE") or environ.get("GITHUB_EVENT_NAME", "")
    purpose = _PURPOSE_OF.get(event, "change" if event else "manual")
    if (given := environ.get("MLHPC_PURPOSE", "")) in PURPOSES:
        purpose = given
    commit = _first(environ, "CI_COMMIT_SHA", "GITHUB_SHA") or _git(root, "rev-parse", "HEAD")
    branch = _first(
        environ,
        "CI_COMMIT_BRANCH",
        "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME",
        "GITHUB_HEAD_REF",
        "GITHUB_REF_NAME",
    ) or _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    default = environ.get("CI_DEFAULT_BRANCH") or _git(root, "rev-parse", "--abbrev-ref", "origin/HEAD")
    return Provenance(purpose, branch, commit, default.removeprefix("origin/") or "main", str(root))


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def user_name() -> str:
    """Return who is accepting; in a container the user may have a number but no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _git(root: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # git is not there, or its file system hangs: a record without commit is still a record
    # A branch may be called by any bytes; what is no UTF-8 is written out, as records go to places that take nothing else.
    return result.stdout.decode("utf-8", "backslashreplace").strip() if result.returncode == 0 else ""
