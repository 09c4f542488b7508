"""Where records, ledger and logs lie. Imports nothing of ours, so that the command line can ask without loading pytest."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$MLHPC_STATE``, else ``$XDG_STATE_HOME/mlhpc``, else ``~/.local/state/mlhpc``.

    Raises:
        UsageError: none of them is set, and this user has no home.
    """
    try:
        if given := environ.get("MLHPC_STATE"):
            return Path(given).expanduser().absolute()
        if base := environ.get("XDG_STATE_HOME"):
            return Path(base).expanduser().absolute() / "mlhpc"
        return Path.home() / ".local" / "state" / "mlhpc"
    except RuntimeError as error:  # pathlib's for a home that nobody knows
        from pytest_mlhpc.errors import UsageError

        raise UsageError(
            f"there is no folder for the state: HOME is not set, and user {os.geteuid()} has no home known here; name a "
            "folder by MLHPC_STATE"
        ) from error


def unusable(folder: Path) -> str:
    """Return why nothing can be written below *folder*, which may have to be made; empty if it can. Nothing is made."""
    for path in (folder, *folder.parents):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not is_folder:
            return f"{path} is no folder"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"{path} is on a read-only file system"
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            return f"{path} may not be written by user {os.geteuid()}"
        return ""
    return ""
