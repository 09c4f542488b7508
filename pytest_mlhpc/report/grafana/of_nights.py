"""Dashboards of nights and of nodes: what became of the runs, whatever they measured. Pure."""

from __future__ import annotations

from typing import Final

from pytest_mlhpc.influx.schema import RUN
from pytest_mlhpc.report.grafana.common import CHOSEN, FIRST, PARTITION, common_variables
from pytest_mlhpc.report.grafana.frame import Dashboard, dashboard
from pytest_mlhpc.report.grafana.panels import diagram, number, rows
from pytest_mlhpc.report.grafana.query import MOST_ROWS, Column, Conditions, OneOf, Query, select
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE
from pytest_mlhpc.store.verdict import WORSE, Verdict

#: Verdicts that nobody has to look at.
_FINE: Final = tuple(
    one.value for one in (Verdict.PASSED, Verdict.IMPROVED, Verdict.NEW, Verdict.SUSPECT, Verdict.UNJUDGED)
)
SLOWER: Final = tuple(one.value for one in WORSE)
_BROKEN: Final = tuple(
    name for name in FAILURES if name not in {*SLOWER, "cancelled", "detached", "cannot_lower"}
)


def _runs(where: Conditions = FIRST, *, by: tuple[str, ...] = (), alias: str = "") -> Query:
    """Return how many runs there were on each day."""
    return select(RUN, [Column("id", "count")], where, by=by, every="1d", alias=alias)


def _daily(column: Column, where: Conditions) -> Query:
    """Return one figure of each partition for each day."""
    return select(RUN, [column], where, by=("system", "partition"), every="1d", alias=PARTITION)


def _with(*verdicts: str) -> Conditions:
    return {**FIRST, "verdict": OneOf(verdicts)}


def nights() -> Dashboard:
    """Return what became of the runs of each night: verdicts, failures, node-hours, waiting."""
    return dashboard(
        "mlhpc-nights",
        "Benchmarks: nights",
        text="What became of the runs of each night on each system.",
        variables=common_variables(),
        panels=[
            number("Runs", _runs(), text="First attempts in the time range."),
            number("Slower than they were", _runs(_with(*SLOWER)), text="Runs that regressed, drifted, or missed a reference."),
            number("Broken", _runs(_with(*_BROKEN)), text="Runs that failed, or were not what was asked."),
            number(
                "Prevented by the system",
                _runs(_with(*INFRASTRUCTURE)),
                text="Runs that the system kept from measuring.",
            ),
            diagram("Runs by verdict", [_runs(by=("verdict",), alias="$tag_verdict")], bars=True, by_verdict=True),
            diagram(
                "Runs by system",
                [_daily(Column("id", "count"), FIRST)],
                bars=True,
                text="A night without bars did not run.",
            ),
            diagram(
                "Node-hours charged",
                [_daily(Column("node_hours", "sum"), CHOSEN)],
                unit="suffix: node-hours",
                bars=True,
                text="Re-runs included.",
            ),
            diagram("Longest wait in the queue", [_daily(Column("queue_s", "max"), FIRST)], unit="s"),
            rows(
                "What was not fine",
                select(
                    RUN,
                    [
                        Column(name)
                        for name in (
                            "system", "partition", "benchmark", "verdict", "failure", "nodes", "commit", "job_id", "id",
                        )
                    ],
                    {**FIRST, "verdict": OneOf(_FINE, negated=True)},
                    table=True,
                    newest=MOST_ROWS,
                ),
                text="Newest first. `mlhpc records show ID` has all that is known of one.",
                size=(24, 12),
            ),
            rows(
                "Last run of each benchmark",
                select(RUN, [Column("id", "last", "id")], FIRST, by=("system", "partition", "benchmark"), table=True),
                text="What has not run for long stands out by its time; `mlhpc alert send --expect nightly` tells of it.",
                size=(24, 9),
            ),
        ],
        since="now-30d",
    )  # fmt: skip


def nodes() -> Dashboard:
    """Return what vetting left out, what failed for the system's sake, and on which nodes runs were."""
    return dashboard(
        "mlhpc-nodes",
        "Benchmarks: nodes",
        text="Nodes that vetting left out, and runs that the system kept from measuring.",
        variables=common_variables(),
        panels=[
            diagram(
                "Nodes that vetting left out",
                [_daily(Column("unfit_count", "max"), CHOSEN)],
                bars=True,
                text="The most of one run of a day.",
            ),
            diagram(
                "Prevented by the system",
                [_runs(_with(*INFRASTRUCTURE), by=("verdict", "system"), alias="$tag_verdict $tag_system")],
                bars=True,
            ),
            rows(
                "Runs and their nodes",
                select(
                    RUN,
                    [
                        Column(name)
                        for name in (
                            "system", "partition", "verdict", "nodes", "unfit", "failure", "job_id", "node_hours", "benchmark",
                        )
                    ],
                    CHOSEN,
                    table=True,
                    newest=MOST_ROWS,
                ),
                units={"node_hours": "suffix: h"},
                text="Newest first; `unfit` says which nodes were left out, and why.",
                size=(24, 14),
            ),
        ],
    )  # fmt: skip
