"""One node: a slurmd, if possible with its own host name, process ids and mounts, so that it can die like a machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from testcluster import processes
from testcluster.configuration import NODES
from testcluster.daemons import Daemons
from testcluster.errors import ClusterError
from testcluster.processes import Process

_UNSHARE = (
    "unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--propagation", "private", "--mount-proc",
)  # fmt: skip
# The shell stays as process 1 of the node and collects its orphans. Paths come as arguments, never as text.
_BOOT = """
hostname "$1" &&
mount --bind "$2/etc/hosts" /etc/hosts &&
mount --bind "$2/pmix.$1" "$2/pmix" || exit 70
slurmd -D -N "$1" -f "$2/etc/slurm.conf"
exit $?
"""


def namespaces_work(daemons: Daemons) -> bool:
    """Return whether this machine lets us make nodes with namespaces; plain containers often do not."""
    probe = daemons.inside([*_UNSHARE, "sh", "-c", "hostname probe && mount --bind /etc/hosts /etc/hosts"])
    try:
        done = subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def daemon_of(node: str) -> str:
    """Return the daemon's name of a node.

    Raises:
        ClusterError: There is no such node.
    """
    if node not in NODES:
        raise ClusterError(f"no node {node!r}; there are {', '.join(NODES)}")
    return f"slurmd.{node}"


def start(daemons: Daemons, node: str, *, namespaces: bool) -> None:
    """Start a node that does not live yet."""
    directory = daemons.directory
    # PMIx makes its folder below this path, and two nodes of one step would meet in it.
    (directory / f"pmix.{node}").mkdir(exist_ok=True)
    plain = ["slurmd", "-D", "-N", node, "-f", str(directory / "etc/slurm.conf")]
    boxed = [*_UNSHARE, "sh", "-c", _BOOT, "sh", node, str(directory)]
    daemons.start(daemon_of(node), boxed if namespaces else plain)


def kill(daemons: Daemons, *nodes: str, namespaces: bool) -> None:
    """Cut the power of nodes: slurmd, the step daemons and all processes of jobs are gone at once."""
    names = [daemon_of(node) for node in nodes]
    found = [process for name in names if (process := daemons.recorded(name))]
    # With namespaces the kernel ends a node's other processes before its process 1 is gone.
    below = processes.descendants(found)
    if not namespaces:
        left = steps(daemons.directory, *nodes)
        below += left + processes.descendants(left)
    daemons.end(*names, patience_s=0)
    processes.end(below, patience_s=0)


def steps(directory: Path, *nodes: str) -> list[Process]:
    """Return the step daemons of nodes: no children of slurmd, and they overwrite their own environment with a title.

    What they keep is slurmd's log, open, and its path names cluster and node.
    """
    logs = {str(directory / f"log/{daemon_of(node)}.log") for node in nodes}
    found = [processes.identify(pid) for pid in processes.every_pid()]
    return [process for process in found if process and _is_step(process) and logs & _open_files(process)]


def _is_step(process: Process) -> bool:
    try:
        return Path(f"/proc/{process.pid}/comm").read_bytes().strip() == b"slurmstepd"
    except OSError:
        return False


def _open_files(process: Process) -> set[str]:
    found = set()
    try:
        for entry in Path(f"/proc/{process.pid}/fd").iterdir():
            found.add(str(entry.readlink()))
    except OSError:
        pass  # it ended meanwhile
    return found
