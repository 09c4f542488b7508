"""``mlhpc status``: the morning page of the last night on all systems, or of the last session."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_mlhpc.cli import options
from pytest_mlhpc.cli.commands import CommandReport, DataCommand
from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.report.morning import WIDTH, Morning, session_morning
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.locations import default_state_dir
from pytest_mlhpc.store.text import tell

if TYPE_CHECKING:
    from pytest_mlhpc.history.series import Source
    from pytest_mlhpc.report.night import MorningQuery
    from pytest_mlhpc.store.record import Record

#: A session has no more tests than this worth reading for a few lines.
_LIMIT = 100_000
#: Terminals for which lines are cut; wider ones leave them whole.
_NARROW, _WIDE = 40, 300


@click.command(
    cls=DataCommand,
    help="Show what the last session found, or the last night on all systems, and what to type next.",
    example="mlhpc status --night",
)
@click.option("--night", is_flag=True, help="The last night, also if something else was measured since.")
@options.source
def command(night: bool, source: str, state_dir: Path) -> CommandReport:
    """Return at most 25 lines."""
    ending: tuple[str, ...] = ()
    if state_dir != default_state_dir(os.environ):
        ending = (f"--state-dir={state_dir.absolute()}",)
    night = night or source != "local"
    with contextlib.closing(Index(state_dir)) as index:
        newest = index.newest(limit=1, compared=False)
        if newest and not night and newest[0].purpose != "nightly":
            records = [
                one for one in index.newest(session=newest[0].session, limit=_LIMIT) if one.attempt == 0
            ]
            return _report(session_morning(records[::-1], ending, dict(_roots(records))))
    if newest or source != "local":
        if page := _night(source, state_dir, ending):
            return _report(page)
        text = f"no nightly run is recorded in {state_dir}; run: MLHPC_PURPOSE=nightly pytest suites/ --system local\n"
        return CommandReport(text, Morning("night", "").data())
    from pytest_mlhpc.cli.commands import nothing_recorded

    return nothing_recorded(state_dir, Morning("session", "").data())


def _report(page: Morning) -> CommandReport:
    columns = WIDTH
    if sys.stdout.isatty():
        columns = min(max(shutil.get_terminal_size().columns, _NARROW), _WIDE)
    return CommandReport("".join(f"{line}\n" for line in page.lines(columns)), page.data())


def _roots(records: Sequence[Record]) -> Iterable[tuple[str, str]]:
    """Return the tests that pytest calls in another folder which is there, each with that folder."""
    there = {root for root in {one.root for one in records} if root and Path(root).is_dir()}
    elsewhere = {root for root in there if not Path(root).samefile(Path.cwd())}
    return ((one.node_id, one.root) for one in records if one.root in elsewhere)


def _night(source: str, state_dir: Path, ending: Sequence[str]) -> Morning | None:
    """Return the page of the last night; where InfluxDB is away that of the local store, which says so."""
    from pytest_mlhpc.cli.options import chosen
    from pytest_mlhpc.influx.credentials import store_text
    from pytest_mlhpc.report.night import MorningQuery

    asked = MorningQuery(time.time_ns(), store_text(source, state_dir), options=ending)
    try:
        with chosen(source, state_dir) as opened:
            return read_morning(opened, state_dir, asked)
    except StoreError as error:
        if source == "local":
            raise
        note = f"{error}; this page is made of the records in {state_dir}"
    asked = replace(asked, store=store_text("local", state_dir), notes=(note,))
    with chosen("local", state_dir) as opened:
        page = read_morning(opened, state_dir, asked)
    if page is None:
        tell(note)
    return page


def read_morning(source: Source, state_dir: Path, asked: MorningQuery) -> Morning | None:
    """Return the page of the last night of *source*; None where there was none.

    What no ``mlhpc alert send`` has looked at yet is looked at now, and nothing of it is written.

    Raises:
        StoreError: the history or the book of alerts cannot be read.
    """
    from pytest_mlhpc.alert.book import read_book
    from pytest_mlhpc.alert.config import branch_and_report
    from pytest_mlhpc.alert.incidents import advance
    from pytest_mlhpc.alert.observe import Question, observe
    from pytest_mlhpc.cli.alert import DEFAULT_CONFIG
    from pytest_mlhpc.history.level_changes import cache_path
    from pytest_mlhpc.report.night import AHEAD_NS, LEARNT_NS, night_morning
    from pytest_mlhpc.store.record import provenance_of

    noted = options.site_events(state_dir, source)
    branch, report = branch_and_report(Path(DEFAULT_CONFIG))
    branch = branch or provenance_of(Path.cwd()).default_branch
    book = read_book(state_dir, tell)
    asked = replace(asked, branch=branch, events=noted, report=report, sent=book.last_ns > 0)
    nights = list(source.nights(asked.now_ns - LEARNT_NS))
    known = [one for one in nights if one.purpose == "nightly" and one.created_ns <= asked.now_ns + AHEAD_NS]
    if known and known[-1].created_ns > book.last_ns:
        alarms = options.false_alarms()
        question = Question(
            asked.now_ns, branch, false_alarms=alarms, events=noted, cache=cache_path(state_dir)
        )
        found = observe(source, book, question)
        book, _ = advance(book, found.observation, found.companions)
    return night_morning(nights, book, asked)
