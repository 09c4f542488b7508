"""Queries of the alert rules: in InfluxQL against the real InfluxDB, in Flux by the compiler of InfluxData."""

import json
import subprocess
from importlib import resources
from pathlib import Path

import pytest
import yaml
from grafana_macros import expanded
from test_grafana_queries import DAY_NS, NOW_NS, PLAIN, world
from worlds import record

from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.store.record import RecordedVetting

pytestmark = pytest.mark.servers
CHECK = Path(__file__).resolve().parents[2] / "report/grafana/check_flux.mjs"


def rules(language):
    text = (resources.files("pytest_mlhpc.report") / f"dashboards/mlhpc-alerts-{language}.yaml").read_text()
    return {rule["uid"]: rule for rule in yaml.safe_load(text)["groups"][0]["rules"]}


# --- InfluxQL


def fires(influx, uid, at_ns):
    """Return the labels for which a rule fires at a time, as Grafana reduces and compares; None: for lack of data."""
    rule = rules("influxql")[uid]
    runs, _, threshold = rule["data"]
    begin_ns = at_ns - runs["relativeTimeRange"]["from"] * 10**9
    rows = influx.ask(expanded(runs["model"]["query"], {}, begin_ns // 10**6, at_ns // 10**6))
    if not rows:
        return None if rule["noDataState"] == "Alerting" else []
    evaluator = threshold["model"]["conditions"][0]["evaluator"]
    (bound,) = evaluator["params"]
    last = {
        tuple(value for name, value in row.items() if name not in {"time", "count", "max"}): row.get(
            "count", row.get("max")
        )
        for row in rows
    }
    return sorted(
        labels
        for labels, value in last.items()
        if {"gt": value > bound, "lt": value < bound}[evaluator["type"]]
    )


@pytest.fixture
def filled(influxdb, tmp_path):
    """Nights of which the oldest passed, the third regressed, the fourth broke, the fifth was prevented."""
    unfit = record(
        990, system="eidf", benchmark=PLAIN, created_ns=NOW_NS, vetting=RecordedVetting("quick", 60.0)
    )
    influxdb.push([*map(lines_of, world()), lines_of(unfit)], tmp_path)
    return influxdb


def night(number):
    """Return a time shortly after a night of the world, so that a rule sees it and the one before in part."""
    return NOW_NS - (8 - number) * DAY_NS + DAY_NS // 24


@pytest.mark.parametrize(
    ("uid", "quiet", "loud"),
    [("mlhpc-slower", 1, 2), ("mlhpc-broken", 1, 3)],
)
def test_a_rule_fires_for_each_benchmark_on_the_night_of_its_verdict(filled, uid, quiet, loud):
    assert fires(filled, uid, night(quiet)) == []
    fired = fires(filled, uid, night(loud))
    assert len(fired) == 3
    assert {("cirrus", PLAIN), ("eidf", PLAIN)} < {(labels[2], labels[0]) for labels in fired}


def test_prevented_runs_and_unfit_nodes_fire_once_for_a_partition(filled):
    assert fires(filled, "mlhpc-prevented", night(4)) == [("standard", "cirrus"), ("standard", "eidf")]
    assert fires(filled, "mlhpc-unfit", night(0)) == [("standard", "cirrus"), ("standard", "eidf")]


def test_a_partition_without_unfit_nodes_does_not_fire(influxdb, tmp_path):
    fit = record(1, system="eidf", benchmark=PLAIN, created_ns=NOW_NS, vetting=RecordedVetting("quick", 60.0))
    influxdb.push([lines_of(fit)], tmp_path)
    assert fires(influxdb, "mlhpc-unfit", NOW_NS + 10**9) == []


def test_the_lack_of_a_night_fires_and_a_night_does_not(filled):
    assert fires(filled, "mlhpc-silent", night(7)) == []
    assert fires(filled, "mlhpc-silent", NOW_NS + 3 * DAY_NS) is None


# --- Flux

#: What Grafana defines before a query of a rule.
PRELUDE = 'option v = {defaultBucket: "mlhpc", timeRangeStart: -26h, timeRangeStop: now()}\n'


def test_every_rule_in_flux_compiles_and_no_mistake_slips_through(flux):
    queries = [PRELUDE + rule["data"][0]["model"]["query"] for rule in rules("flux").values()]
    wrong = [
        queries[0].replace("count()", "cont()"),
        queries[0].replace("r.purpose ==", "r.purpose =="[:-1]),
        queries[0].replace('["system"', '"system"'),
        queries[0].replace('["system", "partition", "benchmark"]', "1"),
        queries[0].removeprefix(PRELUDE),
    ]
    done = subprocess.run(
        ["node", str(CHECK), flux.environment["MLHPC_FLUX"]],
        input=json.dumps(queries + wrong), capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True] * len(queries) + [False] * len(wrong)
