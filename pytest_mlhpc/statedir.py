"""Where records, ledger and logs lie. Imports nothing, so that the command line can ask without loading pytest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$MLHPC_STATE``, else ``$XDG_STATE_HOME/mlhpc``, else ``~/.local/state/mlhpc``."""
    if given := environ.get("MLHPC_STATE"):
        return Path(given).expanduser().absolute()
    if base := environ.get("XDG_STATE_HOME"):
        return Path(base).expanduser().absolute() / "mlhpc"
    return Path.home() / ".local" / "state" / "mlhpc"
