"""Which history a command reads: the local store's, or InfluxDB's. Only the one that is chosen is imported."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.history.level_changes import NightlyQuery
from pytest_mlhpc.history.local import LocalSource
from pytest_mlhpc.history.series import Source
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.store.record import provenance_of
from pytest_mlhpc.store.text import tell

if TYPE_CHECKING:
    from pytest_mlhpc.influx.source import InfluxSource


def selection_of(system: str, branch: str, *, judged_only: bool) -> NightlyQuery:
    """Return what is to be looked at; without *branch*, the nightly runs of the default one."""
    branch = branch or provenance_of(Path.cwd()).default_branch
    return NightlyQuery(system=system, default_branch=branch, judged_only=judged_only)


@contextlib.contextmanager
def chosen(name: str, state_dir: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Source]:
    """Open the source of that name (``--from``), and close it in the end.

    Raises:
        UsageError: InfluxDB is asked for, but how to reach it is not said.
    """
    opened = LocalSource(state_dir, tell) if name == "local" else influx_source(environ)
    with contextlib.closing(opened):
        yield opened


def store_text(name: str, state_dir: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Return in words where the source of that name has its history, without secrets."""
    if name == "local":
        return str(state_dir)
    server = server_of(environ)
    return server.hide(f"{server.url}, bucket {server.bucket}")


def influx_source(environ: Mapping[str, str]) -> InfluxSource:
    """Return the InfluxDB of ``$MLHPC_INFLUX_URL``. Connects to nothing yet.

    Raises:
        UsageError: none is named, or wrongly.
    """
    from pytest_mlhpc.influx.source import InfluxSource

    return InfluxSource(server_of(environ))
