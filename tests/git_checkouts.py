"""Real git checkouts for tests: made, changed and committed without the settings of whoever runs the tests."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SETTINGS = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


@dataclass(frozen=True)
class Checkout:
    """A checkout in *folder*, which may have files already."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> "Checkout":
        folder.mkdir(exist_ok=True)
        checkout = cls(folder)
        checkout.git("init", "-q", "-b", "main")
        return checkout

    def git(self, *words: str) -> str:
        """Run git here and return what it prints."""
        done = subprocess.run(
            ["git", "-C", str(self.folder), "-c", "protocol.file.allow=always", *words],
            env={**os.environ, **_SETTINGS}, check=True, capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def write(self, name: str, text: str, mode: int = 0o644) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
        return path

    def commit(self, tag: str = "") -> str:
        """Commit all that is there, and return the commit."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", tag or "change")
        if tag:
            self.git("tag", tag)
        return self.git("rev-parse", "HEAD")

    def worktrees(self) -> list[str]:
        """Return the worktrees that git knows of, beside the checkout itself."""
        lines = self.git("worktree", "list", "--porcelain").splitlines()
        return [line.removeprefix("worktree ") for line in lines if line.startswith("worktree ")][1:]
