"""The dashboards: one benchmark over time, one series and its fence, systems beside each other, nights, and nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_mlhpc.influx.schema import EVENT, METRIC, RUN
from pytest_mlhpc.report.grafana.panels import (
    CHOSEN,
    FIRST,
    MOST_ROWS,
    PARTITION,
    ChosenValue,
    Conditions,
    Dashboard,
    DataLink,
    IsFalse,
    OneOf,
    Panel,
    PanelQuery,
    QueryColumn,
    Threshold,
    annotation,
    cell_links,
    common_variables,
    dashboard,
    diagram,
    number,
    rows,
    select,
    variable,
)
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE
from pytest_mlhpc.store.verdict import GOOD, WORSE, Verdict

#: Verdicts that nobody has to look at.
_FINE: Final = tuple(one.value for one in (*GOOD, Verdict.SUSPECT, Verdict.UNJUDGED))
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


def _events(where: Conditions) -> list[dict[str, Any]]:
    """Return marks for events where *where* says; those of commits and of other software at first only on demand."""
    marks = (
        ("changes of systems", ("change",), "purple", True),
        ("maintenance", ("maintenance",), "blue", True),
        ("alerts", ("alert_opened", "alert_closed"), "orange", True),
        ("acknowledgements", ("alert_acknowledged", "alert_unacknowledged"), "yellow", False),
        ("software", ("environment",), "purple", False),
        ("commits", ("commit",), "text", False),
    )
    columns = [QueryColumn("text"), QueryColumn("kind"), QueryColumn("until_ns", name="until_ms", per=10**6)]
    found = []
    for name, kinds, colour, shown in marks:
        ends = name == "maintenance"
        query = select(
            EVENT,
            columns if ends else columns[:2],
            {**where, "kind": OneOf(kinds), "removed": IsFalse()},
        )
        found.append(
            annotation(
                name,
                query,
                text="text",
                tags="kind",
                colour=colour,
                until="until_ms" if ends else "",
                shown=shown,
            )
        )
    return found


#: Events of the chosen systems; of the chosen partitions and of whole systems.
_SYSTEM_EVENTS: Final[Conditions] = {"system": ChosenValue("system")}
_PARTITION_EVENTS: Final[Conditions] = {
    **_SYSTEM_EVENTS,
    "partition": ChosenValue("partition", or_none=True),
}


def nights(links: Sequence[DataLink]) -> Dashboard:
    """Return what became of the runs of each night: verdicts, failures, node-hours, waiting."""
    return dashboard(
        "mlhpc-nights",
        "Benchmarks: nights",
        text="What became of the runs of each night on each system.",
        variables=common_variables(),
        annotations=_events(_SYSTEM_EVENTS),
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
                            "system", "partition", "benchmark", "verdict", "failure", "nodes", "commit", "job_id", "pipeline", "id",
                        )
                    ],
                    {**FIRST, "verdict": OneOf(_FINE, negated=True)},
                    table=True,
                    newest=MOST_ROWS,
                ),
                links=links,
                text="Newest first. `mlhpc records show ID` has all that is known of one.",
                size=(24, 12),
            ),
            rows(
                "Last run of each benchmark",
                select(RUN, [QueryColumn("id", "last", "id")], FIRST, by=("system", "partition", "benchmark"), table=True),
                links=links,
                text="What has not run for long stands out by its time; `mlhpc alert send --expect nightly` reports it.",
                size=(24, 9),
            ),
        ],
        since="now-30d",
    )  # fmt: skip


def nodes(links: Sequence[DataLink]) -> Dashboard:
    """Return what vetting left out, what failed for the system's sake, and on which nodes runs were."""
    return dashboard(
        "mlhpc-nodes",
        "Benchmarks: nodes",
        text="Nodes that vetting left out, and runs that the system prevented.",
        variables=common_variables(),
        annotations=_events(_SYSTEM_EVENTS),
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
                links=links,
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
#: The metrics that are chosen at first.
_USUAL_METRICS: Final = ("effective_throughput", "compute_throughput")
_METRIC: Final[Conditions] = {**_ONE, "metric": ChosenValue("metric")}


def benchmark(links: Sequence[DataLink]) -> Dashboard:
    """Return one benchmark over time: each metric, its weekly median, and where the time goes."""
    return dashboard(
        "mlhpc-benchmark",
        "Benchmarks: one over time",
        text="One benchmark: its metrics over time on each system, and where the time goes.",
        variables=_variables_of_one(),
        annotations=[_slower(_ONE), *_events(_PARTITION_EVENTS)],
        panels=[
            _over_time(),
            _fence_used(_METRIC),
            *_where_time_goes(),
            _memory_and_energy(),
            _figures(_METRIC, links),
        ],
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
            chosen=_USUAL_METRICS,
        ),
    ]


