"""What ``mlhpc status`` prints: the last night on all systems, as a model, as lines and as data, the worst first."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_mlhpc.alert.model import NIGHT_NS as STALE_NS
from pytest_mlhpc.alert.observe import nightly, stale
from pytest_mlhpc.history.series import Night
from pytest_mlhpc.jobs.budget import hours_text
from pytest_mlhpc.store.record import INFRASTRUCTURE, Record
from pytest_mlhpc.store.text import count as counted
from pytest_mlhpc.store.text import iso, minutes, one_line
from pytest_mlhpc.store.verdict import FINE, NOTABLE, WORSE

#: Problems that are shown with their commands; of more, the number is.
MOST = 4
#: Nodes that are named.
MOST_NODES = 3


Section = Literal["act_now", "did_not_run", "watching", "recovered"]


@dataclass(frozen=True)
class TestProblem:
    """Tests of one partition that are not fine. The least ``urgency`` is told first.

    ``what`` is one line, ``command`` what to type next. ``tests`` are node ids.
    """

    urgency: int
    section: Section
    verdict: str
    system: str
    partition: str
    what: str
    command: str
    reason: str
    tests: tuple[str, ...]
    environment: str = ""

    def data(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "verdict": self.verdict,
            "tests": list(self.tests),
            "system": self.system,
            "partition": self.partition,
            "environment": self.environment,
            "reason": self.reason,
            "command": self.command,
        }


@dataclass(frozen=True)
class NodeOut:
    """A node that vetting left out, or kept jobs away from."""

    system: str
    partition: str
    node: str
    reason: str


@dataclass(frozen=True)
class OpenAlert:
    """An alert that has not ended; ``since_ns`` UTC, ``by`` who acknowledged it, or empty."""

    id: str
    since_ns: int
    what: str
    by: str = ""


@dataclass(frozen=True)
class Status:
    """One session, or one night on all systems; ``sessions`` is empty where nothing is recorded.

    ``at_ns`` is UTC. ``counts`` are of its tests by verdict. ``more`` is the command that lists its records.
    """

    kind: Literal["session", "night"]
    at_ns: int = 0
    systems: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    counts: Mapping[str, int] | None = None
    node_hours: float = 0.0
    problems: tuple[TestProblem, ...] = ()
    nodes_out: tuple[NodeOut, ...] = ()
    alerts: tuple[OpenAlert, ...] = ()
    more: str = ""

    def lines(self) -> list[str]:
        """Return at most twelve lines."""
        if not self.sessions:
            return ["the session recorded no first attempt"]
        lines = [one_line(self._head(), 240)]
        ordered = sorted(self.problems, key=lambda one: one.urgency)
        for problem in ordered[:MOST]:
            lines += [one_line(problem.what), f"  next: {one_line(problem.command, 10_000)}"]
        if len(ordered) > MOST:
            lines.append(f"and {len(ordered) - MOST} more: {self.more}")
        if self.nodes_out:
            lines.append(one_line(f"nodes out: {self._nodes()}", 240))
        if self.alerts:
            first = min(one.since_ns for one in self.alerts)
            lines.append(
                f"still open: {counted(len(self.alerts), 'alert')}, the oldest since {minutes(first)}: mlhpc alert list"
            )
        return lines

    def data(self) -> dict[str, Any]:
        """Return it for programs, in the order of the lines."""
        sections: dict[Section, list[dict[str, Any]]] = {
            "act_now": [], "did_not_run": [], "watching": [], "recovered": []
        }  # fmt: skip
        for problem in sorted(self.problems, key=lambda one: one.urgency):
            sections[problem.section].append(problem.data())
        return {
            "kind": self.kind,
            "at": iso(self.at_ns) if self.at_ns else None,
            "systems": list(self.systems),
            "sessions": list(self.sessions),
            "counts": dict(self.counts or {}),
            "node_hours": self.node_hours,
            "act_now": sections["act_now"],
            "did_not_run": sections["did_not_run"],
            "nodes_out": [vars(one) for one in self.nodes_out],
            "watching": sections["watching"],
            "still_open": [
                {"alert": one.id, "since": iso(one.since_ns), "what": one.what, "acknowledged_by": one.by}
                for one in self.alerts
            ],
            "recovered": sections["recovered"],
        }

    def _head(self) -> str:
        systems = ", ".join(self.systems)
        words = ", ".join(f"{count} {word}" for word, count in (self.counts or {}).items()) or "nothing"
        several = f", in {len(self.sessions)} sessions" if len(self.sessions) > 1 else ""
        cost = f"; {hours_text(self.node_hours)}" if self.node_hours else ""
        if self.kind == "night":
            return f"night of {minutes(self.at_ns)}, {systems}: {words}{several}{cost}"
        return f"{minutes(self.at_ns)}, {systems}, session {self.sessions[-1]}: {words}{cost}"

    def _nodes(self) -> str:
        shown = [f"{one.node} ({one_line(one.reason, 60)})" for one in self.nodes_out[:MOST_NODES]]
        rest = len(self.nodes_out) - MOST_NODES
        return ", ".join(shown) + (f" and {rest} more: mlhpc vet history" if rest > 0 else "")


def session_status(records: Sequence[Record], options: Sequence[str] = ()) -> Status:
    """Return the status of the first attempts of one session, in the order in which they were recorded.

    *options* end each command that is named: where the state lies, if not where it is looked for.
    """
    if not records:
        return Status("session")
    last = records[-1]
    return Status(
        "session",
        at_ns=last.created_ns,
        systems=tuple(sorted({one.system for one in records})),
        sessions=(last.session,),
        counts=Counter(one.verdict for one in records),
        node_hours=sum(one.node_hours for one in records),
        problems=tuple(problems_of(records, options)),
        nodes_out=nodes_out(records),
        more=shlex.join(["mlhpc", "records", "list", "--session", last.session, "--limit", "1000", *options]),
    )


def problems_of(
    records: Iterable[Record], options: Sequence[str] = (), *, not_run: bool = False
) -> list[TestProblem]:
    """Return a problem for each record that is not fine; with *not_run*, infrastructure's are called so."""
    found = []
    for record in records:
        if record.verdict in FINE:
            continue
        called, reason = record.verdict, _reason(record)
        what = reason
        if not_run and record.verdict in INFRASTRUCTURE:
            called, what = "not run", f"{record.verdict}: {reason}"
        problem = TestProblem(
            _urgency(record.verdict),
            _section(record.verdict),
            record.verdict,
            record.system,
            record.partition,
            f"{called}: {record.node_id}: {what}",
            command(record, options),
            reason,
            (record.node_id,),
            record.environment,
        )
        found.append(problem)
    return found


