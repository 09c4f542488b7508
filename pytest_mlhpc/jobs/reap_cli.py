"""``mlhpc reap``: end own jobs that nobody watches any more."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.claims import open_entries
from pytest_mlhpc.jobs.identity import uuid7
from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.ledger_tree import Entry
from pytest_mlhpc.jobs.reaping import Prepare, describe, reap_expired_leases
from pytest_mlhpc.jobs.submitted import Submitted
from pytest_mlhpc.results.text import clean
from pytest_mlhpc.statedir import default_state_dir

SUMMARY = "end own jobs whose session is dead or whose lease has expired"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--dry-run`` and ``--state-dir``."""
    parser.add_argument("--dry-run", action="store_true", help="only say what would be ended")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def run(args: argparse.Namespace) -> int:
    """Do it. Returns 1 when something is left that could not be ended; with ``--dry-run``, when there is something to do.

    Jobs of other clusters are named and left; they change nothing of the exit code.
    """
    from pytest_mlhpc.provision.reapers import clear_kept, our_reapers, reachable_with

    state_dir = args.state_dir or default_state_dir(os.environ)
    reachable = reachable_with(os.environ)
    if args.dry_run:
        return _dry(state_dir, reachable)
    code = _reap(state_dir, our_reapers(os.environ), reachable)
    kept = clear_kept(state_dir, os.environ)
    for one in kept:
        _say(str(one))
    return code if all(one.done for one in kept) else 1


def _anywhere(_entry: Submitted) -> bool:
    return True


def _dry(state_dir: Path, reachable: Callable[[Submitted], bool] = _anywhere) -> int:
    survey = open_entries(state_dir)
    reapable = [entry for entry in survey.entries if entry.reapable]
    expired = _here(reapable, reachable)
    for entry in expired:
        _say(f"{describe(entry.submitted)}: {entry.why}: would be ended")
    from pytest_mlhpc.provision.kubernetes.keeping import kept_too_long

    kept = kept_too_long(state_dir, time.time())
    for line in kept:
        _say(line)
    _notes(survey.left_alone)
    _say(_others(len(survey.entries) - len(reapable), len(expired), "would be ended"))
    return 1 if expired or kept else 0


def _here(expired: Sequence[Entry], reachable: Callable[[Submitted], bool]) -> list[Entry]:
    """Return what can be ended here, and tell of the rest."""
    for entry in expired:
        if not reachable(entry.submitted):
            cluster = (
                f"the cluster {entry.submitted.cluster}" if entry.submitted.cluster else "another cluster"
            )
            _say(
                f"{describe(entry.submitted)}: {entry.why}: left, as it is a job of {cluster}; run `mlhpc reap` there"
            )
    return [entry for entry in expired if reachable(entry.submitted)]


def _reap(
    state_dir: Path, reapers: Mapping[str, Prepare], reachable: Callable[[Submitted], bool] = _anywhere
) -> int:
    # Without a state directory there is nothing to reap, and none is made.
    ledger = Ledger(state_dir, f"reap-{uuid7()}")
    try:
        adoption, reaped = reap_expired_leases(ledger, reapers, reachable=reachable)
        for one in reaped:
            _say(str(one))
        _notes([*adoption.left_alone, *adoption.notes])
        ledger.close()
    except StoreError as error:  # a full or read-only disk: what is open stays so
        _notes([str(error)])
        return 1
    survey = open_entries(state_dir, me=ledger.name)
    left = [one for one in reaped if not one.ended]
    reapable = [entry for entry in survey.entries if entry.reapable]
    unclaimed = _here(reapable, reachable)
    for entry in unclaimed:
        _say(f"{describe(entry.submitted)}: {entry.why}: not ended, its ledger could not be claimed")
    _say(_others(len(survey.entries) - len(reapable), len(reaped) - len(left), "ended"))
    return 1 if left or unclaimed else 0


def _others(held: int, expired: int, done: str) -> str:
    rest = f"; {held} left, as a session watches them or their lease is good" if held else ""
    return f"{expired} {done}{rest}"


def _say(line: str) -> None:
    sys.stdout.write(f"{clean(line)}\n")


def _notes(notes: Sequence[str]) -> None:
    sys.stderr.writelines(f"{clean(note)}\n" for note in notes)
