import json
import time

import pytest
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.cli.options import moment
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.store.store import Store

DAY_NS = 86_400 * 10**9


@pytest.fixture
def stored(state_dir):
    """Store records made so many days ago, with so many node-hours."""
    store, now_ns, number = Store(state_dir, "s1"), time.time_ns(), iter(range(1000))

    def put(node_hours, *, days=1, measured=True, **fields):
        values = {"verdict": "passed", "system": "cirrus", "partition": "gpu", "attempt": 0, **fields}
        made = now_ns - int(days * DAY_NS)
        values.update(node_hours=node_hours, created_ns=made, measurement=measurement() if measured else None)
        store.append(record(next(number), **values))

    yield put
    store.close()


def test_reruns_and_failures_are_shown_apart_and_old_records_not_at_all(stored, capsys):
    stored(2.0)
    stored(1.0, attempt=1, verdict="regressed")
    stored(0.5, verdict="node_failure", measured=False)
    stored(4.0, partition="standard")
    stored(64.0, days=31)
    assert main(["records", "cost"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("since 20")
    assert [row.split() for row in rows] == [
        ["partition", "node-hours", "first", "attempts", "re-runs", "failed", "attempts"],
        ["cirrus:standard", "4.00", "4.00", "0.00", "0.00", "1"],
        ["cirrus:gpu", "3.50", "2.00", "1.00", "0.50", "3"],
        ["total", "7.50", "6.00", "1.00", "0.50", "4"],
    ]


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("system", ["archer2", "cirrus"]),
        ("account", ["archer2:gpu (default account)", "cirrus:gpu (default account)"]),
        ("benchmark", ["b", "a"]),
        ("session", ["two", "one"]),
    ],
)
def test_costs_are_added_up_by_what_is_asked_for(stored, capsys, by, names):
    stored(1.0, benchmark="a", session="one")
    stored(3.0, system="archer2", benchmark="b", session="two")
    assert main(["records", "cost", "--by", by, "--json", "--since", "2d"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cost["name"] for cost in found["costs"]] == names
    assert (found["by"], found["total"]["node_hours"], found["total"]["attempts"]) == (by, 4.0, 2)


def test_runs_that_cost_nothing_are_one_line(stored, capsys):
    stored(0.0)
    assert main(["records", "cost"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("no node-hours were charged since 20")
    assert out.endswith("\n1 attempts that cost nothing are not shown\n")


def test_without_records_nothing_was_charged(tmp_path, capsys):
    assert main(["records", "cost", "--state-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no node-hours were charged since")


def test_a_time_is_a_duration_or_a_date():
    assert moment("12h", 13 * 3600 * 10**9) == 3600 * 10**9
    assert moment("1970-01-02", 0) == DAY_NS
    assert moment("366d", 5) == 0


@pytest.mark.parametrize("text", ["", "30 days ago", "-1d", "2026-13-01"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="is neither a time like 30d or 12h nor a date"):
        moment(text, 0)
