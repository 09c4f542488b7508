"""Debian's packages and sources, fetched by apt (which checks signatures) and unpacked into folders of ours.

Nothing is installed, and apt's own lists stay as they are: these are other ones, of the release whose packages fit each other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from testcluster import roots
from testcluster.errors import UnfitMachineError

from testkubernetes import parts

RELEASE = "bookworm"
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
#: Longest wait for one call of apt, in seconds.
_LIMIT_S = 900.0


def unpack(making: Path, names: Sequence[str]) -> None:
    """Fetch packages and unpack all into one folder.

    Raises:
        UnfitMachineError: There are none to be had.
    """
    making.mkdir()
    fetched = making.with_name(f"{making.name}.fetched")
    shutil.rmtree(fetched, ignore_errors=True)
    fetched.mkdir()
    fetch(fetched, ["download", *names])
    for archive in sorted(fetched.glob("*.deb")):
        parts.run(["dpkg-deb", "--extract", str(archive), str(making)], limit_s=900)
    shutil.rmtree(fetched)


def fetch(folder: Path, words: Sequence[str]) -> None:
    """Run ``apt-get WORDS`` in a folder, with lists of its own that are made there.

    Raises:
        UnfitMachineError: It fails.
    """
    state = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial", "parts"):
        (state / name).mkdir(parents=True, exist_ok=True)
    if not _KEYRING.exists():
        raise UnfitMachineError(f"there is no {_KEYRING}; this works on Debian")
    sources = state / "parts/own.sources"
    sources.write_text(
        f"Types: deb deb-src\nURIs: {roots.own_mirror()}\nSuites: {RELEASE}\nComponents: main\nSigned-By: {_KEYRING}\n",
        encoding="utf-8",
    )
    apt = [
        "apt-get", "-qq", "-o", "Dir::Etc::sourcelist=/dev/null", "-o", f"Dir::Etc::sourceparts={state}/parts",
        "-o", f"Dir::State::lists={state}/lists", "-o", f"Dir::Cache={state}/cache",
        "-o", "APT::Sandbox::User=", "-o", "Acquire::Retries=3",
    ]  # fmt: skip
    parts.run([*apt, "update"], limit_s=_LIMIT_S)
    parts.run([*apt, *words], limit_s=_LIMIT_S, cwd=folder)
    shutil.rmtree(state)
