"""``mlhpc history event``, ``changes`` and ``history``: what they print, what they refuse, and how they end."""

import json
import random
import re
import time

import pytest
from cli_calls import refusals
from nights_of import DAY, nights, quiet, store
from worlds import measurement, record

from pytest_mlhpc.history import rendering
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.text import iso

DROP = [*quiet(30), *quiet(10, 93.0, 2)]
DRIVERS = [{"driver": "570"}] * 30 + [{"driver": "580"}]


@pytest.fixture
def dropped(state_dir):
    """A benchmark that lost 7 % with a new driver ten nights ago, and one that lost nothing."""
    store(state_dir, nights(DROP, environments=DRIVERS))
    store(state_dir, nights(quiet(20), system="archer2", benchmark="suites/test_b.py::test_b"), session="s2")
    return state_dir


def add_event(mlhpc, days_ago, text):
    mlhpc("history", "event", "add", "--system", "cirrus", "--on", iso(time.time_ns() - days_ago * DAY), text)


def test_an_event_is_added_listed_and_removed(mlhpc):
    printed = mlhpc(
        "history", "event", "add", "--system", "cirrus:gpu", "--on", "2026-11-02", "driver 570 to 580"
    )
    identity, _, told = printed.out.partition(": ")
    expected = "driver 570 to 580, cirrus:gpu, a new baseline epoch from 2026-11-02 00:00 UTC on\n"
    assert (told, printed.err) == (expected, "")
    line = mlhpc("history", "event", "list", "--system", "cirrus").out.splitlines()[1]
    assert line.split()[:2] == [identity, "2026-11-02"]
    mlhpc("history", "event", "list", "--system", "archer2")
    mlhpc("history", "event", "remove", identity[:4])
    assert "mlhpc history event add" in mlhpc("history", "event", "list").out


def test_an_event_of_a_system_without_records_is_noted_with_a_doubt(dropped, mlhpc):
    err = mlhpc("history", "event", "add", "--system", "cirus", "new kernel").err
    assert "nothing was ever recorded on cirus (did you mean 'cirrus'?" in err


@refusals(__file__)
def test_wrong_words_are_refused(state_dir, monkeypatch, refused, command, why):
    monkeypatch.delenv("MLHPC_INFLUX_URL", raising=False)
    assert why in refused(command)
    assert not (state_dir / "events").exists()


def test_a_drop_is_told_with_its_event_and_what_to_type_next(dropped, mlhpc):
    add_event(mlhpc, 10, "driver 570 to 580")
    text = mlhpc("history", "changes", code=1).out
    assert text.startswith("2 series are watched, since ")
    what = ("cirrus:standard  rate: 7.", "% worse, 100", ": driver 570 to 580\n")
    then = "  next: mlhpc history suites/test_a.py::test_a --system cirrus --metric rate\n"
    words = (*what, "  changed there: driver 570 -> 580\n", then)
    assert [each for each in words if each not in text] == []
    assert "archer2" not in text
    quiet_system = mlhpc("history", "changes", "--system", "archer2").out
    assert "1 series is watched, the level of none has changed" in quiet_system
    mlhpc("history", "changes", "--since", "2d")


def test_what_became_slower_in_one_night_for_one_reason_is_one_paragraph(state_dir, mlhpc):
    for number in range(12):
        slower = nights(DROP, environments=DRIVERS, benchmark=f"b{number:02}")
        store(state_dir, slower, session=f"s{number}")
    text = mlhpc("history", "changes", code=1).out
    counts = {"% worse": 10, "  since 20": 1, "driver 570 -> 580": 1, "  next: ": 1}
    assert {words: text.count(words) for words in counts} == counts
    assert "and 2 more series; --json has them all\n" in text


def test_changes_as_json_are_complete(dropped, mlhpc):
    (found,) = json.loads(mlhpc("history", "changes", "--json", code=1).out)["changes"]
    assert (found["system"], found["metric"], found["better"]) == ("cirrus", "rate", "higher")
    assert found["worse_by"] == pytest.approx(0.07, abs=0.01)
    assert found["causes"] == [{"name": "driver", "before": "570", "after": "580"}]
    assert set(found["at"]) == {"record", "time", "commit", "nodes"}


def test_without_any_nightly_run_there_is_nothing_to_change(state_dir, mlhpc):
    store(state_dir, [record(1, purpose="manual")])
    assert "no nightly run of the default branch is recorded" in mlhpc("history", "changes").out


