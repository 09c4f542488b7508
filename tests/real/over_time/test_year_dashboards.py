"""The same year in the dashboards: queries of panels on the real InfluxDB show what was planted, and when."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from grafana_macros import expanded
from over_time_services import Influx
from test_year import YEAR
from yearly import BENCHMARKS, DAY_NS, SYSTEMS, identity_of, night_ns

from pytest_mlhpc.influx.push import Patience
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.report.grafana import all_dashboards

pytestmark = [pytest.mark.servers, pytest.mark.slow]
PANELS = {
    (name, panel["title"]): panel["targets"][0]["query"]
    for name, dashboard in all_dashboards().items()
    for panel in dashboard["panels"]
}
RANGE_MS = night_ns(0, 0) // 10**6, night_ns(YEAR.days, 0) // 10**6
Ask = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def ask(influxdb: Influx, tmp_path: Path) -> Ask:
    """Ask what the first query of a panel asks, over the year: ``ask("nights", "Broken", system="cirrus")``."""
    lines = (lines_of(one) for day in range(YEAR.days) for one in YEAR.night(day))
    # A machine that is busy answers 500 after ten seconds: again, then.
    influxdb.push(lines, tmp_path, Patience(time.monotonic() + 1800))

    def call(dashboard: str, title: str, **chosen: str) -> list[dict[str, Any]]:
        names = {"purpose": ["nightly"], **{name: [value] for name, value in chosen.items()}}
        return influxdb.ask(expanded(PANELS[f"mlhpc-{dashboard}.json", title], names, *RANGE_MS))

    return call


def day_of(row: dict[str, Any]) -> int:
    return int((row["time"] - night_ns(0, 0)) // DAY_NS)


def count(rows: list[dict[str, Any]]) -> int:
    return sum(row["count"] for row in rows)


# One test: a year takes long to push.
def test_the_planted_faults_are_in_the_dashboards_when_they_happened(
    ask: Ask, subtests: pytest.Subtests
) -> None:
    with subtests.test("faults are counted"):
        first = [one for day in range(YEAR.days) for one in YEAR.night(day) if one.attempt == 0]
        assert count(ask("nights", "Runs")) == len(first) == 3 * 5 * (365 - 2)
        assert count(ask("nights", "Broken")) == 2
        assert count(ask("nights", "Prevented by the system")) == 2 * len(BENCHMARKS)
        slower = [one for one in first if one.verdict == "regressed"]
        assert count(ask("nights", "Slower than they were")) == len(slower) > 200
        words = {row["verdict"] for row in ask("nights", "What was not fine", system="eidf")}
        assert words == {"never_scheduled", "regressed"}
    with subtests.test("nights without runs are gaps"):
        runs = {system: ask("nights", "Runs by system", system=system) for system in SYSTEMS}
        every = set(range(YEAR.days))
        gaps = {
            system: every - {day_of(row) for row in rows if row["count"]} for system, rows in runs.items()
        }
        assert gaps == {"alps": {240, 241, 242}, "cirrus": {270, 271, 272}, "eidf": set()}
    with subtests.test("unfit nodes are left out"):
        left_out = ask("nodes", "Nodes that vetting left out", system="alps")
        assert {day_of(row) for row in left_out if row["max"]} == {300, 301, 302, 303}
    with subtests.test("a new driver on alps cost 6 % of computing from night 60 to 89"):
        rows = ask("systems", "Compute throughput", system="alps", benchmark=identity_of("resnet50"))
        during = [row["value"] for row in rows if 60 <= day_of(row) < 90]
        before = [row["value"] for row in rows if 30 <= day_of(row) < 60]
        assert len(during) == len(before) == 30
        assert sum(during) / sum(before) == pytest.approx(0.94, abs=0.01)
