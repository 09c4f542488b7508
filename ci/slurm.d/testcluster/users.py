"""Who uses a cluster: one that was started ``--for`` processes goes down with the last of them, however they die."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Protocol

from testcluster import processes
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError

#: Between two looks at the users of a cluster, in seconds.
_LOOK_EVERY_S = 0.5
#: Stands for "until somebody says `down`".
_FOR_GOOD = "kept"


class Cluster(Protocol):
    """What has users."""

    directory: Path
    daemons: Daemons

    def down(self, *, purge: bool = False) -> None:
        """End it; with ``purge`` remove its directory."""


def add(cluster: Cluster, pid: int | None) -> None:
    """Note a user, or, for None, that the cluster is to stay.

    Raises:
        ClusterError: There is no such process.
    """
    folder = cluster.directory / "users"
    folder.mkdir(exist_ok=True)
    if pid is None:
        (folder / _FOR_GOOD).touch()
        return
    process = processes.identify(pid)
    if process is None:
        raise ClusterError(f"--for {pid}: there is no such process")
    (folder / str(pid)).write_text(f"{process}\n", encoding="ascii")


def remove(cluster: Cluster, pid: int | None) -> None:
    """Forget a user, or, for None, all of them."""
    for entry in _entries(cluster):
        if pid is None or entry.name == str(pid):
            entry.unlink(missing_ok=True)


def living(cluster: Cluster) -> bool:
    """Return whether somebody still uses the cluster."""
    return any(entry.name == _FOR_GOOD or processes.alive(_read(entry)) for entry in _entries(cluster))


def watch(cluster: Cluster) -> None:
    """Start the process that looks after the users, unless it runs or the cluster is to stay."""
    if (cluster.directory / "users" / _FOR_GOOD).exists():
        stop_watching(cluster)
        return
    command = Path(sys.argv[0]).resolve()  # this or another script of ci/ that has the command `watch`
    cluster.daemons.start(
        "watcher",
        [sys.executable, str(command), "watch", "--directory", str(cluster.directory)],
        outside=True,
    )


def stop_watching(cluster: Cluster) -> None:
    """End that process."""
    cluster.daemons.end("watcher", patience_s=0)


def keep_watch(cluster: Cluster) -> None:
    """Wait until nobody uses the cluster, then take it down and remove its directory."""
    while True:
        while living(cluster):
            time.sleep(_LOOK_EVERY_S)
        if not cluster.directory.exists():
            return
        with cluster.daemons.locked():
            if living(cluster):  # somebody came while we waited for the lock
                continue
            mine = cluster.daemons.recorded("watcher")
            if mine is None or mine.pid == os.getpid():
                cluster.down(purge=True)
            return


def _entries(cluster: Cluster) -> list[Path]:
    folder = cluster.directory / "users"
    return list(folder.iterdir()) if folder.is_dir() else []


def _read(entry: Path) -> processes.Process | None:
    try:
        return processes.parse(entry.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None