def test_a_history_shows_nights_levels_changes_and_events_in_order(dropped, mlhpc):
    add_event(mlhpc, 15, "new kernel")
    lines = mlhpc("history", "TEST_A", "--system", "cirrus").out.splitlines()
    assert lines[0] == "cirrus:standard  rate (samples/s, higher is better)  suites/test_a.py::test_a"
    assert "  40 nights, 92." in lines[1]
    assert sum(line.startswith("  20") for line in lines) == 20
    (kernel,) = [number for number, line in enumerate(lines) if "new kernel" in line]
    drop = next(number for number, line in enumerate(lines) if "% worse" in line)
    assert 2 < kernel < drop
    assert lines[drop + 1] == "     changed there: driver 570 -> 580"


def test_a_test_is_found_by_its_id_and_nights_by_their_time(dropped, mlhpc):
    words = ["--system", "cirrus", "--since", "5d", "--json"]
    (found,) = json.loads(mlhpc("history", record().node_id, *words).out)["series"]
    assert found["benchmark"] == record().benchmark
    assert (len(found["points"]), len(found["changes"])) == (5, 1)


def test_runs_that_are_not_watched_are_shown_if_asked(state_dir, mlhpc):
    store(state_dir, [record(1, purpose="manual"), record(2, attempt=1)])
    assert "2 figures are recorded, none of a night that is watched" in mlhpc("history", "test_a").out
    text = mlhpc("history", "test_a", "--all").out
    assert ("passed, manual" in text, "passed, re-run 1" in text) == (True, True)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["suites/test_b.py::test_d"], "did you mean 'suites/test_b.py::test_b'?"),
        (["test_a", "--metric", "speed"], "no metric 'speed'; --metric takes rate"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(dropped, mlhpc, words, why):
    assert why in mlhpc("history", *words, code=2).err


def test_an_unjudged_metric_is_shown_by_its_name(state_dir, mlhpc):
    loss = MetricValue("loss", 1.0, "1", "none")
    store(state_dir, [record(number, measurement=measurement(more=(loss,))) for number in range(3)])
    assert "  loss (1)  " in mlhpc("history", "test_a", "--metric", "loss").out


def test_hostile_names_reach_no_terminal(state_dir, mlhpc):
    evil = "\x1b]0;x\x07 </script>\n"
    hostile = {"benchmark": f"b{evil}", "nodes": (evil,), "environments": [{"d": evil}], "commit": evil}
    store(state_dir, nights(DROP, **hostile))
    printed = [
        mlhpc("history", "event", "add", "--system", "cirrus", f"x{evil}"),
        mlhpc("history", "changes", code=1),
    ]
    printed += [mlhpc("history", "b"), mlhpc("history", "event", "list")]
    assert not {"\x1b", "\x07"} & {letter for one in printed for letter in one.out + one.err}


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([float("nan")], ""), ([1.0], "▅"), ([0.0, 0.0], "▅▅"), ([1, float("nan"), 2], "▁ █"),
     ([100.0, 100.1, 99.9], "▅▅▄"), ([1e308, -1e308], "▅▅")],
)  # fmt: skip
def test_a_sparkline_shows_noise_as_small_as_it_is(values, expected):
    assert rendering.sparkline(values) == expected


def noisy(count, sigma=0.03):
    choose = random.Random(3)  # noqa: S311 - test data, the same each time
    return [100.0 * choose.gauss(1.0, sigma) for _ in range(count)]


@pytest.fixture
def watched(state_dir):
    """A quiet benchmark, a noisy one, and one that is too young."""
    store(state_dir, nights(quiet(40), node_hours=0.25))
    store(
        state_dir, nights(noisy(40), benchmark="suites/test_n.py::test_noisy", node_hours=0.5), session="s2"
    )
    store(state_dir, nights(quiet(12), system="archer2", benchmark="suites/test_b.py::test_b"), session="s3")
    return state_dir


def test_the_smallest_loss_that_fails_a_test_is_told_of_each_benchmark_the_largest_first(watched, mlhpc):
    text = mlhpc("history", "sensitivity").out
    rows = [line.split() for line in text.splitlines()[1:3]]
    assert [row[-1] for row in rows] == ["suites/test_n.py::test_noisy", rows[1][-1]]
    assert (rows[1][3], rows[1][4:7], rows[1][7]) == ("5.0%", ["7.5%", "3.3%", "3.3%"], "0.25")
    assert "fails its test within that time in 90% of cases" in text
    assert (
        "Without a loss, 0 of 1,680 simulated nights failed a test: less than 0.11 a month in 2 series."
        in text
    )
    assert "A night of these benchmarks takes 0.75 node-hours." in text


