"""``mlhpc last``: the last session, or the last night on all systems, in at most ten lines, with what to type next."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.last_text import lines_of
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "what the last session or night found, and what to do next"

#: A session has no more tests than this worth reading for ten lines.
_LIMIT = 100_000
#: A night that is farther ahead was recorded by a clock that is wrong: it would stay the last one for years. In ns.
_AHEAD_NS = 3600 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--night`` and ``--state-dir``."""
    parser.add_argument(
        "--night", action="store_true", help="the last night, also if something else was measured since"
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 5 when nothing was ever measured, as pytest would."""
    state_dir = args.state_dir or default_state_dir(os.environ)
    options: tuple[str, ...] = ()
    if state_dir != default_state_dir(os.environ):
        options = (f"--state-dir={state_dir.absolute()}",)
    index = Index(state_dir)
    try:
        newest = index.newest(limit=1)
        if newest and (args.night or newest[0].purpose == "nightly"):
            lines = _night(index, state_dir, options)
        elif newest:
            records = [
                one for one in index.newest(session=newest[0].session, limit=_LIMIT) if one.attempt == 0
            ]
            lines = lines_of(records[::-1], options)
        else:
            lines = []
    finally:
        index.close()
    if not lines:
        what = "no nightly run is recorded" if newest else "nothing is recorded"
        sys.stdout.write(f"{what} in {state_dir}; run: pytest suites/ --system local\n")
        return 5
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


def _newest(index: Index, until_ns: int | None) -> int | None:
    """Return when the newest nightly record until then was made, or None."""
    query = "SELECT max(created_ns) FROM records WHERE purpose = 'nightly' AND (:until IS NULL OR created_ns <= :until)"
    ((newest_ns,),) = index.ask(query, {"until": until_ns})
    return None if newest_ns is None else int(newest_ns)


def _night(index: Index, state_dir: Path, options: Sequence[str]) -> list[str]:
    """Return the lines of the last night; none where there was none."""
    from pytest_mlhpc.history import tonight
    from pytest_mlhpc.history.local import LocalSource
    from pytest_mlhpc.provenance import provenance_of

    now_ns = time.time_ns()
    newest_ns = _newest(index, now_ns + _AHEAD_NS) or _newest(index, None)
    if newest_ns is None:
        return []
    recent = index.since(newest_ns - tonight.NIGHT_NS)
    records = tonight.tonight(one for one in recent if one.created_ns <= newest_ns)
    source = LocalSource(state_dir)
    try:
        nights = source.nights(now_ns - tonight.LEARNT_NS)
        missing = tonight.missing_nights(nights, provenance_of(Path.cwd()).default_branch, now_ns)
    finally:
        source.close()
    return tonight.lines_of_night(records, missing, options)