def nodes_out(records: Iterable[Record]) -> tuple[NodeOut, ...]:
    """Return the nodes that vetting kept from any of *records*, each once, with the last reason."""
    found: dict[tuple[str, str], NodeOut] = {}
    for record in records:
        vetting = record.vetting
        for node, reason in {**vetting.kept_out, **vetting.unfit}.items() if vetting else ():
            found[record.system, node] = NodeOut(record.system, record.partition, node, reason)
    return tuple(one for _, one in sorted(found.items()))


def command(record: Record, options: Sequence[str] = ()) -> str:
    """Return what to type next about a record that is not fine."""
    node_id = one_line(record.node_id, 10_000)
    if record.verdict in {"improved", "no_baseline"}:
        return shlex.join(["mlhpc", "baseline", "accept", node_id, "--reason", "TEXT", *options])
    if not _is_of_pytest(node_id):
        return _history_of(node_id, record.system)
    words = ["pytest", node_id, "--system", f"{record.system}:{record.partition}"]
    # A record does not say which ones would be taken by themselves, so they are always named.
    for option, value in (("--mlhpc-environment", record.environment), ("--mlhpc-preset", record.preset)):
        words += [option, value] if value else []
    return one_line(shlex.join([*words, *options_of_pytest(options)]), 10_000)


def _is_of_pytest(node_id: str) -> bool:
    """Return whether pytest can run it: records of other tools (history/ingest.py) have names of another form."""
    return "::" in node_id


def _history_of(name: str, system: str) -> str:
    return one_line(shlex.join(["mlhpc", "history", name, "--system", system]), 10_000)


def typed_here(status: Status, root_of: Mapping[str, str]) -> Status:
    """Return *status* with commands that work elsewhere than in pytest's root directory: ``(cd ROOT && pytest ...)``.

    *root_of* has the root directory of tests, by node id; a test that it does not name is left as it is.
    """

    def there(problem: TestProblem) -> TestProblem:
        root = next(filter(None, map(root_of.get, problem.tests)), "")
        if not root:
            return problem
        return replace(problem, command=f"(cd {shlex.quote(root)} && {problem.command})")

    return replace(status, problems=tuple(map(there, status.problems)))


def options_of_pytest(options: Iterable[str]) -> list[str]:
    """Return *options* of `mlhpc` as pytest calls them."""
    return [option.replace("--state-dir=", "--mlhpc-state=", 1) for option in options]


def _urgency(verdict: str) -> int:
    if verdict in WORSE:
        return WORSE.index(verdict)
    if verdict in NOTABLE:
        return 8 + NOTABLE.index(verdict)
    return 3 if verdict in INFRASTRUCTURE else 2


def _section(verdict: str) -> Section:
    if verdict in INFRASTRUCTURE:
        return "did_not_run"
    return {"suspect": "watching", "inconclusive": "watching", "improved": "recovered"}.get(
        verdict, "act_now"
    )  # type: ignore[return-value]


def _reason(record: Record) -> str:
    if record.explanation:
        return record.explanation[0]
    return record.failure.removeprefix(f"{record.verdict}: ") or "no explanation was recorded"


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


def _stale(missing: Sequence[Night], options: Sequence[str]) -> list[TestProblem]:
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
        if not _is_of_pytest(nights[0].node_id):
            command = _history_of(nights[0].node_id, system)
        reason = f"nothing recorded since {last}"
        what = f"stale: {tests}: {reason}"
        ids = tuple(night.node_id for night in nights)
        found.append(
            TestProblem(_URGENCY, "did_not_run", "stale", system, partition, what, command, reason, ids)
        )
    return found


def _word(verdict: str) -> str:
    if verdict in FINE:
        return "ok"
    return "not run" if verdict in INFRASTRUCTURE else verdict
