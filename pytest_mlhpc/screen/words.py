"""Findings as at most ten lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def data(what: str, seen: Seen | None, findings: Sequence[Finding], missing: Sequence[str]) -> dict[str, Any]:
    """Return the report for programs; times are in seconds, shares of 1. Without *seen*, nothing was found out."""
    steps = _steps(seen) if seen else []
    return {
        "what": what,
        "seconds": seen.seconds if seen else 0.0,
        "ranks": len(seen.ranks) if seen else 0,
        "nodes": len(seen.nodes) if seen else 0,
        "devices": [one.model for one in seen.devices] if seen else [],
        "step_s": sum(steps) / len(steps) if steps else None,
        "looking": _cost(seen) if seen else 0.0,
        "findings": [vars(one) for one in findings],
        "not_seen": list(missing),
    }


def _steps(seen: Seen) -> list[float]:
    return [step for rank in seen.ranks if rank.told is not None for step, _ in rank.told.steps()]


def _cost(seen: Seen) -> float:
    """Return what looking took, of one core."""
    return max((node.cost for node in seen.nodes), default=0.0)


def _scale(what: str, seen: Seen) -> str:
    words = [many(len(seen.ranks), "rank"), "on", many(len(seen.nodes), "node")]
    steps = _steps(seen)
    text = f"{what} for {seconds_text(seen.seconds)}: {' '.join(words)}"
    if seen.devices:
        text += f", {len(seen.devices)} x {seen.devices[0].model}"
    if steps:
        text += f", {seconds_text(sum(steps) / len(steps))} a step"
    return f"{text}; looking took {100 * _cost(seen):.1f} % of a core"


def _line(number: int, finding: Finding) -> str:
    sure = "" if finding.certain else " (seen from outside)"
    share = f" {percent(finding.share)}" if finding.share >= 0.005 else ""
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{number}. {finding.kind}{share}{sure}: {finding.text}{advice}"
