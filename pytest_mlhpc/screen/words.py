"""Findings as at most ten lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_mlhpc.screen.findings import Finding, Seen
from pytest_mlhpc.screen.text import many, percent, seconds_text

#: Lines in all, the first and the last included.
LINES = 10


def lines(what: str, seen: Seen, findings: Sequence[Finding], missing: Sequence[str]) -> list[str]:
    """Return the report: what was looked at; what limits it, the largest share first; what could not be seen."""
    told = [_line(number, one) for number, one in enumerate(findings[: LINES - 2], 1)]
    if not told:
        told = ["nothing stands out: no share of the time above 10 % could be laid on any one thing"]
    last = [f"not seen: {'; '.join(missing)}"] if missing else []
    return [f"screened {_scale(what, seen)}", *told, *last]


def _scale(what: str, seen: Seen) -> str:
    words = [many(len(seen.ranks), "rank"), "on", many(len(seen.nodes), "node")]
    steps = [step for rank in seen.ranks if rank.told is not None for step, _ in rank.told.steps()]
    text = f"{what} for {seconds_text(seen.seconds)}: {' '.join(words)}"
    if seen.devices:
        text += f", {len(seen.devices)} x {seen.devices[0].model}"
    if steps:
        text += f", {seconds_text(sum(steps) / len(steps))} a step"
    cost = max((node.cost for node in seen.nodes), default=0.0)
    return f"{text}; looking took {100 * cost:.1f} % of a core"


def _line(number: int, finding: Finding) -> str:
    sure = "" if finding.certain else " (seen from outside)"
    share = f" {percent(finding.share)}" if finding.share >= 0.005 else ""
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{number}. {finding.kind}{share}{sure}: {finding.text}{advice}"
