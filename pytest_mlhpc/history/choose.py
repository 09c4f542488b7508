"""``--from local|influx``: where a command's history comes from."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.history.local import LocalSource
from pytest_mlhpc.history.nightly import Look
from pytest_mlhpc.history.series import Source
from pytest_mlhpc.provenance import provenance_of
from pytest_mlhpc.results.text import clean
from pytest_mlhpc.statedir import default_state_dir

if TYPE_CHECKING:
    from pytest_mlhpc.influx.source import InfluxSource

SOURCES = ("local", "influx")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--from`` (``args.source``) and ``--state-dir`` (``args.state_dir``)."""
    parser.add_argument(
        "--from", dest="source", choices=SOURCES, default="local",
        help="where history is read: the local store, or the InfluxDB of $MLHPC_INFLUX_URL (default: local)",
    )  # fmt: skip
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def add_look_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--system`` and ``--branch``."""
    parser.add_argument("--system", default="", metavar="NAME", help="only this system")
    parser.add_argument(
        "--branch", default="", metavar="NAME",
        help="whose nightly runs are watched (default: the default branch of the checkout, else main)",
    )  # fmt: skip


def look_of(args: argparse.Namespace, *, judged_only: bool) -> Look:
    """Return what these arguments say is to be looked at."""
    branch = args.branch or provenance_of(Path.cwd()).default_branch
    return Look(system=args.system, default_branch=branch, judged_only=judged_only)


def state_dir_of(args: argparse.Namespace) -> Path:
    """Return the state directory that ``--state-dir`` or the environment names."""
    given: Path | None = args.state_dir
    return given or default_state_dir(os.environ)


@contextlib.contextmanager
def chosen(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Iterator[Source]:
    """Open the source that *args* asks for, and close it in the end.

    Raises:
        UsageError: InfluxDB is asked for, but how to reach it is not said, or a package is missing.
    """
    if args.source == "local":
        local = LocalSource(state_dir_of(args), _tell)
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


def _tell(problem: str) -> None:
    sys.stderr.write(f"{clean(problem)}\n")
