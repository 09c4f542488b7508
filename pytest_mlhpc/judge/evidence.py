"""The evidence behind a verdict, as lines for people: where the time went, on which nodes, what changed since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_mlhpc.judge.baseline_files import PLACE
from pytest_mlhpc.judge.rules import SEVERITY
from pytest_mlhpc.node.protocol.schema import Measurement, RankReport
from pytest_mlhpc.store.record import WORSE, MetricVerdict, Record, Verdict, calibration_rate
from pytest_mlhpc.store.text import minutes, quantities, quantity

#: Parts of a step that a rank reports, by the names people use; each is shown when both runs have it.
_PARTS = {
    "blocked wait for data": "wait_s",
    "copy to device": "copy_s",
    "forward": "forward_s",
    "backward": "backward_s",
    "optimizer": "optimizer_s",
    "exposed communication": "exposed_communication_s",
}
#: Below this share of a step's time a part has not changed.
_NOTABLE = 0.005


def headline(metric: MetricVerdict) -> str:
    """Return ``triad 163 GB/s: 12 % below 185 (3 of 3 re-runs agree)``, or what prevented a metric from being judged."""
    if metric.baseline is None or metric.change is None:
        return f"{metric.name}: {metric.verdict.value}: {metric.reason}"
    value, baseline = quantity(metric.value, metric.unit), quantity(metric.baseline, metric.unit)
    number, _, unit = baseline.partition(" ")
    shown = number if unit == value.partition(" ")[2] else baseline
    side = "below" if metric.value < metric.baseline else "above"
    text = f"{metric.name} {value}: {100 * abs(metric.change):.3g} % {side} {shown}"
    return f"{text} ({metric.reason})" if metric.reason else text


def metric_lines(metric: MetricVerdict) -> list[str]:
    """Say what one metric did: value, baseline and how far; how wide the fence is, and what the re-runs gave."""
    lines = [headline(metric)]
    if metric.change is None:
        return lines
    detail = f"  {metric.verdict.value}"
    facts = [f"the fence is {metric.width:.1%}"] * bool(metric.width)
    facts += [f"re-runs: {quantities(metric.reruns, metric.unit)}"] * bool(metric.reruns)
    detail += f": {'; '.join(facts)}" * bool(facts)
    return [*lines, detail]


def phase_lines(now: Measurement, before: Measurement | None) -> list[str]:
    """Say which of I/O, compute and communication grew the most, per step, against an earlier run."""
    here = phases(now)
    there = phases(before) if before else {}
    shared = [name for name in here if name in there]
    if not shared:
        return []
    grown = {name: here[name] - there[name] for name in shared}
    worst = max(grown, key=lambda name: grown[name])
    step = sum(there.values())
    if step <= 0 or grown[worst] < _NOTABLE * step:
        return ["no part of a step takes longer than in the last good run"]
    figures = ", ".join(f"{name} {grown[name] * 1e3:+.3g} ms" for name in shared)
    lines = [f"{worst} is what grew: per step {figures}, of {step * 1e3:.3g} ms before"]
    parts_now, parts_before = _step_times(now), _step_times(before)
    parts = {name: parts_now[name] - parts_before[name] for name in parts_now if name in parts_before}
    notable = [
        f"{name} {change * 1e3:+.3g} ms" for name, change in parts.items() if abs(change) >= _NOTABLE * step
    ]
    return [*lines, f"  in detail: {', '.join(notable)}"] if notable else lines


def phases(measurement: Measurement | None) -> dict[str, float]:
    """Return seconds per step of I/O, compute and communication; the last only where it was measured."""
    if measurement is None or measurement.steps <= 0:
        return {}
    io, compute = measurement.metric("io_time"), measurement.metric("compute_time")
    if io is None or compute is None:
        return {}
    found = {"I/O": io.value / measurement.steps, "compute": compute.value / measurement.steps}
    communication = _step_times(measurement).get("exposed communication")
    if communication is not None:
        found["communication"] = communication
        found["compute"] -= communication
    return found


def machine_lines(attempts: Sequence[Measurement], good: Measurement | None) -> list[str]:
    """Say which nodes were used, and how the calibration kernel did."""
    text = f"nodes: {_nodes(attempts[0])}"
    if len(attempts) > 1:
        text += f"; re-runs on {', '.join(_nodes(attempt) for attempt in attempts[1:])}"
    if good is not None:
        text += f"; last good run on {_nodes(good)}"
    lines = [text]
    here, there = calibration_rate(attempts[0]), calibration_rate(good) if good else None
    if here and there:
        lines.append(f"calibration kernel: {here / there - 1.0:+.1%} against the last good run")
    return lines


def change_lines(now: Measurement, commit: str, good: Record | None) -> list[str]:
    """Say what is different since the last good record; where nothing is, blame the system."""
    if good is None or good.measurement is None:
        return ["there is no earlier good run to compare the environment with"]
    before = good.measurement.environment
    when = minutes(good.created_ns)
    changed = _changes(before, now.environment)
    commit_now, commit_before = (
        commit or now.environment.get("commit", ""),
        good.commit or before.get("commit", ""),
    )
    if commit_now != commit_before:
        changed.insert(0, f"commit {commit_before or '?'} -> {commit_now or '?'}")
    elif "yes" in {now.environment.get("commit_changed"), before.get("commit_changed")}:
        changed.insert(0, "perhaps the code: the checkout has changes that are not committed")
    since = f"since the last good run ({when})"
    if changed:
        return [f"changed {since}:", *(f"  {change}" for change in changed)]
    if commit_now:
        return [f"nothing changed {since}: same commit, same environment. Suspect the system, not the code"]
    return [f"nothing recorded changed {since}; the commit is not known"]


def explain(
    attempts: Sequence[Measurement],
    metrics: Sequence[MetricVerdict],
    *,
    last_good: Record | None,
    commit: str,
) -> tuple[str, ...]:
    """Return the whole explanation, the worst metric first; nothing when all metrics passed."""
    notable = [
        metric for metric in metrics if metric.verdict not in {Verdict.PASSED, Verdict.NEW} or metric.reason
    ]
    notable.sort(key=lambda metric: (-SEVERITY[metric.verdict], -abs(metric.change or 0.0)))
    lines = [line for metric in notable for line in metric_lines(metric)]
    trouble = {*WORSE, Verdict.SUSPECT, Verdict.INCONCLUSIVE}
    if attempts and any(metric.verdict in trouble for metric in metrics):
        good = last_good.measurement if last_good else None
        lines += phase_lines(attempts[0], good)
        lines += machine_lines(attempts, good)
        lines += change_lines(attempts[0], commit, last_good)
    return tuple(lines)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} {before.get(name, '(absent)')} -> {now.get(name, '(absent)')}"
        for name in sorted({*before, *now} - PLACE)
        if before.get(name) != now.get(name)
    ]


def _step_times(measurement: Measurement | None) -> dict[str, float]:
    """Return seconds per step of each part, of the rank that spent most on it; absent where no rank tells."""
    if measurement is None or measurement.steps <= 0:
        return {}
    found = {}
    for name, attribute in _PARTS.items():
        figures = [
            figure for rank in measurement.per_rank if (figure := _figure_of(rank, attribute)) is not None
        ]
        if figures:
            found[name] = max(figures) / measurement.steps
    return found


def _figure_of(rank: RankReport, attribute: str) -> float | None:
    figure: float | None = getattr(rank, attribute)
    return figure


def _nodes(measurement: Measurement) -> str:
    return "+".join(measurement.nodes) or "unknown"
