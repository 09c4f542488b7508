"""The last night: its sessions on all systems together, what is missing, and what it cost. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from pytest_mlhpc.alert.expect import nightly, stale
from pytest_mlhpc.alert.model import NIGHT_NS as STALE_NS
from pytest_mlhpc.history.series import Night
from pytest_mlhpc.report.status_text import Problem, Status, nodes_out, options_of_pytest, problems_of
from pytest_mlhpc.store.record import INFRASTRUCTURE, Record
from pytest_mlhpc.store.text import minutes
from pytest_mlhpc.store.verdict import FINE

#: Nightly runs that are no farther apart belong to one night: the next one of a schedule comes after 24 h.
NIGHT_NS = 20 * 3600 * 10**9
#: Nights from which the schedule is learned.
LEARNT_NS = 60 * 86_400 * 10**9
#: What is missing is told after what did not run.
_URGENCY = 4


def tonight(records: Iterable[Record]) -> list[Record]:
    """Return the nightly records that are of one night with the newest, oldest first; re-runs too."""
    nights = sorted(
        (one for one in records if one.purpose == "nightly"), key=lambda one: (one.created_ns, one.id)
    )
    return [one for one in nights if one.created_ns > nights[-1].created_ns - NIGHT_NS]


def night_status(records: Sequence[Record], missing: Sequence[Night], options: Sequence[str] = ()) -> Status:
    """Return the status of the *records* of one night, and of benchmarks that are *missing* (their newest)."""
    newest: dict[tuple[str, ...], Record] = {}
    for one in records:
        if one.attempt == 0:
            newest[one.node_id, one.system, one.partition, one.environment, one.preset] = one
    counts = Counter(_word(one.verdict) for one in newest.values())
    counts.update({"stale": len(missing)} if missing else {})
    sessions = dict.fromkeys(one.session for one in records)
    one_session = ["--session", *sessions] if len(sessions) == 1 else []
    return Status(
        "night",
        at_ns=records[-1].created_ns,
        systems=tuple(sorted({one.system for one in records})),
        sessions=tuple(sessions),
        counts=counts,
        node_hours=sum(one.node_hours for one in records),
        problems=(*problems_of(newest.values(), options, not_run=True), *_stale(missing, options)),
        nodes_out=nodes_out(newest.values()),
        more=shlex.join(["mlhpc", "records", "list", *one_session, "--limit", "1000", *options]),
    )


def missing_nights(nights: Iterable[Night], default_branch: str, now_ns: int) -> list[Night]:
    """Return the newest night of each benchmark that the schedule expects and of which nothing was recorded of late."""
    seen = nightly(nights, default_branch)
    found = [seen[subject].newest for subject in stale(seen, now_ns).bad]
    silent = (
        night for night in found if night.created_ns < now_ns - STALE_NS
    )  # the others did not run, and say why
    return sorted(silent, key=lambda night: (night.created_ns, night.node_id))


def _stale(missing: Sequence[Night], options: Sequence[str]) -> list[Problem]:
    """One problem for each partition: where one test is missing, most often all are."""
    places: dict[tuple[str, str], list[Night]] = {}
    for night in missing:
        places.setdefault((night.system, night.partition), []).append(night)
    found = []
    for (system, partition), nights in places.items():
        last = minutes(max(night.created_ns for night in nights))
        tests = nights[0].node_id if len(nights) == 1 else f"{len(nights)} tests of {system}:{partition}"
        files = sorted({night.node_id.partition("::")[0] for night in nights})
        words = [nights[0].node_id] if len(nights) == 1 else files
        words = ["pytest", *words, "--system", f"{system}:{partition}", *options_of_pytest(options)]
        command = shlex.join(words)
        reason = f"nothing recorded since {last}"
        what = f"stale: {tests}: {reason}"
        ids = tuple(night.node_id for night in nights)
        found.append(Problem(_URGENCY, "did_not_run", "stale", system, partition, what, command, reason, ids))
    return found


def _word(verdict: str) -> str:
    if verdict in FINE:
        return "ok"
    return "not run" if verdict in INFRASTRUCTURE else verdict
