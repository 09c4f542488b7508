"""A login node without a network: the real program of ``node/login_node.py``, started by a script that stands for ssh."""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Does what ssh(1) does with the last word: a shell reads it. What it is asked of itself (-G, -O) it leaves.
SSH = """\
#!/bin/sh
case " $* " in *" -G "*|*" -O "*) exit 0;; esac
echo run >> {folder}/connections
for last; do :; done
{words}
"""
#: The usual words: what the shell of the login node does.
RUN = 'exec sh -c "$last"'


def write_ssh(folder: Path, words: str = RUN) -> dict[str, str]:
    """Write such an `ssh`, and return the environment in which it is found."""
    folder.mkdir(exist_ok=True)
    path = folder / "ssh"
    path.write_text(SSH.format(folder=folder, words=words), encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def connections(folder: Path) -> int:
    """Return how many connections were made."""
    try:
        return len((folder / "connections").read_text(encoding="utf-8").splitlines())
    except FileNotFoundError:
        return 0
