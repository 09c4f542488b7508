"""Where the index may live: SQLite needs locks that work, which network file systems do not promise."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

#: File systems of clusters on which locks may be missing, slow or advisory to one node only.
NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "orangefs", "pvfs2", "wekafs",
    "panfs", "daos", "vast", "virtiofs", "fhgfs", "glusterfs",
})  # fmt: skip

#: Part of the file's name: versions of this program with other tables never meet.
VERSION = 2


def index_path(state_dir: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Path:
    """Return this user's index file: in the state directory when that is on a local disk, else in the cache directory.

    Each user has one of their own, so that two users of one state directory need not write each other's files.
    """
    if file_system(state_dir, mounts) not in NETWORK:
        return state_dir / f"index-v{VERSION}-{os.getuid()}.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    return cache / "mlhpc" / f"index-v{VERSION}-{name}.sqlite"


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
