"""Dashboards of what was measured: one benchmark over time, and systems beside each other. Pure."""

from __future__ import annotations

from typing import Any, Final

from pytest_mlhpc.influx.schema import METRIC, RUN
from pytest_mlhpc.report.grafana.common import FIRST, PARTITION, common_variables
from pytest_mlhpc.report.grafana.frame import Dashboard, annotation, dashboard, variable
from pytest_mlhpc.report.grafana.of_nights import SLOWER
from pytest_mlhpc.report.grafana.panels import Panel, diagram, rows
from pytest_mlhpc.report.grafana.query import MOST_ROWS, Chosen, Column, Conditions, OneOf, Query, select

_ONE: Final[Conditions] = {**FIRST, "partition": Chosen("partition"), "benchmark": Chosen("benchmark")}
_MACHINE: Final = ("system", "partition", "environment", "device_model", "definition")
_ALIAS: Final = f"{PARTITION} $tag_environment $tag_device_model $tag_definition"
_METRIC: Final[Conditions] = {**_ONE, "metric": Chosen("metric")}


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
    machine: Conditions = {"system": Chosen("system"), "partition": Chosen("partition")}
    return [
        *common_variables(),
        variable("partition", RUN, where={"system": Chosen("system")}),
        variable("benchmark", METRIC, where=machine, one=True),
        variable(
            "metric",
            METRIC,
            where={**machine, "benchmark": Chosen("benchmark")},
            chosen=("effective_throughput", "compute_throughput"),
        ),
    ]


def _slower() -> dict[str, Any]:
    """Return marks where the benchmark was worse than it may be, with the judge's words."""
    query = select(RUN, [Column("failure"), Column("verdict")], {**_ONE, "verdict": OneOf(SLOWER)})
    return annotation("slower", query, text="failure", tags="verdict", colour="red")


def _over_time() -> Panel:
    """Return a diagram for each chosen metric."""
    by = (*_MACHINE, "unit")
    alias = f"{_ALIAS} [$tag_unit]"
    week = Column("value", "median")
    return diagram(
        "$metric",
        [
            select(METRIC, [Column("value")], _METRIC, by=by, alias=alias),
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
            [_parts(("io_time", "compute_time"))],
            unit="s",
            bars=True,
            text="I/O time is the blocked wait for data and the copy to the device; compute time is the rest.",
        ),
        diagram(
            "Step",
            [_parts(("forward_time", "backward_time", "optimizer_time"))],
            unit="s",
            bars=True,
            text="Of the rank that waited least for others.",
        ),
        diagram(
            "Communication that computing did not hide, and late ranks",
            [_parts(("exposed_communication_time", "rank_skew"))],
            unit="s",
            text="Of a step; runs of several ranks only.",
        ),
    ]


def _memory_and_energy() -> Panel:
    where: Conditions = {**_ONE, "metric": OneOf(("peak_memory", "energy"))}
    by = ("metric", "unit", *_MACHINE)
    alias = f"$tag_metric [$tag_unit] {_ALIAS}"
    return diagram("Memory and energy", [select(METRIC, [Column("value")], where, by=by, alias=alias)])


def _figures() -> Panel:
    """Return the table behind the diagrams."""
    names = (
        "system", "partition", "device_model", "metric", "value", "unit", "verdict", "nodes", "commit", "branch", "id",
    )  # fmt: skip
    return rows(
        "Runs",
        select(METRIC, [Column(name) for name in names], _METRIC, table=True, newest=MOST_ROWS),
        text="Newest first: which node and which commit a figure is of.",
    )


def _parts(metrics: tuple[str, ...]) -> Query:
    """Return the query for metrics that are parts of one time; their points have the same times, so that they stack."""
    return select(
        METRIC,
        [Column("value")],
        {**_ONE, "metric": OneOf(metrics)},
        by=("metric", *_MACHINE),
        alias=f"$tag_metric {_ALIAS}",
    )


#: Metrics of the HPDC'24 paper (Rae et al.), and energy: title, unit in Grafana's words, what it is.
_TITLES: Final = {
    "compute_throughput": ("Compute throughput", "suffix: samples/s", "Samples / (training epoch - I/O time)."),
    "compute_fraction": ("Compute fraction", "percentunit", "(Training epoch - I/O time) / training epoch."),
    "effective_throughput": ("Effective throughput", "suffix: samples/s", "Samples / training epoch."),
    "energy_efficiency": ("Energy", "suffix: samples/J", "Samples by joule, where the devices tell."),
}  # fmt: skip
_BESIDE: Final = ("system", "partition", "device_model", "benchmark", "definition")


def systems() -> Dashboard:
    """Return the three tables of the HPDC'24 paper over time: systems beside each other for one workload."""
    return dashboard(
        "mlhpc-systems",
        "Benchmarks: systems beside each other",
        text="Only figures of one definition are comparable; it stands behind the test by its digest.",
        variables=[*common_variables(), variable("benchmark", METRIC, where={"system": Chosen("system")})],
        panels=[
            *map(_beside, _TITLES),
            *map(_medians, ("compute_throughput", "compute_fraction", "effective_throughput")),
        ],
    )


def _of(metric: str) -> Conditions:
    return {**FIRST, "benchmark": Chosen("benchmark"), "metric": OneOf((metric,))}


def _beside(metric: str) -> Panel:
    """Return one metric of all systems over time."""
    title, unit, text = _TITLES[metric]
    alias = f"{PARTITION} $tag_device_model $tag_benchmark $tag_definition"
    query = select(METRIC, [Column("value")], _of(metric), by=_BESIDE, alias=alias)
    return diagram(title, [query], unit=unit, text=text)


def _medians(metric: str) -> Panel:
    """Return the median of one metric of all systems."""
    title, unit, _text = _TITLES[metric]
    columns = [Column("value", "median", "median"), Column("value", "count", "runs")]
    return rows(
        f"{title}: median",
        select(METRIC, columns, _of(metric), by=_BESIDE, table=True),
        units={"median": unit},
        text="Over the time range. `mlhpc papers tables` adds intervals and published figures.",
        size=(8, 9),
    )