def _slower(where: Conditions) -> dict[str, Any]:
    """Return marks where the benchmark was worse than it may be, with the judge's words."""
    query = select(RUN, [QueryColumn("failure"), QueryColumn("verdict")], {**where, "verdict": OneOf(SLOWER)})
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


def _fence_used(where: Conditions) -> Panel:
    """Return how far figures are from their accepted values, in a unit that is the same for all: the width of the fence."""
    query = select(
        METRIC, [QueryColumn("fence_used")], where, by=("metric", *_MACHINE), alias=f"$tag_metric {_ALIAS}"
    )
    return diagram(
        "Loss as a share of the fence",
        [query],
        unit="percentunit",
        thresholds=(Threshold(1.0, "red"),),  # the edge of the fence, by the definition of the field
        text="0 is the accepted value, 100 % the edge of the fence; what lies beyond it is run again and judged.",
    )


def _figures(where: Conditions, links: Sequence[DataLink]) -> Panel:
    """Return the table behind the diagrams."""
    names = (
        "system", "partition", "device_model", "metric", "value", "unit", "accepted", "fence_used", "reference", "verdict",
        "nodes", "commit", "branch", "id",
    )  # fmt: skip
    return rows(
        "Runs",
        select(METRIC, [QueryColumn(name) for name in names], where, table=True, newest=MOST_ROWS),
        units={"fence_used": "percentunit"},
        links=links,
        text="Newest first: which node and which commit a figure is of, and what it was compared with.",
    )


#: One series for each metric that is chosen.
_SERIES: Final[Conditions] = {**_METRIC, "environment": ChosenValue("environment")}
#: How the lines around a series are drawn.
_LINE: Final = {"custom.showPoints": "never", "custom.lineWidth": 1}
_FAINT: Final = {**_LINE, "color": {"mode": "fixed", "fixedColor": "green"}}
_LINES: Final[Mapping[str, Mapping[str, Any]]] = {
    "value": {"color": {"mode": "fixed", "fixedColor": "blue"}},
    "accepted": {**_FAINT, "custom.lineStyle": {"fill": "dash", "dash": [10, 10]}},
    "fence_low": {**_FAINT, "custom.lineWidth": 0},
    "fence_high": {
        **_FAINT,
        "custom.lineWidth": 0,
        "custom.fillBelowTo": "fence_low",
        "custom.fillOpacity": 15,
    },
    "reference": {**_LINE, "custom.lineWidth": 2, "color": {"mode": "fixed", "fixedColor": "red"}},
}


def series(links: Sequence[DataLink]) -> Dashboard:
    """Return series of one test on one partition: figures, accepted value, fence and reference."""
    machine: Conditions = {"system": ChosenValue("system"), "partition": ChosenValue("partition")}
    test: Conditions = {**machine, "environment": ChosenValue("environment")}
    _systems, purpose = common_variables()
    return dashboard(
        "mlhpc-series",
        "Benchmarks: one series and its fence",
        text="One test on one partition: its figures, with the accepted value, the fence and the reference of each night.",
        variables=[
            variable("system", RUN, where={}, one=True),
            purpose,
            variable("partition", RUN, where={"system": ChosenValue("system")}, one=True),
            variable("environment", RUN, where=machine, one=True),
            variable("benchmark", METRIC, where=test, one=True),
            variable(
                "metric",
                METRIC,
                where={**test, "benchmark": ChosenValue("benchmark")},
                chosen=_USUAL_METRICS,
            ),
        ],
        annotations=[
            _slower({**_ONE, "environment": ChosenValue("environment")}),
            *_events(_PARTITION_EVENTS),
        ],
        panels=[
            diagram(
                "$metric",
                [select(METRIC, [QueryColumn(name) for name in _LINES], _SERIES, alias="$col")],
                text="The band is the fence around the accepted value (dashed), the red line the reference.",
                size=(24, 10),
                repeat="metric",
                series=_LINES,
            ),
            _fence_used(_SERIES),
            _figures(_SERIES, links),
        ],
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
        annotations=_events(_SYSTEM_EVENTS),
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


def all_dashboards(templates: Mapping[str, str] | None = None) -> dict[str, Dashboard]:
    """Return every dashboard by the name of its file.

    *templates* are addresses with ``{commit}``, ``{job}`` or ``{pipeline}`` in them, by that name, and that of the HTML report as
    ``report``.
    """
    links = cell_links(templates or {})
    made = [nights(links), benchmark(links), series(links), systems(), nodes(links)]
    return {f"{one['uid']}.json": one for one in made}
