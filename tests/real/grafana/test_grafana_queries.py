"""Every query of every dashboard against the real InfluxDB, with the macros that Grafana fills in."""

import json
import time
from pathlib import Path

import pytest
from grafana_macros import expanded
from over_time_services import PATIENT, Influx
from running_suites import Suite
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.history.events import Event, JournalEntry
from pytest_mlhpc.influx.schema import line_of_entry, line_of_event, lines_of
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.report.grafana import all_dashboards
from pytest_mlhpc.store.record import JudgedBy, RecordedFence, RecordedVetting

pytestmark = pytest.mark.servers
DASHBOARDS = all_dashboards()
DAY_NS = 86_400 * 10**9
NOW_NS = time.time_ns()
RANGE = (NOW_NS - 30 * DAY_NS) // 10**6, NOW_NS // 10**6
#: What a name may hold, and a regular expression must not obey.
HOSTILE = "w[a=1 b=\"x/y\"] name=.*|(^$) größe 'q' {1}+?\\d"
PLAIN = "suites/test_a.py::test_a[4]"
SECONDS = (
    "io_time",
    "compute_time",
    "forward_time",
    "backward_time",
    "optimizer_time",
    "exposed_communication_time",
    "rank_skew",
)


JUDGED_BY = JudgedBy(
    {}, {}, "main", "fail", local=False, nightly=True, series=1, reruns_allowed=0, reruns_broken=0,
    references={"effective_throughput": 40.0},
)  # fmt: skip
ALERTS = ("opened", "closed", "acknowledged", "unacknowledged")


def noted():
    """Events of the first two days: a change, one of another partition, one that was removed, a maintenance; alerts; software."""
    at_ns = NOW_NS - 8 * DAY_NS
    yield line_of_event(Event("00000001", "cirrus", "driver 570 to 580", at_ns), removed=False)
    yield line_of_event(Event("00000002", "cirrus", "of others", at_ns, "gpu"), removed=False)
    yield line_of_event(Event("00000003", "cirrus", "a mistake", at_ns), removed=True)
    yield line_of_event(
        Event("00000004", "cirrus", "new disks", at_ns, "standard", until_ns=at_ns + DAY_NS), removed=False
    )
    for kind in (*(f"alert_{name}" for name in ALERTS), "environment", "commit"):
        yield line_of_entry(JournalEntry("regr", kind, "cirrus", f"text of {kind}", at_ns + DAY_NS))


def world():
    """Records of two systems and eight nights: passed, regressed, broken, prevented; a re-run, a manual run, unfit nodes."""
    verdicts = [
        "passed",
        "passed",
        "regressed",
        "worker_exit",
        "node_failure",
        "drifted",
        "improved",
        "passed",
    ]
    number = 0
    for system, benchmark in (("cirrus", PLAIN), ("eidf", PLAIN), ("cirrus", HOSTILE)):
        for night, verdict in enumerate(verdicts):
            number += 1
            more = [MetricValue(name, 0.25, "s", "lower") for name in SECONDS]
            more += [
                MetricValue(name, 50.0 + night, "samples/s", "higher")
                for name in ("compute_throughput", "effective_throughput")
            ]
            more += [
                MetricValue("compute_fraction", 0.5, "1", "higher"),
                MetricValue("energy_efficiency", 0.1, "samples/J", "higher"),
            ]
            more += [
                MetricValue("peak_memory", 1e9, "B", "lower"),
                MetricValue("energy", 640.0, "J", "lower"),
            ]
            yield record(
                number,
                system=system,
                benchmark=benchmark,
                created_ns=NOW_NS - (len(verdicts) - night) * DAY_NS,
                verdict=verdict,
                failure="slower" if verdict in {"regressed", "drifted"} else "",
                fences={"effective_throughput": RecordedFence(60.0, 0.05)},
                judged_by=JUDGED_BY,
                node_hours=0.5,
                queue_s=60.0,
                vetting=RecordedVetting("quick", 60.0, unfit={"n9": "memory"}),
                measurement=None
                if verdict in {"worker_exit", "node_failure"}
                else measurement(100.0, more=tuple(more)),
            )
    yield record(900, system="cirrus", benchmark=PLAIN, created_ns=NOW_NS - DAY_NS, attempt=1)
    yield record(901, system="cirrus", benchmark=PLAIN, created_ns=NOW_NS - DAY_NS, purpose="manual")
    yield record(902, system="cirrus", benchmark=PLAIN, created_ns=NOW_NS - 60 * DAY_NS)


@pytest.fixture
def filled(influxdb: Influx, tmp_path: Path) -> Influx:
    influxdb.push([*map(lines_of, world()), list(noted())], tmp_path)
    return influxdb


def asked(influx: Influx, query: str, **chosen: str):
    return influx.ask(expanded(query, {name: [value] for name, value in chosen.items()}, *RANGE))


