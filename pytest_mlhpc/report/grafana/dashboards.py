"""The dashboards: one benchmark over time, systems beside each other, nights, and nodes."""

from __future__ import annotations

from typing import Any, Final

from pytest_mlhpc.influx.schema import METRIC, RUN
from pytest_mlhpc.report.grafana.panels import (
    CHOSEN,
    FIRST,
    MOST_ROWS,
    PARTITION,
    ChosenValue,
    Conditions,
    Dashboard,
    OneOf,
    Panel,
    PanelQuery,
    QueryColumn,
    annotation,
    common_variables,
    dashboard,
    diagram,
    number,
    rows,
    select,
    variable,
)
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


def _runs(where: Conditions = FIRST, *, by: tuple[str, ...] = (), alias: str = "") -> PanelQuery:
    """Return how many runs there were on each day."""
    return select(RUN, [QueryColumn("id", "count")], where, by=by, every="1d", alias=alias)


def _daily(column: QueryColumn, where: Conditions) -> PanelQuery:
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
                text="Runs that the system prevented.",
            ),
            diagram("Runs by verdict", [_runs(by=("verdict",), alias="$tag_verdict")], bars=True, by_verdict=True),
            diagram(
                "Runs by system",
                [_daily(QueryColumn("id", "count"), FIRST)],
                bars=True,
                text="A night without bars did not run.",
            ),
            diagram(
                "Node-hours charged",
                [_daily(QueryColumn("node_hours", "sum"), CHOSEN)],
                unit="suffix: node-hours",
                bars=True,
                text="Re-runs included.",
            ),
            diagram("Longest wait in the queue", [_daily(QueryColumn("queue_s", "max"), FIRST)], unit="s"),
            rows(
                "What was not fine",
                select(
                    RUN,
                    [
                        QueryColumn(name)
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
                select(RUN, [QueryColumn("id", "last", "id")], FIRST, by=("system", "partition", "benchmark"), table=True),
                text="What has not run for long stands out by its time; `mlhpc alert send --expect nightly` reports it.",
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
        text="Nodes that vetting left out, and runs that the system prevented.",
        variables=common_variables(),
        panels=[
            diagram(
                "Nodes that vetting left out",
                [_daily(QueryColumn("unfit_count", "max"), CHOSEN)],
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
                        QueryColumn(name)
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


_ONE: Final[Conditions] = {
    **FIRST,
    "partition": ChosenValue("partition"),
    "benchmark": ChosenValue("benchmark"),
}
_MACHINE: Final = ("system", "partition", "environment", "device_model", "definition")
_ALIAS: Final = f"{PARTITION} $tag_environment $tag_device_model $tag_definition"
_METRIC: Final[Conditions] = {**_ONE, "metric": ChosenValue("metric")}


def benchmark() -> Dashboard:
    """Return one benchmark over time: each metric, its weekly median, and where the time goes."""
    return dashboard(
        "mlhpc-benchmark",
        "Benchmarks: one over time",
        text="One benchmark: its metrics over time on each system, and where the time goes.",
        variables=_variables_of_one(),
        annotations=[_slower()],
        panels=[_over_time(), *_where_time_goes(), _memory_and_energy(), _figures()],
    )


def _variables_of_one() -> list[dict[str, Any]]:
    """Return the choice of one benchmark, of partitions and metrics."""
    machine: Conditions = {"system": ChosenValue("system"), "partition": ChosenValue("partition")}
    return [
        *common_variables(),
        variable("partition", RUN, where={"system": ChosenValue("system")}),
        variable("benchmark", METRIC, where=machine, one=True),
        variable(
            "metric",
            METRIC,
            where={**machine, "benchmark": ChosenValue("benchmark")},
            chosen=("effective_throughput", "compute_throughput"),
        ),
    ]


def _slower() -> dict[str, Any]:
    """Return marks where the benchmark was worse than it may be, with the judge's words."""
    query = select(RUN, [QueryColumn("failure"), QueryColumn("verdict")], {**_ONE, "verdict": OneOf(SLOWER)})
    return annotation("slower", query, text="failure", tags="verdict", colour="red")


def _over_time() -> Panel:
    """Return a diagram for each chosen metric."""
    by = (*_MACHINE, "unit")
    alias = f"{_ALIAS} [$tag_unit]"
    week = QueryColumn("value", "median")
    return diagram(
        "$metric",
        [
            select(METRIC, [QueryColumn("value")], _METRIC, by=by, alias=alias),
            select(METRIC, [week], _METRIC, by=by, every="7d", alias=f"{_ALIAS}, median of a week"),
        ],
        text="Each point is the first attempt of a run; the second line has the median of each week.",
        size=(12, 9),
        repeat="metric",
    )


def _where_time_goes() -> list[Panel]:
    """Return what a training epoch and a step are made of."""
    return [
        diagram(
            "Training epoch",
            [_stacked(("io_time", "compute_time"))],
            unit="s",
            bars=True,
            text="I/O time is the blocked wait for data and the copy to the device; compute time is the rest.",
        ),
        diagram(
            "Step",
            [_stacked(("forward_time", "backward_time", "optimizer_time"))],
            unit="s",
            bars=True,
            text="Of the rank that waited least for others.",
        ),
        diagram(
            "Communication that computing did not hide, and late ranks",
            [_stacked(("exposed_communication_time", "rank_skew"))],
            unit="s",
            text="Of a step; runs of several ranks only.",
        ),
    ]


def _memory_and_energy() -> Panel:
    where: Conditions = {**_ONE, "metric": OneOf(("peak_memory", "energy"))}
    by = ("metric", "unit", *_MACHINE)
    alias = f"$tag_metric [$tag_unit] {_ALIAS}"
    return diagram("Memory and energy", [select(METRIC, [QueryColumn("value")], where, by=by, alias=alias)])


def _figures() -> Panel:
    """Return the table behind the diagrams."""
    names = (
        "system", "partition", "device_model", "metric", "value", "unit", "verdict", "nodes", "commit", "branch", "id",
    )  # fmt: skip
    return rows(
        "Runs",
        select(METRIC, [QueryColumn(name) for name in names], _METRIC, table=True, newest=MOST_ROWS),
        text="Newest first: which node and which commit a figure is of.",
    )


def _stacked(metrics: tuple[str, ...]) -> PanelQuery:
    """Return the query for metrics that are parts of one time; their points have the same times, so that they stack."""
    return select(
        METRIC,
        [QueryColumn("value")],
        {**_ONE, "metric": OneOf(metrics)},
        by=("metric", *_MACHINE),
        alias=f"$tag_metric {_ALIAS}",
    )


#: Metrics of the HPDC'24 paper (Rae et al.), and energy: title, unit in Grafana's words, what it is.
_TITLES: Final = {
    "compute_throughput": ("Compute throughput", "suffix: samples/s", "Samples / (training epoch - I/O time)."),
    "compute_fraction": ("Compute fraction", "percentunit", "(Training epoch - I/O time) / training epoch."),
    "effective_throughput": ("Effective throughput", "suffix: samples/s", "Samples / training epoch."),
    "energy_efficiency": ("Energy", "suffix: samples/J", "Samples by joule, where the devices report it."),
}  # fmt: skip
_BESIDE: Final = ("system", "partition", "device_model", "benchmark", "definition")


def systems() -> Dashboard:
    """Return the three tables of the HPDC'24 paper over time: systems beside each other for one workload."""
    return dashboard(
        "mlhpc-systems",
        "Benchmarks: systems beside each other",
        text="Only figures of one definition are comparable; it stands behind the test by its digest.",
        variables=[
            *common_variables(),
            variable("benchmark", METRIC, where={"system": ChosenValue("system")}),
        ],
        panels=[
            *map(_all_systems, _TITLES),
            *map(_medians, ("compute_throughput", "compute_fraction", "effective_throughput")),
        ],
    )


def _of(metric: str) -> Conditions:
    return {**FIRST, "benchmark": ChosenValue("benchmark"), "metric": OneOf((metric,))}


def _all_systems(metric: str) -> Panel:
    """Return one metric of all systems over time."""
    title, unit, text = _TITLES[metric]
    alias = f"{PARTITION} $tag_device_model $tag_benchmark $tag_definition"
    query = select(METRIC, [QueryColumn("value")], _of(metric), by=_BESIDE, alias=alias)
    return diagram(title, [query], unit=unit, text=text)


def _medians(metric: str) -> Panel:
    """Return the median of one metric of all systems."""
    title, unit, _text = _TITLES[metric]
    columns = [QueryColumn("value", "median", "median"), QueryColumn("value", "count", "runs")]
    return rows(
        f"{title}: median",
        select(METRIC, columns, _of(metric), by=_BESIDE, table=True),
        units={"median": unit},
        text="Over the time range. `mlhpc papers tables` adds intervals and published figures.",
        size=(8, 9),
    )


def all_dashboards() -> dict[str, Dashboard]:
    """Return every dashboard by the name of its file."""
    made = [nights(), benchmark(), systems(), nodes()]
    return {f"{one['uid']}.json": one for one in made}
