"""What a session is about: its purpose, and the commit under test."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PURPOSES = ("nightly", "change", "manual")


@dataclass(frozen=True)
class Provenance:
    """``commit`` and ``branch`` are empty outside a repository."""

    purpose: str = "manual"
    branch: str = ""
    commit: str = ""
    default_branch: str = "main"


def provenance_of(root: Path, environ: Mapping[str, str] = os.environ) -> Provenance:
    """Return it from ``$MLHPC_PURPOSE``, GitLab's predefined variables, else from git itself."""
    source = environ.get("CI_PIPELINE_SOURCE", "")
    purpose = "nightly" if source == "schedule" else "change" if source else "manual"
    if (given := environ.get("MLHPC_PURPOSE", "")) in PURPOSES:
        purpose = given
    commit = environ.get("CI_COMMIT_SHA") or _git(root, "rev-parse", "HEAD")
    branch = environ.get("CI_COMMIT_BRANCH") or _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    default = environ.get("CI_DEFAULT_BRANCH") or _git(root, "rev-parse", "--abbrev-ref", "origin/HEAD")
    return Provenance(purpose, branch, commit, default.removeprefix("origin/") or "main")


def user_name() -> str:
    """Return who is accepting; in a container the user may have a number but no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _git(root: Path, *arguments: str) -> str:
    try:
        result = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # git is not there, or its file system hangs: a record without commit is still a record
    return result.stdout.strip() if result.returncode == 0 else ""
