"""Resuming: which allocations of earlier sessions this session needs, and how it claims them by rename, so that one claimer wins."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.job import AdoptedAllocation, Attempt, Job
from pytest_mlhpc.jobs.ledger import Ledger, put_aside, write_all
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, spec_digest
from pytest_mlhpc.jobs.ledger_files import SCHEMA, LedgerFile, LedgerSnapshot, OpenEntry
from pytest_mlhpc.node.files import read_json, read_private
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import from_json
from pytest_mlhpc.store.files import make_directories


@dataclass(frozen=True)
class Resumed:
    """``adopted`` by partition id; ``unusable`` are entries that cannot be gone on with, and why: they are to be ended.

    ``unseen`` are entries whose plan cannot be read now: they stay as they are.
    """

    adopted: Mapping[str, tuple[AdoptedAllocation, ...]]
    unusable: Mapping[str, tuple[LedgerEntry, str]]
    unseen: Mapping[str, str]


def is_needed_by(jobs: Iterable[Job]) -> Callable[[LedgerEntry], bool]:
    """Return the question whether an entry holds a run of one of *jobs*."""
    known = {
        _job_key(job) for job in jobs if not job.spec.holds_nodes
    }  # nodes that nobody uses are given back
    return lambda entry: (
        entry.scheduler != "local" and any((run.node_id, run.digest) in known for run in entry.runs)
    )


def resume_entries(
    entries: Iterable[LedgerEntry], jobs: Iterable[Job], recorded: Callable[[str], bool]
) -> Resumed:
    """Make *entries*, which this session has taken over, attempts of *jobs*; oldest first, each run once.

    A run that is *recorded* was judged by an earlier session: its test runs anew. Of several runs of the same attempt (a
    node took the first, or two sessions submitted at once) the newest counts. Runs that no job wants and nobody has
    recorded keep their allocation in the ledger.
    """
    by_key = {_job_key(job): job for job in jobs}
    adopted: dict[str, list[AdoptedAllocation]] = {}
    unusable: dict[str, tuple[LedgerEntry, str]] = {}
    unseen: dict[str, str] = {}
    ordered = sorted(entries, key=lambda entry: entry.submitted_ns)
    newest = {(run.node_id, run.digest, run.attempt): run.run_id for entry in ordered for run in entry.runs}
    for entry in ordered:
        try:
            plan = _read_plan(entry)
        except OSError as error:
            unseen[entry.id] = f"its plan cannot be read now: {error}"
            continue
        except (ValueError, TypeError, RecursionError) as error:
            unusable[entry.id] = (entry, f"its plan cannot be used: {error}")
            continue
        open_runs = [
            run
            for run in entry.runs
            if newest[run.node_id, run.digest, run.attempt] == run.run_id and not recorded(run.run_id)
        ]
        if not open_runs:
            unusable[entry.id] = (entry, "no test waits for its results")
            continue
        planned = {run.run_id: run for run in plan.runs}
        runs, others = {}, set()
        for run in open_runs:
            if job := by_key.get((run.node_id, run.digest)):
                _remove_skip_file(plan, run.run_id)
                runs[run.run_id] = (job, _attempt(plan, planned[run.run_id], run.attempt, entry))
            else:
                others.add(run.run_id)
        adopted.setdefault(entry.partition, []).append(
            AdoptedAllocation(plan, entry.native_id, runs, frozenset(others))
        )
    return Resumed({name: tuple(found) for name, found in adopted.items()}, unusable, unseen)


def _remove_skip_file(plan: Plan, run_id: str) -> None:
    """Take back the note by which an earlier session has left a run out; its batch may not have come to it yet."""
    with contextlib.suppress(OSError):  # then it is run again
        Path(f"{plan.directory}/{run_id}.skip").unlink()


def _read_plan(entry: LedgerEntry) -> Plan:
    path = Path(entry.directory) / "plan.json"
    try:
        content = read_private(path)
    except FileNotFoundError:
        if not entry.native_id and path.parent.parent.is_dir():
            raise ValueError("its session ended before anything was submitted") from None
        raise
    plan = from_json(Plan, read_json(content), str(path))
    if plan.protocol != PROTOCOL:
        raise ValueError(f"it speaks protocol {plan.protocol}, this version {PROTOCOL}")
    if plan.allocation_id != entry.id or {run.run_id for run in plan.runs} != {
        run.run_id for run in entry.runs
    }:
        raise ValueError(f"{path} is of another allocation")
    return plan


def _attempt(plan: Plan, run: RunPlan, number: int, entry: LedgerEntry) -> Attempt:
    shared = len(plan.runs) > 1
    return Attempt(
        run,
        number,
        directory=f"{plan.directory}/{run.run_id}" if shared else plan.directory,
        submitted_ns=entry.submitted_ns,
        job_id=entry.native_id,
        adopted=True,
        shared=shared,
        made_from=(entry.purpose, entry.branch, entry.commit),
    )


def _job_key(job: Job) -> tuple[str, str]:
    return job.spec.node_id, spec_digest(job.spec)


#: How long to wait for another session that is taking apart what is wanted, and how often to look meanwhile, in seconds. Some
#: small writes to a network disk are done in a tenth of that; who needs longer may be stopped.
CLAIM_LIMIT_S = 2.0
CLAIM_INTERVAL_S = 0.1


@dataclass(frozen=True)
class OpenAllocations:
    """What is open. ``left_alone`` are files and lines that were (another user's, a newer version's, damaged), and why."""

    entries: tuple[OpenEntry, ...]
    left_alone: tuple[str, ...]


@dataclass
class Adoption:
    """What a claim brought. ``adopted`` was wanted; ``expired`` is to be reaped; both are the claimer's now.

    The claimer notes the end of each in its ledger; what it cannot end the next session meets again. ``left`` stands in
    the ledger as before, its lease is good. ``notes`` say what could not be claimed; ``left_alone`` as in a survey: in a
    state directory that users share that is nothing to worry about.
    """

    adopted: list[LedgerEntry] = field(default_factory=list)
    expired: list[LedgerEntry] = field(default_factory=list)
    left: list[LedgerEntry] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  #: id -> why it had expired
    until_ns: dict[str, int] = field(default_factory=dict)  #: id -> end of the lease it came with
    notes: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)


def open_entries(state_dir: Path, me: str = "") -> OpenAllocations:
    """Return all open allocations of this user, but those of the session *me*. Changes nothing that stays.

    Raises:
        StoreError: the folder of ledgers cannot be listed.
    """
    files = LedgerSnapshot(state_dir)
    found: dict[str, OpenEntry] = {}
    for root in files.roots():
        for entry in files.entries(root) if root.name != me else ():
            # What moves while this looks is seen twice; whoever holds it has it.
            if entry.submitted.id not in found or entry.state == "held":
                found[entry.submitted.id] = entry
    return OpenAllocations(tuple(found.values()), tuple(files.left_alone))


def adopt(
    ledger: Ledger,
    wanted: Callable[[LedgerEntry], bool],
    reachable: Callable[[LedgerEntry], bool] = lambda _entry: True,
) -> Adoption:
    """Take over for *ledger* what *wanted* says of all that is detached or whose owner died, and all that is expired.

    Both may be asked several times about one allocation; what is not *reachable* from here stays, expired or not. Files of
    which nothing is wanted or expired are not touched. Waits up to ``PATIENCE_S`` for others that do the same.

    Raises:
        StoreError: the folder cannot be listed, or the own ledger cannot be written; nothing is lost.
    """
    choice = _Choice(wanted, reachable)
    result = Adoption()
    deadline = time.monotonic() + CLAIM_LIMIT_S
    # What another session is taking apart at this moment may be given back in the next: not to wait would be to submit it again.
    while _adopt_once(ledger, choice, result) and time.monotonic() < deadline:
        time.sleep(CLAIM_INTERVAL_S)
    return result


def _adopt_once(ledger: Ledger, choice: _Choice, result: Adoption) -> bool:
    """Take over into *result* what there is; return whether more may be there in a moment."""
    files = LedgerSnapshot(ledger.state_dir)
    result.left, result.left_alone = [], list(files.left_alone)
    roots, busy = [], files.moved
    for root in files.roots():
        if root.name == ledger.name:
            continue
        if files.alive(root):
            claimed = (entry for file in files.below(root) for entry in files.entries_of(file))
            busy = busy or any(map(choice.wants, claimed))
            continue
        entries = list(files.entries(root))
        if not entries or any(map(choice.takes, entries)):
            roots.append(root)
        else:
            result.left += [one.submitted for one in entries]
    if roots:
        ledger.start()
        fault_point("made")
        busy = _claim_all(ledger, roots, result) or busy
        fault_point("claimed")
        # What was read before the renames may have changed since; from here on nobody else writes it.
        _take_apart(ledger, LedgerSnapshot(ledger.state_dir), choice, result)
    return busy


@dataclass(frozen=True)
class _Choice:
    """Which entries whoever claims takes over."""

    wanted: Callable[[LedgerEntry], bool]
    reachable: Callable[[LedgerEntry], bool]

    def wants(self, entry: OpenEntry) -> bool:
        return self.wanted(entry.submitted) and self.reachable(entry.submitted)

    def takes(self, entry: OpenEntry) -> bool:
        if entry.reapable:
            return self.reachable(entry.submitted)
        return entry.claimable and self.wants(entry)


def _claim_all(ledger: Ledger, roots: Sequence[LedgerFile], result: Adoption) -> bool:
    """Claim *roots*; return whether another session was faster with any."""
    lost = False
    for root in roots:
        try:
            _claim(root, ledger)
        except FileNotFoundError:
            lost = True
        except OSError as error:
            note = f"{root.path}: cannot be claimed: {error.strerror} (left as it is)"
            result.notes += [note] if note not in result.notes else []
    return lost


def _claim(root: LedgerFile, ledger: Ledger) -> None:
    folder = ledger.path.parent / "claimed"
    make_directories(folder, ledger.state_dir)
    root.path.rename(folder / f"{root.name}@{ledger.name}.jsonl")


def _take_apart(ledger: Ledger, files: LedgerSnapshot, choice: _Choice, result: Adoption) -> None:
    """Move what goes from all files that *ledger*'s session has claimed into *ledger*, leaves first."""
    mine = files.find(ledger.name)
    stuck: set[str] = set()  # a file stays while one that it has claimed could not be put away
    for file in list(files.below(mine)) if mine else ():
        kept: list[LedgerEntry] = []
        moving: list[LedgerEntry] = []
        until_ns: dict[str, int] = {}
        for entry in files.entries_of(file, claimed=True):
            if not choice.takes(entry):
                kept.append(entry.submitted)
                continue
            moving.append(entry.submitted)
            if entry.lease.until_ns is not None:
                until_ns[entry.submitted.id] = entry.lease.until_ns
            if choice.wants(entry):
                result.adopted.append(entry.submitted)
            else:
                result.expired.append(entry.submitted)
                result.why[entry.submitted.id] = entry.why
        ledger.adopted(moving, file.session, until_ns)
        result.until_ns |= until_ns
        fault_point("adopted")
        result.left += kept
        try:
            if file.name not in stuck:
                _release(ledger, file, [one.id for one in kept])
                continue
        except (OSError, StoreError) as error:
            result.notes.append(f"{error} (the next session will take it apart)")
        stuck.add(file.claimer)


def _release(ledger: Ledger, file: LedgerFile, kept: Sequence[str]) -> None:
    """Put a claimed file aside, or back with what is left in it."""
    if not kept:
        put_aside(file.path, ledger.state_dir)
        fault_point("closed")
        return
    gone = sorted(set(file.open) - set(kept))
    descriptor = os.open(file.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        moved = json.dumps({"schema": SCHEMA, "event": "moved", "ids": gone, "to": ledger.name})
        # This write is no sign of life of its owner.
        left = json.dumps({"schema": SCHEMA, "event": "left"})
        write_all(descriptor, (b"\n" if file.torn else b"") + f"{moved}\n{left}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    fault_point("moved")
    # A new name: an owner that was thought dead and wakes up finds that its file is no longer its own.
    name = f"{file.name.partition('+')[0]}+{uuid.uuid4().hex[:12]}.jsonl"
    file.path.rename(ledger.path.parent / name)
    fault_point("returned")


def fault_point(name: str) -> None:
    """Do nothing: tests end the process here, to prove that a claim may stop between any two steps."""
    del name
