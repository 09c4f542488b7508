"""The wheels of an image, fetched on this machine as its pip is configured: no address enters the build."""

from __future__ import annotations

import sys
from pathlib import Path

from testimage.podman import step


def fetch(source: Path, folder: Path, python: str) -> None:
    """Fetch what the image installs, and what builds this package; what is in the folder already is not fetched again.

    Args:
        source: The checkout.
        folder: Where to.
        python: Version of the image's Python, like ``3.11``.

    Raises:
        ClusterError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    step(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--only-binary=:all:",
            "--python-version",
            python,
            "--constraint",
            str(source / "constraints.txt"),
            "--dest",
            str(folder),
            f"{source}[torch,kubernetes]",
            "hatchling",
        ]
    )
