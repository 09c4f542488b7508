"""What has no place in the tables of throughput, and why. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pytest_mlhpc.papers.parity import Terms
from pytest_mlhpc.papers.published import Published
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import ACCEPTED
from pytest_mlhpc.report.machines import Column, Seen
from pytest_mlhpc.store.text import iso


@dataclass(frozen=True)
class Refusal:
    """Why ``who`` (machines, or systems of a published ``source``) has no figure of a workload."""

    workload: str
    who: tuple[str, ...]
    why: str
    source: str = ""


def of_machines(
    columns: Sequence[Column],
    seen: Sequence[Seen],
    shown: Sequence[Terms],
    measured: Collection[tuple[int, str]],
) -> list[Refusal]:
    """Return why machines have no line in any section of a workload; ``measured``: (place, workload) that have one."""
    found: dict[tuple[str, str], list[str]] = {}
    for workload in dict.fromkeys(terms.workload for terms in shown):
        for place, column in enumerate(columns):
            if (place, workload) not in measured:
                found.setdefault((workload, _why(column, workload, seen)), []).append(column.name)
    return [Refusal(workload, tuple(who), why) for (workload, why), who in found.items()]


def _why(column: Column, workload: str, seen: Sequence[Seen]) -> str:
    own = [one for one in seen if one.machine in column.sources | column.also and _workload(one) == workload]
    recent = [one for one in own if one.recent]
    failed = [one for one in recent if one.verdict not in ACCEPTED]
    if len(failed) < len(recent):
        return "only runs with other settings (--mlhpc-set), or without these figures"
    if failed:
        last = max(failed, key=lambda one: one.newest_ns)
        many = sum(one.recent for one in failed)
        return f"only failed: {many} run{'s' * (many > 1)}, the last {last.verdict} on {iso(last.newest_ns)[:10]}"
    if own:
        return f"not run since then; the last on {iso(max(one.newest_ns for one in own))[:10]}"
    return "never run"


def _workload(one: Seen) -> str:
    key = keys.parse(one.benchmark)
    return key.workload if key else ""


def of_published(published: Sequence[Published], shown: Sequence[Terms], parity: str) -> list[Refusal]:
    """Return published figures that no section of their workload may hold, with what differs from the nearest one."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for one in published:
        own = [one.apart(terms, parity) for terms in shown if terms.workload == one.workload]
        if own and all(own):
            nearest = min(own, key=len)
            found.setdefault((one.workload, one.source, "; ".join(nearest)), {})[one.system] = None
    return [Refusal(workload, tuple(who), why, source) for (workload, source, why), who in found.items()]
