"""What JUnit files and other readers of reports are told of a run: plain (name, value) properties."""

from __future__ import annotations

from pytest_mlhpc.jobs.outcome import Outcome


def properties(outcome: Outcome) -> list[tuple[str, object]]:
    """Return benchmark, run id, verdict, and each metric as ``mlhpc.metric.NAME`` with its unit."""
    found: list[tuple[str, object]] = [
        ("mlhpc.benchmark", outcome.benchmark),
        ("mlhpc.run", outcome.record_id),
        ("mlhpc.attempts", outcome.attempts),
    ]
    if outcome.failure is not None:
        found.append(("mlhpc.failure", outcome.failure.outcome))
    if outcome.judgement is not None:
        found.append(("mlhpc.verdict", outcome.judgement.verdict.value))
    if outcome.vetting is not None:
        found.append(("mlhpc.fit", ",".join(outcome.vetting.good)))
        found.append(("mlhpc.unfit", ",".join(outcome.vetting.exclude)))
    if outcome.held is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.held.nodes)))
    if outcome.measurement is not None:
        found.append(("mlhpc.nodes", ",".join(outcome.measurement.nodes)))
        found.extend(
            (f"mlhpc.metric.{metric.name}", f"{metric.value!r} {metric.unit}")
            for metric in outcome.measurement.metrics
        )
    return found
