"""`--max-age`: what nodes said a short while ago is used again, if the node has not been booted since and could be used.

Only what belongs to the node is kept; what belongs to a job (limits, paths, variables) is looked at anew each time.
A node that was not to be used is vetted again: it may have been mended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.schema import SCHEMA, to_json
from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import Exit, NodeReport, Outcome, PairResult
from pytest_mlhpc.node.vet.policy import Wanted
from pytest_mlhpc.vetting.history import Vetting
from pytest_mlhpc.vetting.journal import REPORTS, Query, append, day_of, days_since, entries_of_day

#: Oldest result that may be used again, in seconds: what lies longer is taken away by the next vetting.
MOST_AGE_S = 3 * 86400.0


@dataclass(frozen=True)
class ReportEntry:
    """All that one good node said in one vetting; ``digest`` is of what was asked (:func:`digest`), ``pairs`` its exchanges."""

    vetting: str
    at_ns: int
    system: str
    partition: str
    digest: str
    level: str
    report: NodeReport
    pairs: tuple[PairResult, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True)
class Recalled:
    """What need not be measured again: nodes by host, to be used only where ``NodeReport.boot_id`` is that of the node now.

    ``pairs`` are the exchanges between nodes of one and the same vetting; empty unless all hosts asked for were in it.
    """

    nodes: dict[str, NodeReport]
    pairs: tuple[PairResult, ...] = ()
    age_s: float = 0.0  #: of the oldest


def max_age(text: str) -> float:
    """Return seconds of what --max-age says; 0 for an empty text.

    Raises:
        UsageError: it is no time, or longer than results are kept.
    """
    if not text:
        return 0.0
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--max-age: {error}") from error
    if seconds > MOST_AGE_S:
        raise UsageError(
            f"--max-age {text}: results are kept for {MOST_AGE_S / 3600:.0f} hours; ask for less"
        )
    return seconds


def remember(state_dir: Path, vetting: Vetting, job_checks: Collection[str], writer: str = "") -> None:
    """Keep what the good nodes of a vetting said, and take away what is too old to be used.

    Args:
        state_dir: the state directory, shared by whoever is to use it.
        vetting: with its report; without one nothing is kept.
        job_checks: names of checks that look at a job (``Check.purpose`` is job): left out.
        writer: as of ``history.keep``.

    Raises:
        StoreError: it cannot be written.
    """
    report, verdict = vetting.report, vetting.verdict
    if report is None or verdict.exit in {Exit.USAGE, Exit.INTERNAL}:
        return
    good = set(verdict.good)
    sum_ = digest(vetting.settings)
    entries = [
        ReportEntry(
            vetting.id, vetting.at_ns, vetting.system, vetting.partition, sum_, report.level,
            _without(node, job_checks), tuple(pair for pair in report.pairs if pair.first == node.host),
        )
        for node in report.nodes
        if node.host in good and node.boot_id and not node.missing
    ]  # fmt: skip
    append(state_dir, REPORTS, writer or vetting.id, vetting.at_ns, entries)
    _forget(state_dir, vetting.at_ns)


def recall(
    state_dir: Path,
    settings: Settings,
    hosts: Collection[str],
    *,
    max_age_s: float,
    now_ns: int,
    system: str = "",
    partition: str = "",
    on_problem: Callable[[str], None] | None = None,
) -> Recalled:
    """Return the latest results of *hosts* that are young enough, of this level or a closer one, with equal wishes and bounds.

    Nothing here can see a node: who uses a report compares its ``boot_id`` with that of the node first.
    """
    found: dict[str, ReportEntry] = {}
    wanted, levels = set(hosts), {"deep"} if settings.level == "deep" else {"quick", "deep"}
    where = {"digest": digest(settings), "system": system, "partition": partition}
    query = Query(now_ns - int(max_age_s * 1e9), now_ns, where, on_problem)
    days = days_since(state_dir, REPORTS, query) if max_age_s > 0 else []
    for entry in (one for day in days for one in entries_of_day(state_dir, REPORTS, day, ReportEntry, query)):
        host = entry.report.host
        if (
            host in wanted
            and entry.level in levels
            and (host not in found or entry.at_ns > found[host].at_ns)
        ):
            found[host] = entry
    one = len({entry.vetting for entry in found.values()}) == 1 and set(found) == wanted
    pairs = [pair for entry in found.values() for pair in entry.pairs if pair.second in wanted] if one else []
    oldest = min((entry.at_ns for entry in found.values()), default=now_ns)
    return Recalled(
        {host: entry.report for host, entry in found.items()},
        tuple(sorted(pairs, key=lambda pair: (pair.stage == "confirm", pair.round))),
        max(0.0, (now_ns - oldest) / 1e9),
    )


def digest(settings: Settings) -> str:
    """Return a hash of all that changes what a node is asked and how it is judged on the spot, and of our own version."""
    about_nodes = replace(
        settings.wanted, purpose="", hours=0.0, ranks=0, paths={}, checkpoint_bytes=Wanted().checkpoint_bytes
    )
    asked = {
        "wanted": to_json(about_nodes),
        "bounds": sorted(json.dumps(to_json(bound), sort_keys=True) for bound in settings.bounds),
        "single": settings.single,
        "no_load": settings.no_load,
        "version": metadata.version("pytest-mlhpc"),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _without(node: NodeReport, job_checks: Collection[str]) -> NodeReport:
    """Return a node's report without what its job's checks said."""
    names = set(job_checks)
    outcomes = [
        Outcome(
            tuple(one for one in outcome.findings if one.check not in names),
            tuple(one for one in outcome.readings if one.check not in names),
            tuple(one for one in outcome.facts if one.check not in names),
            outcome.seconds,
        )
        for outcome in node.outcomes
    ]
    left = [outcome for outcome in outcomes if outcome.findings or outcome.readings or outcome.facts]
    return replace(node, outcomes=tuple(left))


def _forget(state_dir: Path, now_ns: int) -> None:
    """Take away the files of days that nobody can ask for any more; others' that we may not remove stay."""
    first = day_of(now_ns - int(MOST_AGE_S * 1e9))
    folder = state_dir / "vetting" / REPORTS
    with contextlib.suppress(OSError):
        for path in [path for path in folder.glob("*/*.jsonl") if path.parent.name < first]:
            with contextlib.suppress(OSError):
                path.unlink()
                path.parent.rmdir()  # only once it is empty