def panel(dashboard: str, title: str) -> str:
    (found,) = [one for one in DASHBOARDS[f"mlhpc-{dashboard}.json"]["panels"] if one["title"] == title]
    return found["targets"][0]["query"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_variable_and_mark_has_an_answer(filled, name):
    dashboard = DASHBOARDS[name]
    queries = [target["query"] for one in dashboard["panels"] for target in one["targets"]]
    queries += [one["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    queries += [one["target"]["query"] for one in dashboard["annotations"]["list"]]
    assert [query for query in queries if not asked(filled, query, purpose="nightly")] == []


def test_every_name_in_an_alias_is_a_tag_of_the_answer(filled):
    for dashboard in DASHBOARDS.values():
        for target in (
            target for one in dashboard["panels"] for target in one["targets"] if "alias" in target
        ):
            row = asked(filled, target["query"])[0]
            named = [
                word.split("]")[0].rstrip(",")
                for word in target["alias"].replace(":", " ").replace("[", " ").split()
                if word.startswith("$tag_")
            ]
            assert named or target["alias"] == "$col"
            assert all(word.removeprefix("$tag_") in row for word in named)


def test_variables_offer_what_is_there(filled):
    variables = {
        one["name"]: one["query"]
        for one in DASHBOARDS["mlhpc-benchmark.json"]["templating"]["list"]
        if one["type"] == "query"
    }
    offered = {name: {row["value"] for row in asked(filled, query)} for name, query in variables.items()}
    assert offered["system"] == {"cirrus", "eidf"}
    assert offered["purpose"] == {"nightly", "manual"}
    assert offered["partition"] == {"standard"}
    assert {PLAIN} < offered["benchmark"]
    assert len(offered["benchmark"]) == 2
    assert {"effective_throughput", "io_time"} < offered["metric"]
    assert {row["value"] for row in asked(filled, variables["benchmark"], system="eidf")} == {PLAIN}


def test_a_chosen_name_is_taken_as_it_is_whatever_it_holds(filled):
    every = {row["benchmark"] for row in filled.ask('SELECT "benchmark", "id" FROM "mlhpc_run"')}
    (hostile,) = every - {PLAIN}
    query = panel("benchmark", "Runs")
    for name in (PLAIN, hostile):
        rows = asked(filled, panel("systems", "Effective throughput: median"), benchmark=name)
        assert {row["benchmark"] for row in rows} == {name}
    assert {row["system"] for row in asked(filled, query, benchmark=hostile)} == {"cirrus"}


def test_counts_are_those_of_first_attempts_in_the_time_range(filled):
    counted = sum(row["count"] for row in asked(filled, panel("nights", "Runs"), purpose="nightly"))
    assert counted == 24
    assert sum(row["count"] for row in asked(filled, panel("nights", "Runs"))) == 25
    slower = asked(filled, panel("nights", "Slower than they were"), purpose="nightly")
    assert sum(row["count"] for row in slower) == 6
    broken = asked(filled, panel("nights", "Broken"), purpose="nightly")
    assert sum(row["count"] for row in broken) == 3
    prevented = asked(filled, panel("nights", "Prevented by the system"), purpose="nightly")
    assert sum(row["count"] for row in prevented) == 3


def test_failed_runs_are_listed_newest_first_with_their_messages(filled):
    rows = asked(filled, panel("nights", "What was not fine"), system="eidf", purpose="nightly")
    assert [row["verdict"] for row in rows] == ["drifted", "node_failure", "worker_exit", "regressed"]
    assert rows[0]["failure"] == "slower"
    assert json.loads(rows[0]["nodes"]) == ["n1"]


def test_the_last_run_of_each_benchmark_has_its_own_time(filled):
    rows = asked(filled, panel("nights", "Last run of each benchmark"), purpose="nightly")
    assert len(rows) == 3
    for row in rows:
        (last,) = filled.ask(
            f'SELECT last("created_ns") AS made FROM mlhpc_run WHERE "id" = \'{row["id"]}\''  # noqa: S608 - a test's own words
        )
        assert row["time"] // 10**9 == last["made"] // 10**9
        assert NOW_NS - row["time"] < 2 * DAY_NS


def test_parts_of_a_time_have_the_same_moments_so_that_they_stack(filled):
    rows = asked(filled, panel("benchmark", "Training epoch"), system="eidf")
    moments = {
        metric: [row["time"] for row in rows if row["metric"] == metric]
        for metric in ("io_time", "compute_time")
    }
    assert moments["io_time"] == moments["compute_time"]
    assert len(moments["io_time"]) == 6


def marks(dashboard, name):
    (mark,) = [
        one for one in DASHBOARDS[f"mlhpc-{dashboard}.json"]["annotations"]["list"] if one["name"] == name
    ]
    return mark


def test_marks_of_slower_runs_have_their_texts(filled):
    mark = marks("benchmark", "slower")
    rows = asked(filled, mark["target"]["query"], system="eidf", benchmark=PLAIN)
    assert [(row[mark["target"]["textColumn"]], row[mark["target"]["tagsColumn"]]) for row in rows] == [
        ("slower", "regressed"),
        ("slower", "drifted"),
    ]


@pytest.mark.parametrize(
    ("dashboard", "chosen", "names"),
    [
        ("benchmark", {"partition": "standard"}, ["driver 570 to 580"]),
        ("benchmark", {"partition": "gpu"}, ["driver 570 to 580", "of others"]),
        ("nights", {}, ["driver 570 to 580", "of others"]),
        ("nights", {"system": "eidf"}, []),
    ],
)
def test_marks_of_events_are_those_of_the_chosen_partitions_without_those_removed(
    filled, dashboard, chosen, names
):
    mark = marks(dashboard, "changes of systems")
    rows = asked(filled, mark["target"]["query"], **{"system": "cirrus", **chosen})
    assert sorted(row[mark["target"]["textColumn"]] for row in rows) == names
    assert {row["kind"] for row in rows} <= {"change"}


def test_the_mark_of_a_maintenance_has_its_end_in_milliseconds(filled):
    target = marks("series", "maintenance")["target"]
    (row,) = asked(filled, target["query"])
    assert row[target["textColumn"]] == "new disks"
    assert row[target["timeEndColumn"]] * 10**6 - row["time"] == pytest.approx(DAY_NS, abs=10**10)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("alerts", {"alert_opened", "alert_closed"}),
        ("acknowledgements", {"alert_acknowledged", "alert_unacknowledged"}),
        ("software", {"environment"}),
        ("commits", {"commit"}),
    ],
)
def test_marks_have_the_kind_of_what_happened(filled, name, kinds):
    target = marks("series", name)["target"]
    rows = asked(filled, target["query"])
    assert {row[target["tagsColumn"]] for row in rows} == kinds
    assert all(row[target["textColumn"]].startswith("text of ") for row in rows)


def test_a_series_has_its_fence_and_reference_next_to_each_figure(filled):
    rows = asked(
        filled, panel("series", "$metric"), system="eidf", benchmark=PLAIN, metric="effective_throughput"
    )
    assert [row["value"] for row in rows] == [50.0, 51.0, 52.0, 55.0, 56.0, 57.0]
    names = ("accepted", "fence_low", "fence_high", "reference")
    assert {tuple(row[name] for name in names) for row in rows} == {(60.0, 57.0, 63.0, 40.0)}
    used = asked(
        filled, panel("series", "Loss as a share of the fence"), system="eidf", metric="effective_throughput"
    )
    assert [round(row["fence_used"], 3) for row in used][:2] == [3.333, 3.0]


# --- points of a real session

TESTS = """
@program(["/bin/sh", "-c", "echo rate: $FIGURE"], RATE, reference={"local": 3.5})
def test_a(run):
    pass
"""


def test_every_query_of_one_series_has_an_answer_from_points_of_real_sessions(
    influxdb, tmp_path, state_dir, monkeypatch
):
    for name, value in influxdb.environment.items():
        monkeypatch.setenv(name, value)
    suite = Suite(tmp_path / "suite", state_dir, system="local")
    suite.tests(TESTS)
    (suite.folder / "conftest.py").write_text(PATIENT)
    nightly = {**influxdb.environment, "MLHPC_PURPOSE": "nightly", "CI_COMMIT_BRANCH": "main"}
    suite.run("--mlhpc-baseline=update", environment={**nightly, "FIGURE": "4.0"}).expect(0, passed=1)
    suite.run(environment={**nightly, "FIGURE": "3.9"}).expect(0, passed=1)
    suite.run("--mlhpc-reruns=0", environment={**nightly, "FIGURE": "3.2"}).expect(1, failed=1)
    assert main(["history", "event", "add", "--system", "local", "driver 570 to 580"]) == 0
    until = "2099-01-01"
    assert main(["history", "event", "add", "--system", "local", "--until", until, "new disks"]) == 0
    time.sleep(0.01)  # Grafana asks up to now, in whole milliseconds
    now_ms = time.time_ns() // 10**6 + 1000

    def ask(query):
        return influxdb.ask(
            expanded(query, {"metric": ["rate"], "purpose": ["nightly"]}, now_ms - 10**9, now_ms)
        )

    series = DASHBOARDS["mlhpc-series.json"]
    queries = [target["query"] for one in series["panels"] for target in one["targets"]]
    queries += [one["query"] for one in series["templating"]["list"] if one["type"] == "query"]
    queries += [
        marks("series", name)["target"]["query"] for name in ("slower", "changes of systems", "maintenance")
    ]
    assert [query for query in queries if not ask(query)] == []
    rows = ask(panel("series", "$metric"))
    assert [row["value"] for row in rows] == [4.0, 3.9, 3.2]
    assert [row["accepted"] for row in rows[1:]] == [4.0, 4.0]
    assert {row["reference"] for row in rows} == {3.5}
    assert rows[1]["fence_low"] < 3.9 < rows[1]["fence_high"]
    used = [row["fence_used"] for row in ask(panel("series", "Loss as a share of the fence"))]
    assert 0 < used[-2] < 1 < used[-1]