def test_a_series_that_is_too_young_is_named_with_its_nights(watched, mlhpc):
    text = mlhpc("history", "sensitivity", "test_b").out
    assert text == (
        "1 series cannot be simulated: 20 nights with a figure above 0 are needed\n"
        "  archer2:standard  rate: 12 nights  suites/test_b.py::test_b\n"
    )


def test_several_series_that_are_too_young_are_counted(watched, mlhpc):
    more = nights(quiet(3), system="archer2", benchmark="suites/test_b.py::test_b2")
    store(watched, more, session="s4")
    assert mlhpc("history", "sensitivity", "test_b").out.startswith("2 series cannot be simulated")


def test_another_tolerance_and_another_noise_can_be_tried(watched, mlhpc):
    data = json.loads(mlhpc("history", "sensitivity", "--tolerance", "0.02", "--noise", "0.5", "--json").out)
    noisy_one, quiet_one = data["series"]
    assert quiet_one["then"]["smallest"]["14"] < 0.5 * quiet_one["now"]["smallest"]["14"]
    assert noisy_one["then"]["noise"] == pytest.approx(0.5 * noisy_one["now"]["noise"])
    assert (data["sure"], data["node_hours"]) == (0.9, 0.75)
    assert [one["nights"] for one in data["young"]] == [12]
    text = mlhpc("history", "sensitivity", "noisy", "--noise", "0.5").out
    assert "% -> " in text
    assert "With what is tried, 0 of 840 simulated nights failed a test" in text


def test_the_tolerance_is_that_of_the_baseline_file(watched, mlhpc, tmp_path):
    mlhpc("baseline", "accept", "suites/test_n.py::test_noisy", "--reason", "x", "--baselines-dir", tmp_path)
    path = tmp_path / "cirrus.yaml"
    path.write_text(re.sub("tolerance: .*", "tolerance: 0.5", path.read_text()))
    (row,) = json.loads(mlhpc("history", "sensitivity", "noisy", "--baselines-dir", tmp_path, "--json").out)[
        "series"
    ]
    assert (row["tolerance"], row["now"]["smallest"]["1"] > 0.69) == (0.5, True)


def tolerance_of_noisy(mlhpc, tmp_path, partition, defaults="{}"):
    """Return the tolerance that `sensitivity` uses where systems.yaml has this partition."""
    path = tmp_path / "systems.yaml"
    path.write_text(f"defaults: {defaults}\nsystems: {{cirrus: {{partitions: {{standard: {partition}}}}}}}\n")
    options = ("--systems-file", path, "--baselines-dir", tmp_path / "baselines", "--json")
    (row,) = json.loads(mlhpc("history", "sensitivity", "noisy", *options).out)["series"]
    return row["tolerance"]


def test_a_tolerance_of_the_baseline_file_stands_before_what_matters_on_the_site(watched, mlhpc, tmp_path):
    folder = tmp_path / "baselines"
    mlhpc("baseline", "accept", "suites/test_n.py::test_noisy", "--reason", "x", "--baselines-dir", folder)
    assert tolerance_of_noisy(mlhpc, tmp_path, "{scheduler: local}", "{matters: 3 %}") == 0.03
    entries = folder / "cirrus.yaml"
    entries.write_text(re.sub("tolerance: .*", "tolerance: 0.2", entries.read_text()))
    assert tolerance_of_noisy(mlhpc, tmp_path, "{scheduler: local}", "{matters: 3 %}") == 0.2


def test_the_false_alarms_of_the_systems_file_are_those_of_the_site_and_others_can_be_tried(
    watched, mlhpc, tmp_path
):
    path = tmp_path / "systems.yaml"
    system = "systems: {cirrus: {partitions: {standard: {scheduler: local}}}}\n"

    def smallest(rate, *options):
        path.write_text(f"false_alarms: {rate}\n{system}")
        found = mlhpc("history", "sensitivity", "noisy", "--systems-file", path, *options, "--json").out
        (row,) = json.loads(found)["series"]
        return row["now"]["smallest"]["1"], row["then"] and row["then"]["smallest"]["1"]

    strict, tried = smallest("0.001 per year", "--false-alarms", "1 per night")
    loose, _ = smallest("1 per night")
    assert strict > loose == tried
