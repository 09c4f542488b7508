"""The same year in the dashboards: every query of every panel on the real InfluxDB shows what was planted, and when."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grafana_macros import expanded
from over_time_services import Influx
from test_year import YEAR
from yearly import BENCHMARKS, DAY_NS, SYSTEMS, key_of, night_ns

from pytest_mlhpc.influx.client import InfluxSink
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.influx.lines import lines_of
from pytest_mlhpc.influx.push import Patience, Sender, push_lines
from pytest_mlhpc.report.grafana.dashboards import all_dashboards
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.results.schema import Metric

pytestmark = [pytest.mark.servers, pytest.mark.slow]
DASHBOARDS = all_dashboards()
RANGE_MS = night_ns(0, 0) // 10**6, night_ns(YEAR.days, 0) // 10**6
Ask = Callable[..., list[dict[str, Any]]]


def whole(one: Record) -> Record:
    """Return a record with all that the dashboards have a panel for; the year itself has what is judged."""
    if one.measurement is None:
        return one
    figures = {metric.name: metric.value for metric in one.measurement.metrics}
    effective, compute = figures["effective_throughput"], figures["compute_throughput"]
    io_s, compute_s = 100 / effective - 100 / compute, 100 / compute
    seconds = {
        "io_time": io_s, "compute_time": compute_s, "forward_time": compute_s / 300, "backward_time": compute_s / 150,
        "optimizer_time": compute_s / 900, "exposed_communication_time": compute_s / 1000, "rank_skew": compute_s / 2000,
    }  # fmt: skip
    more = (
        *(Metric(name, value, "s", "lower") for name, value in seconds.items()),
        Metric("compute_fraction", effective / compute, "1", "higher"),
        Metric("energy_efficiency", effective / 400, "samples/J", "higher"),
        Metric("peak_memory", 1e9, "B", "lower"),
        Metric("energy", 400.0, "J", "lower"),
    )
    measured = dataclasses.replace(one.measurement, metrics=(*one.measurement.metrics, *more))
    return dataclasses.replace(one, measurement=measured)


@pytest.fixture
def ask(influxdb: Influx, tmp_path: Path) -> Ask:
    """Ask what the first query of a panel asks, over the year: ``ask("nights", "Broken", system="cirrus")``."""
    lines = (lines_of(whole(one)) for day in range(YEAR.days) for one in YEAR.night(day))
    with InfluxSink(server_of(influxdb.environment), timeout_s=600) as sink:
        # A machine that is busy answers 500 after ten seconds: again, then.
        push_lines(Sender(sink, tmp_path, Patience(time.monotonic() + 1800)), lines, "year")

    def call(dashboard: str, title: str, **chosen: str) -> list[dict[str, Any]]:
        (found,) = [
            panel for panel in DASHBOARDS[f"mlhpc-{dashboard}.json"]["panels"] if panel["title"] == title
        ]
        return asked(influxdb, found["targets"][0]["query"], **chosen)

    return call


def asked(influxdb: Influx, query: str, **chosen: str) -> list[dict[str, Any]]:
    names = {"purpose": ["nightly"], **{name: [value] for name, value in chosen.items()}}
    return influxdb.ask(expanded(query, names, *RANGE_MS))


def day_of(row: dict[str, Any]) -> int:
    return int((row["time"] - night_ns(0, 0)) // DAY_NS)


def count(rows: list[dict[str, Any]]) -> int:
    return sum(row["count"] for row in rows)


def test_the_year_is_in_every_panel_variable_and_mark_of_the_dashboards(influxdb: Influx, ask: Ask) -> None:
    for name, dashboard in DASHBOARDS.items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                rows = asked(influxdb, target["query"])
                assert rows, f"{name}: {panel['title']}: nothing for {target['query']}"
        for one in dashboard["templating"]["list"]:
            assert one["type"] != "query" or asked(influxdb, one["query"]), f"{name}: {one['name']}"
        for one in dashboard["annotations"]["list"]:
            assert asked(influxdb, one["target"]["query"]), f"{name}: {one['name']}"
    _the_planted_faults_are_counted(ask)
    _gaps_and_nodes_are_where_they_were_planted(ask)
    _levels_are_those_that_were_planted(ask)


def _the_planted_faults_are_counted(ask: Ask) -> None:
    first = [one for day in range(YEAR.days) for one in YEAR.night(day) if one.attempt == 0]
    assert count(ask("nights", "Runs")) == len(first) == 3 * 5 * (365 - 2)
    assert count(ask("nights", "Broken")) == 2
    assert count(ask("nights", "Prevented by the system")) == 2 * len(BENCHMARKS)
    slower = [one for one in first if one.verdict == "regressed"]
    assert count(ask("nights", "Slower than they were")) == len(slower) > 200
    words = {row["verdict"] for row in ask("nights", "What was not fine", system="eidf")}
    assert {"never_scheduled", "regressed"} == words


def _gaps_and_nodes_are_where_they_were_planted(ask: Ask) -> None:
    nights = {
        system: {day_of(row) for row in ask("nights", "Runs by system", system=system) if row["count"]}
        for system in SYSTEMS
    }
    every = set(range(YEAR.days))
    assert {system: every - days for system, days in nights.items()} == {
        "alps": {240, 241, 242}, "cirrus": {270, 271, 272}, "eidf": set(),
    }  # fmt: skip
    left_out = ask("nodes", "Nodes that vetting left out", system="alps")
    assert {day_of(row) for row in left_out if row["max"]} == {300, 301, 302, 303}


def _levels_are_those_that_were_planted(ask: Ask) -> None:
    """A new driver on alps, from night 60 to 89, cost 6 % of computing, and so said the year's figures."""
    rows = ask("systems", "Compute throughput", system="alps", benchmark=key_of("resnet50"))
    during = [row["value"] for row in rows if 60 <= day_of(row) < 90]
    before = [row["value"] for row in rows if 30 <= day_of(row) < 60]
    assert len(during) == len(before) == 30
    assert sum(during) / sum(before) == pytest.approx(0.94, abs=0.01)
