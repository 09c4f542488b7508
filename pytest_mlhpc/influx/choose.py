"""``--from local|influx``: where a command's history comes from."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.history.local import LocalSource
from pytest_mlhpc.history.nightly import Look
from pytest_mlhpc.history.series import Source
from pytest_mlhpc.store.record import provenance_of
from pytest_mlhpc.store.text import tell

if TYPE_CHECKING:
    from pytest_mlhpc.influx.source import InfluxSource


def look_of(system: str, branch: str, *, judged_only: bool) -> Look:
    """Return what is to be looked at; without *branch*, the nightly runs of the default one."""
    branch = branch or provenance_of(Path.cwd()).default_branch
    return Look(system=system, default_branch=branch, judged_only=judged_only)


@contextlib.contextmanager
def chosen(name: str, state_dir: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Source]:
    """Open the source of that name (``--from``), and close it in the end.

    Raises:
        UsageError: InfluxDB is asked for, but how to reach it is not said, or a package is missing.
    """
    if name == "local":
        local = LocalSource(state_dir, tell)
        with contextlib.closing(local):
            yield local
        return
    with contextlib.closing(influx_source(environ)) as influx:
        yield influx


def influx_source(environ: Mapping[str, str]) -> InfluxSource:
    """Return the InfluxDB of ``$MLHPC_INFLUX_URL``. Connects to nothing yet.

    Raises:
        UsageError: how to reach it is not said, or a package is missing.
    """
    try:
        from pytest_mlhpc.influx.source import open_source
    except ImportError as error:
        raise UsageError(
            f"history from InfluxDB: {error.name} is not installed: pip install 'pytest-mlhpc[influx]'"
        ) from error
    return open_source(environ)
