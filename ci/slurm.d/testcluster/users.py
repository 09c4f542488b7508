"""Who uses a cluster: one that was started ``--for`` processes goes down with the last of them, however they die."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Protocol

from testcluster import processes
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError

#: Between two looks at the users of a cluster, in seconds.
_LOOK_EVERY_S = 0.5
#: Stands for "until somebody says `down`".
_FOR_GOOD = "kept"
#: Variable with the pid of a process that no cluster outlives, also one that is to stay: tests name their pytest.
ENDS_WITH = "MLHPC_CLUSTER_ENDS_WITH"


class Cluster(Protocol):
    """What has users."""

    directory: Path
    daemons: Daemons

    def down(self, *, purge: bool = False) -> None:
        """End it; ``purge``: its directory is removed next, so that nothing need be saved."""


def add(cluster: Cluster, pid: int | None) -> None:
    """Note a user, or, for None, that the cluster is to stay.

    Raises:
        ClusterError: There is no such process.
    """
    folder = cluster.directory / "users"
    folder.mkdir(exist_ok=True)
    bound = os.environ.get(ENDS_WITH, "")
    if bound:
        _write(_bound_file(cluster), int(bound), ENDS_WITH)
    if pid is not None:
        _write(folder / str(pid), pid, "--for")
        return
    (folder / _FOR_GOOD).touch()
    if not bound:
        _bound_file(cluster).unlink(missing_ok=True)


def remove(cluster: Cluster, pid: int | None) -> None:
    """Forget a user, or, for None, all of them."""
    for entry in _entries(cluster):
        if pid is None or entry.name == str(pid):
            entry.unlink(missing_ok=True)


def living(cluster: Cluster) -> bool:
    """Return whether somebody still uses the cluster, and the process that it must not outlive is there."""
    bound = _bound_file(cluster)
    if bound.exists() and not processes.alive(_read(bound)):
        return False
    return any(entry.name == _FOR_GOOD or processes.alive(_read(entry)) for entry in _entries(cluster))


def watch(cluster: Cluster) -> None:
    """Start the process that looks after the users, unless it runs or the cluster is to stay."""
    if (cluster.directory / "users" / _FOR_GOOD).exists() and not _bound_file(cluster).exists():
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


def leave(cluster: Cluster, pid: int | None, *, purge: bool) -> None:
    """Forget a user, or, for None, all of them; take the cluster down with the last one.

    The watcher ends after everything else: if this process fails or is killed in here, the watcher does the rest.

    Raises:
        ClusterError: Something lives on.
    """
    if not cluster.directory.exists():
        return
    with cluster.daemons.locked():
        remove(cluster, pid)
        if pid is None or not living(cluster):
            cluster.down(purge=purge)
            stop_watching(cluster)
            if purge:
                shutil.rmtree(cluster.directory, ignore_errors=True)


def keep_watch(cluster: Cluster) -> None:
    """Wait until nobody uses the cluster, then take it down and remove its directory; try again until that is done."""
    while True:
        try:
            while living(cluster):
                time.sleep(_LOOK_EVERY_S)
            if _take_down(cluster):
                return
        except Exception:  # noqa: BLE001 - nobody but this process looks after the cluster
            traceback.print_exc()
        time.sleep(_LOOK_EVERY_S)


def _take_down(cluster: Cluster) -> bool:
    """Take a cluster down that nobody uses; return whether there is nothing more to watch."""
    if not cluster.directory.exists():  # somebody has removed it: its processes are found by their mark
        cluster.down(purge=True)
        return True
    with cluster.daemons.locked():
        if living(cluster):  # somebody came while we waited for the lock
            return False
        mine = cluster.daemons.recorded("watcher")
        if mine is None or mine.pid == os.getpid():
            cluster.down(purge=True)
            shutil.rmtree(cluster.directory, ignore_errors=True)
        return True


def _bound_file(cluster: Cluster) -> Path:
    return cluster.directory / "ends-with"


def _write(path: Path, pid: int, option: str) -> None:
    process = processes.identify(pid)
    if process is None:
        raise ClusterError(f"{option} {pid}: there is no such process")
    path.write_text(f"{process}\n", encoding="ascii")


def _entries(cluster: Cluster) -> list[Path]:
    folder = cluster.directory / "users"
    return list(folder.iterdir()) if folder.is_dir() else []


def _read(entry: Path) -> processes.Process | None:
    try:
        return processes.parse(entry.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None
