"""Replace a file whole or not at all, whatever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from pytest_mlhpc.errors import StoreError

#: A temporary file that is this old (s) was left by a writer that was killed: no writing of ours takes minutes, and an
#: hour is more than clocks of a file server and its clients differ.
LEFT_AFTER_S = 3600.0
_SUFFIX = ".part"


def replace_file(path: Path, text: str) -> None:
    """Replace *path* by *text* in one step: readers see the old file or the new one, whatever dies.

    What a writer of the same file that was killed has left beside it is removed.

    Raises:
        StoreError: disk full, over quota, not writable; names the path. The old file is left as it was.
    """
    target = path.resolve()  # a link stays a link
    temporary = ""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe stays one
            path.write_text(text, encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o664 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(_SUFFIX, f".{target.name}.", target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _remove_left(target: Path) -> None:
    before = time.time() - LEFT_AFTER_S
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            ours = entry.name.startswith(f".{target.name}.") and entry.name.endswith(_SUFFIX)
            if ours and entry.stat(follow_symlinks=False).st_mtime < before:
                with contextlib.suppress(
                    OSError
                ):  # another writer removes it as well, or it is somebody else's
                    Path(entry.path).unlink()


def _umask() -> int:
    """Return this process's umask without changing it (proc(5), status; 022 where that is not to be had)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022
