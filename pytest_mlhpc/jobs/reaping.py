"""Ending what nobody watches any more: own allocations whose lease has expired. Others' are never touched."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.jobs.ledger import Adoption, Ledger, adopt
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry

#: Ends one allocation and says what it did; raises MlhpcError or OSError where it could not, or is not sure.
Reaper = Callable[[LedgerEntry], str]
#: Makes the reaper of a scheduler for some allocations at once, so that it can ask and cancel in one call each.
Prepare = Callable[[Sequence[LedgerEntry]], Reaper]


class NotYet(MlhpcError):  # noqa: N818 - what a reaper says, not what went wrong
    """Nothing is wrong with an allocation, but it cannot be ended now or here."""


@dataclass(frozen=True)
class Reaped:
    """What became of one allocation. Where it was not ``ended``, it stays in the ledger for the next session.

    ``later``: nothing is wrong with that; it is ended at another time or place.
    """

    entry: LedgerEntry
    why: str  #: it had expired
    done: str
    ended: bool
    later: bool = False

    def __str__(self) -> str:
        """Return one line: job name, id, partition, why it had expired, what was done."""
        return f"{describe(self.entry)}: {self.why}: {self.done}"


def describe(entry: LedgerEntry) -> str:
    """Return name, the scheduler's id and the partition of *entry*."""
    native = f" (job {entry.native_id})" if entry.native_id else ""
    return f"{entry.job_name or entry.id}{native} on {entry.partition}"


def reap_expired_leases(
    ledger: Ledger,
    reapers: Mapping[str, Prepare],
    wanted: Callable[[LedgerEntry], bool] = lambda _entry: False,
    reachable: Callable[[LedgerEntry], bool] = lambda _entry: True,
) -> tuple[Adoption, list[Reaped]]:
    """Take over for *ledger* what *wanted* says, and end what has expired. *reapers* are by name of scheduler.

    What is not *reachable* (a job of another cluster) is left as it is, whatever *wanted* says.

    Raises:
        StoreError: the ledgers cannot be listed or the own one cannot be written; nothing is lost.
    """
    adoption = adopt(ledger, wanted, reachable)
    return adoption, reap(ledger, adoption.expired, adoption.why, reapers)


def reap(
    ledger: Ledger, expired: Iterable[LedgerEntry], why: Mapping[str, str], reapers: Mapping[str, Prepare]
) -> list[Reaped]:
    """End *expired*, which *ledger* holds, and note there what has ended."""
    by_scheduler: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in expired:
        by_scheduler[entry.scheduler].append(entry)
    found = []
    for scheduler, entries in by_scheduler.items():
        reaper = prepared(reapers.get(scheduler), scheduler, entries)
        found += [
            _one(ledger, entry, why.get(entry.id, "its lease has expired"), reaper) for entry in entries
        ]
    return found


def prepared(prepare: Prepare | None, scheduler: str, entries: Sequence[LedgerEntry]) -> Reaper:
    """Return the reaper that *prepare* makes for *entries*; one that says why where it cannot."""
    if prepare is None:
        return _refusing(f"no installed provisioner can end jobs of scheduler {scheduler!r}")
    try:
        return prepare(entries)
    except (MlhpcError, OSError) as error:
        return _refusing(str(error))


def _refusing(text: str) -> Reaper:
    def refuse(_entry: LedgerEntry) -> str:
        raise MlhpcError(text)

    return refuse


def _one(ledger: Ledger, entry: LedgerEntry, why: str, reaper: Reaper) -> Reaped:
    try:
        done = reaper(entry)
    except NotYet as error:
        return Reaped(entry, why, f"not ended, stays in the ledger: {error}", ended=False, later=True)
    except (MlhpcError, OSError) as error:
        return Reaped(entry, why, f"not ended, stays in the ledger: {error}", ended=False)
    done += _without_data(ledger.state_dir, entry)
    try:
        ledger.ended(entry.id)
    except StoreError as error:
        return Reaped(entry, why, f"{done}, but {error}", ended=False)
    return Reaped(entry, why, done, ended=True)


def _without_data(state_dir: Path, entry: LedgerEntry) -> str:
    """Remove the synthetic data set that a run made for itself; plan and logs stay."""
    folder = (
        Path(entry.directory) if entry.directory else state_dir / "runs" / (entry.session or "-") / entry.id
    )
    if not folder.is_absolute() or folder.name != entry.id:
        return ""  # no folder of ours
    try:
        shutil.rmtree(folder / "data")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"; {error.filename} cannot be removed: {error.strerror}; please do"
    return ""
