"""``mlhpc status``: the last session, or the last night on all systems, in a few lines, with what to type next."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.report.status import OpenAlert, Status, session_status, typed_here
from pytest_mlhpc.store.files import default_state_dir
from pytest_mlhpc.store.index import Index

#: A session has no more tests than this worth reading for a few lines.
_LIMIT = 100_000
#: A night that is farther ahead was recorded by a clock that is wrong: it would stay the last one for years. In ns.
_AHEAD_NS = 3600 * 10**9


@click.command(
    cls=DataCommand,
    help="Show what the last session found, or the last night on all systems, and what to type next.",
    example="mlhpc status --night",
)
@click.option("--night", is_flag=True, help="The last night, also if something else was measured since.")
@options.state_dir
def command(night: bool, state_dir: Path) -> CommandReport:
    """Return at most twelve lines."""
    words: tuple[str, ...] = ()
    if state_dir != default_state_dir(os.environ):
        words = (f"--state-dir={state_dir.absolute()}",)
    with contextlib.closing(Index(state_dir)) as index:
        newest = index.newest(limit=1)
        status = None
        if newest and (night or newest[0].purpose == "nightly"):
            status = _night(index, state_dir, words)
        elif newest:
            records = [
                one for one in index.newest(session=newest[0].session, limit=_LIMIT) if one.attempt == 0
            ]
            status = session_status(records[::-1], words)
        if status is not None:
            tests = (test for problem in status.problems for test in problem.tests)
            status = typed_here(status, {test: root for test in tests if (root := _root(index, test))})
    if status is None:
        if not newest:
            from pytest_mlhpc.cli.commands import nothing_recorded

            return nothing_recorded(state_dir, Status("session").data())
        what = f"no nightly run is recorded in {state_dir}"
        text = f"{what}; run: MLHPC_PURPOSE=nightly pytest suites/ --system local\n"
        return CommandReport(text, Status("night").data())
    status = replace(status, alerts=tuple(_open_alerts(state_dir)))
    return CommandReport("".join(f"{line}\n" for line in status.lines()), status.data())


def _root(index: Index, test: str) -> str:
    """Return the folder in which a test is called by its node id; empty for this one, and for one that is not here."""
    root = next((one.root for one in index.newest(test=test, limit=1)), "")
    return root if root and Path(root).is_dir() and not Path(root).samefile(Path.cwd()) else ""


def _open_alerts(state_dir: Path) -> Iterable[OpenAlert]:
    from pytest_mlhpc.alert.book import read_book
    from pytest_mlhpc.alert.messages import message_of
    from pytest_mlhpc.store.text import tell

    for one in read_book(state_dir, tell).incidents:
        title = message_of(one, one.state, one.changed_ns).title.partition(": ")[2]
        yield OpenAlert(one.id, one.started_ns, title, one.ack.by if one.ack else "")


def _newest(index: Index, until_ns: int | None) -> int | None:
    """Return when the newest nightly record until then was made, or None."""
    query = "SELECT max(created_ns) FROM records WHERE purpose = 'nightly' AND (:until IS NULL OR created_ns <= :until)"
    ((newest_ns,),) = index.ask(query, {"until": until_ns})
    return None if newest_ns is None else int(newest_ns)


def _night(index: Index, state_dir: Path, words: Sequence[str]) -> Status | None:
    """Return the last night; None where there was none."""
    from pytest_mlhpc.history.local import LocalSource
    from pytest_mlhpc.report import status
    from pytest_mlhpc.store.record import provenance_of

    now_ns = time.time_ns()
    newest_ns = _newest(index, now_ns + _AHEAD_NS) or _newest(index, None)
    if newest_ns is None:
        return None
    recent = index.since(newest_ns - status.NIGHT_NS)
    records = status.tonight(one for one in recent if one.created_ns <= newest_ns)
    source = LocalSource(state_dir)
    try:
        nights = source.nights(now_ns - status.LEARNT_NS)
        missing = status.missing_nights(nights, provenance_of(Path.cwd()).default_branch, now_ns)
    finally:
        source.close()
    return status.night_status(records, missing, words)
