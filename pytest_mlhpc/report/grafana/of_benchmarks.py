"""Dashboards of what was measured: one benchmark over time, and systems beside each other. Pure."""

from __future__ import annotations

from typing import Final

from pytest_mlhpc.influx.schema import METRIC, RUN
from pytest_mlhpc.report.grafana.common import FIRST, PARTITION, common_variables
from pytest_mlhpc.report.grafana.frame import Dashboard, annotation, dashboard, variable
from pytest_mlhpc.report.grafana.of_nights import SLOWER
from pytest_mlhpc.report.grafana.panels import diagram, rows
from pytest_mlhpc.report.grafana.query import MOST_ROWS, Chosen, Column, Conditions, OneOf, Query, select

_ONE: Final[Conditions] = {**FIRST, "partition": Chosen("partition"), "benchmark": Chosen("benchmark")}
_MACHINE: Final = ("system", "partition", "environment", "device_model")
_ALIAS: Final = f"{PARTITION} $tag_environment $tag_device_model"


def benchmark() -> Dashboard:
    """Return one benchmark over time: each metric, its weekly median, and where the time goes."""
    machine = {"system": Chosen("system"), "partition": Chosen("partition")}
    where: Conditions = {**_ONE, "metric": Chosen("metric")}
    by = (*_MACHINE, "unit")
    return dashboard(
        "mlhpc-benchmark",
        "Benchmarks: one over time",
        text="One benchmark: its metrics over time on each system, and where the time goes.",
        variables=[
            *common_variables(),
            variable("partition", RUN, where={"system": Chosen("system")}),
            variable("benchmark", METRIC, where=machine, one=True),
            variable(
                "metric",
                METRIC,
                where={**machine, "benchmark": Chosen("benchmark")},
                chosen=("effective_throughput", "compute_throughput"),
            ),
        ],
        annotations=[
            annotation(
                "slower",
                select(RUN, [Column("failure"), Column("verdict")], {**_ONE, "verdict": OneOf(SLOWER)}),
                text="failure",
                tags="verdict",
                colour="red",
            )
        ],
        panels=[
            diagram(
                "$metric",
                [
                    select(METRIC, [Column("value")], where, by=by, alias=f"{_ALIAS} [$tag_unit]"),
                    select(
                        METRIC, [Column("value", "median")], where, by=by, every="7d", alias=f"{_ALIAS}, median of a week",
                    ),
                ],
                text="Each point is the first attempt of a run; the second line has the median of each week.",
                size=(12, 9),
                repeat="metric",
            ),
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
            diagram(
                "Memory and energy",
                [
                    select(
                        METRIC,
                        [Column("value")],
                        {**_ONE, "metric": OneOf(("peak_memory", "energy"))},
                        by=("metric", "unit", *_MACHINE),
                        alias=f"$tag_metric [$tag_unit] {_ALIAS}",
                    )
                ],
            ),
            rows(
                "Runs",
                select(
                    METRIC,
                    [
                        Column(name)
                        for name in (
                            "system", "partition", "device_model", "metric", "value", "unit", "verdict", "nodes", "commit",
                            "branch", "id",
                        )
                    ],
                    where,
                    table=True,
                    newest=MOST_ROWS,
                ),
                text="Newest first: which node and which commit a figure is of.",
            ),
        ],
    )  # fmt: skip


def _parts(metrics: tuple[str, ...]) -> Query:
    """Return the query for metrics that are parts of one time; their points have the same times, so that they stack."""
    return select(
        METRIC,
        [Column("value")],
        {**_ONE, "metric": OneOf(metrics)},
        by=("metric", *_MACHINE),
        alias=f"$tag_metric {_ALIAS}",
    )


def systems() -> Dashboard:
    """Return the three tables of the HPDC'24 paper over time: systems beside each other for one workload."""
    where: Conditions = {**FIRST, "benchmark": Chosen("benchmark")}
    by = ("system", "partition", "device_model", "benchmark")
    alias = f"{PARTITION} $tag_device_model $tag_benchmark"
    titles = {
        "compute_throughput": ("Compute throughput", "suffix: samples/s", "Samples / (training epoch - I/O time)."),
        "compute_fraction": ("Compute fraction", "percentunit", "(Training epoch - I/O time) / training epoch."),
        "effective_throughput": ("Effective throughput", "suffix: samples/s", "Samples / training epoch."),
        "energy_efficiency": ("Energy", "suffix: samples/J", "Samples by joule, where the devices tell."),
    }  # fmt: skip
    return dashboard(
        "mlhpc-systems",
        "Benchmarks: systems beside each other",
        text="Only figures of one benchmark are comparable: choose those that have the same parameters.",
        variables=[*common_variables(), variable("benchmark", METRIC, where={"system": Chosen("system")})],
        panels=[
            *(
                diagram(
                    title,
                    [select(METRIC, [Column("value")], {**where, "metric": OneOf((metric,))}, by=by, alias=alias)],
                    unit=unit,
                    text=text,
                )
                for metric, (title, unit, text) in titles.items()
            ),
            *(
                rows(
                    f"{titles[metric][0]}: median",
                    select(
                        METRIC,
                        [Column("value", "median", "median"), Column("value", "count", "runs")],
                        {**where, "metric": OneOf((metric,))},
                        by=by,
                        table=True,
                    ),
                    units={"median": titles[metric][1]},
                    text="Over the time range. `mlhpc compare --tables` adds intervals and published figures.",
                    size=(8, 9),
                )
                for metric in ("compute_throughput", "compute_fraction", "effective_throughput")
            ),
        ],
    )  # fmt: skip
