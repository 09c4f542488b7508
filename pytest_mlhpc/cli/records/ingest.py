"""``mlhpc records ingest``: records of runs that another tool made."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.history.foreign import DIRECTIONS, READERS, ForeignNames
from pytest_mlhpc.history.ingest import Ingested, Ingester
from pytest_mlhpc.store.record import default_branch_of
from pytest_mlhpc.store.text import iso

#: Exit code: something of the source was not read.
FOUND = 1

#: Time between two looks at a source that is followed, in seconds.
LOOK_S = 5.0


@click.command(
    cls=DataCommand,
    help="Record runs that another tool made, each once: history, change points and alerts then work on them as on our own. "
    "The source stays as it is, and may be read again at any time. Exit code 1: something in it was not read.",
    example="mlhpc records ingest --reframe perflogs/",
)
@click.option("--reframe", type=Path, metavar="PATH", help="Folder of perflogs, one of them, or results.db.")
@click.option("--jsonl", type=Path, metavar="FILE", help="JSON lines: time, benchmark, metric, value, unit.")
@click.option(
    "--pytest-benchmark", type=Path, metavar="PATH", help="File of --benchmark-json, or a folder of them."
)
@click.option(
    "--junit", type=Path, metavar="PATH", help="JUnit XML, or a folder of it: the time of each test case."
)
@click.option("--system", default="", metavar="NAME", help="Instead of the source's own.")
@click.option("--partition", default="", metavar="NAME", help="Instead of the source's own.")
@click.option("--environment", default="", metavar="NAME", help="Instead of the source's own.")
@click.option(
    "--better", multiple=True, metavar="METRIC=higher|lower|none", help="Which direction is better."
)
@click.option(
    "--unit", multiple=True, metavar="METRIC=UNIT", help="Unit of a metric that the source does not say."
)
@click.option(
    "--branch", default="", metavar="NAME", help="Branch of the runs.  [default: the default branch]"
)
@click.option("--follow", is_flag=True, help="Go on as the source grows, until interrupted.")
@options.state_dir
def command(
    *,
    reframe: Path | None,
    jsonl: Path | None,
    pytest_benchmark: Path | None,
    junit: Path | None,
    system: str,
    partition: str,
    environment: str,
    better: Sequence[str],
    unit: Sequence[str],
    branch: str,
    follow: bool,
    state_dir: Path,
) -> CommandReport:
    """Read the source, store what is new, and say what became of it."""
    given = {"reframe": reframe, "jsonl": jsonl, "pytest-benchmark": pytest_benchmark, "junit": junit}
    sources = [(tool, path) for tool, path in given.items() if path is not None]
    if len(sources) != 1:
        raise UsageError(
            "name one source: --reframe PATH, --jsonl FILE, --pytest-benchmark PATH or --junit PATH"
        )
    (tool, path) = sources[0]
    if not path.exists():
        raise UsageError(f"there is no {path}")
    if system == "local":
        raise UsageError(
            "`local` is this machine itself; give the other tool's machine a name of its own by --system"
        )
    names = ForeignNames(
        system, partition, environment, _pairs("--better", better, DIRECTIONS), _pairs("--unit", unit)
    )
    made = Ingester(state_dir, tool, branch or default_branch_of(Path.cwd(), os.environ))
    with contextlib.closing(made):
        made.take(READERS[tool](path, names))
        before = _state_of(path)
        while follow:
            if sys.stderr.isatty():
                sys.stderr.write(f"{made.found.stored} records stored; waiting for more (Ctrl-C ends)\r")
            try:
                time.sleep(LOOK_S)
            except KeyboardInterrupt:
                break
            if (now := _state_of(path)) != before:
                before = now
                made.take(READERS[tool](path, names))
    return CommandReport(_text(made.found), _data(made.found), FOUND if made.found.problems else 0)


def _state_of(path: Path) -> list[tuple[str, int, int]]:
    """Return what changes as the source grows: of each file its size and time."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = []
    for file in files:
        with contextlib.suppress(OSError):  # it was moved away meanwhile
            stat = file.stat()
            found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return found


def _pairs(option: str, given: Sequence[str], allowed: Sequence[str] = ()) -> dict[str, str]:
    found = {}
    for pair in given:
        name, _, value = pair.partition("=")
        if not name or not value or (allowed and value not in allowed):
            values = "|".join(allowed) or "UNIT"
            raise UsageError(f"{option} {pair!r}: write METRIC={values}")
        found[name] = value
    return found


def _text(found: Ingested) -> str:
    since = iso(found.first_ns)[:10]
    commands = (f"mlhpc history changes --since {since}", f"mlhpc report html --since {since}")
    return found.text() + ("".join(("next:\n", *(f"  {one}\n" for one in commands))) if found.stored else "")


def _data(found: Ingested) -> dict[str, object]:
    return {
        "stored": found.stored,
        "known": found.known,
        "failed": found.failed,
        "benchmarks": sorted(found.benchmarks),
        "systems": sorted(found.systems),
        "notes": found.notes,
        "problems": found.problems,
    }
