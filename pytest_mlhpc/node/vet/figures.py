"""PAYLOAD. All figures of a report, put together by what can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Dict, FrozenSet, Iterator, List, Mapping, Set, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Reading, Severity
from pytest_mlhpc.node.vet.report import NodeReport, Report

#: A device: host, and the device's name on it, empty for the node as a whole.
Place = Tuple[str, str]

_PREFIXES: Mapping[float, str] = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass
class Group:
    """Figures of one quantity on devices of one model: ``sample`` is any of them, ``rounds`` all, by round and place."""

    sample: Reading
    rounds: Dict[int, Dict[Place, float]] = field(default_factory=dict)
    seconds: Dict[Place, float] = field(default_factory=dict)

    def add(self, host: str, reading: Reading) -> None:
        """Take a reading in; of two for one device in one round, the later counts."""
        place = (host, reading.device)
        self.rounds.setdefault(reading.round, {})[place] = reading.value
        self.seconds[place] = self.seconds.get(place, 0.0) + reading.seconds

    @property
    def repeated(self) -> bool:
        """Whether any node has repeated it."""
        return any(number > 0 for number in self.rounds)

    def means(self) -> Dict[Place, float]:
        """Return each device's mean over the rounds that it took part in."""
        found: Dict[Place, List[float]] = {}
        for values in self.rounds.values():
            for place, value in values.items():
                found.setdefault(place, []).append(value)
        return {place: sum(values) / len(values) for place, values in found.items()}


def make_groups(report: Report) -> List[Group]:
    """Return all comparable figures in the order in which they are first met; those without model stand alone."""
    groups: Dict[Tuple[str, ...], Group] = {}
    for host, reading in _readings(report):
        if not is_figure(reading):
            continue
        alone = () if reading.model else (host, reading.device)
        key: Tuple[str, ...] = (reading.key, reading.model, reading.better, reading.unit, *alone)
        groups.setdefault(key, Group(reading)).add(host, reading)
    return list(groups.values())


def is_figure(reading: Reading) -> bool:
    """Return whether a reading's value can be compared at all: rates, times and counts are finite and not negative."""
    return math.isfinite(reading.value) and reading.value >= 0


def not_figures(report: Report) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for readings that are no figures."""
    for host, reading in _readings(report):
        if not is_figure(reading):
            where = f" of {reading.device}" if reading.device else ""
            reason = f"{reading.metric}{where} was measured as {reading.value}, which is no figure; vet again"
            yield host, blank(reading, Severity.UNKNOWN, reason, device=reading.device)


def absent_figures(report: Report, groups: List[Group]) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for nodes that say nothing of a quantity that others measured on the same model.

    A node that has hung is named for that alone; one whose check says itself that it could not tell, by that.
    """
    told = {node.host: _troubled_checks(node) for node in report.nodes}
    for group in groups:
        model, check = group.sample.model, group.sample.check
        if not model:
            continue
        places = {place for values in group.rounds.values() for place in values}
        everywhere = _on_each_device(report, model, places)
        for node in report.nodes:
            expected = node.models.get(model, 0)
            wanted = expected if everywhere else min(expected, 1)
            got = sum(place[0] == node.host for place in places)
            if got >= wanted or node.missing or check in told[node.host]:
                continue
            reason = (
                f"{group.sample.metric} was measured on {got} of {wanted} devices of model {model}; vet again"
            )
            yield node.host, blank(group.sample, Severity.UNKNOWN, reason)


def blank(reading: Reading, severity: Severity, reason: str, device: str = "") -> Finding:
    """Return a finding on a quantity, without a value."""
    return Finding(
        check=reading.check,
        severity=severity,
        reason=reason,
        device=device,
        rule="measured",
        metric=reading.metric,
        unit=reading.unit,
    )


def _readings(report: Report) -> Iterator[Tuple[str, Reading]]:
    for node in report.nodes:
        for outcome in node.outcomes:
            for reading in outcome.readings:
                yield node.host, reading


def _troubled_checks(node: NodeReport) -> FrozenSet[str]:
    findings = (finding for outcome in node.outcomes for finding in outcome.findings)
    return frozenset(
        finding.check for finding in findings if finding.severity in {Severity.CRITICAL, Severity.UNKNOWN}
    )


def _on_each_device(report: Report, model: str, places: Set[Place]) -> bool:
    """Return whether some node with several such devices measured all: else the check looks at one of them only."""
    several = [node for node in report.nodes if node.models.get(model, 0) > 1]
    return any(sum(place[0] == node.host for place in places) >= node.models[model] for node in several)


def spell(value: float, unit: str) -> str:
    """Return a figure for people: ``612.3 TFLOP/s``, ``0.41 s``, ``12 pages``."""
    if unit in {"FLOP/s", "B/s", "B", "Hz", "1/s"}:
        for factor, prefix in _PREFIXES.items():
            if value >= factor:
                return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".rstrip()
