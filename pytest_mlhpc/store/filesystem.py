"""Where the index may live: SQLite needs locks that work, which network file systems do not promise."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pytest_mlhpc.node.disks import MOUNTS, NETWORK, file_system

#: Part of the file's name: versions of this program with other tables never meet.
VERSION = 3


def index_path(state_dir: Path, mounts: Path = MOUNTS) -> Path:
    """Return this user's index file: in the state directory when that is on a local disk, else in the cache directory.

    Each user has one of their own, so that two users of one state directory need not write each other's files.
    """
    if file_system(state_dir, mounts) not in NETWORK:
        return state_dir / f"index-v{VERSION}-{os.getuid()}.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    return cache / "mlhpc" / f"index-v{VERSION}-{name}.sqlite"
