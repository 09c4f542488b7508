"""PAYLOAD. Which file systems are a network's: all nodes may see them, and locks on them may not be what they seem."""

from __future__ import annotations

from pathlib import Path

#: File systems of clusters on which locks may be missing, slow or advisory to one node only.
NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "orangefs", "pvfs2", "wekafs",
    "panfs", "daos", "vast", "virtiofs", "fhgfs", "glusterfs",
})  # fmt: skip

#: Where the kernel tells what is mounted (proc(5)).
MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that *path* lies on (``fuse.x`` as ``fuse``); empty where it is not known.

    Source: proc(5), ``/proc/pid/mountinfo``; the last of the longest matching mount points is the one on top.
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    target, best, found = path.resolve(), -1, ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        words = head.split()
        if len(words) < 5 or not tail:
            continue
        mount = Path(words[4].replace("\\040", " "))
        if len(mount.parts) >= best and target.is_relative_to(mount):
            best, found = len(mount.parts), tail.split()[0].partition(".")[0]
    return found
