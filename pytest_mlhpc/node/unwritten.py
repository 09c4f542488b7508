"""PAYLOAD. What to call it that a file could not be written."""

from __future__ import annotations

import errno

from pytest_mlhpc.node.private import UNSAFE, UnsafeDirectoryError

#: ``errno`` values that mean "there is no room": on a disk, in a quota, or within the largest file that is allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def unwritten(error: BaseException) -> str:
    """Return the outcome for a file that could not be written: *error*, or its cause, says why."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, UnsafeDirectoryError):
        return UNSAFE
    another = isinstance(cause, OSError) and cause.errno not in {None, *NO_ROOM}
    return "not_writable" if another else "disk_full"
