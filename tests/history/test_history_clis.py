"""``mlhpc event``, ``changes`` and ``history``: what they print, what they refuse, and how they end."""

import json
import time

import pytest
from nights_of import DAY, nights, quiet, store
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.history import rendering
from pytest_mlhpc.results.dates import iso
from pytest_mlhpc.results.schema import Metric

Out = pytest.CaptureFixture[str]
DROP = [*quiet(30), *quiet(10, 93.0, 2)]


@pytest.fixture
def dropped(state_dir):
    """A benchmark that lost 7 % with a new driver ten nights ago, and one that lost nothing."""
    environments = [{"driver": "570"}] * 30 + [{"driver": "580"}]
    store(state_dir, nights(DROP, environments=environments))
    store(state_dir, nights(quiet(20), system="archer2", benchmark="cosmoflow[x=1]"), session="s2")
    return state_dir


def test_an_event_is_added_listed_and_removed(state_dir, capsys):
    assert main(["event", "add", "--system", "cirrus:gpu", "--on", "2026-11-02", "driver 570 to 580"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith(
        ": driver 570 to 580, cirrus:gpu, a new baseline epoch from 2026-11-02 00:00 UTC on\n"
    )
    assert said.err == ""
    identity = said.out[:8]
    assert main(["event", "list", "--system", "cirrus"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == [identity, "2026-11-02"]
    assert main(["event", "list", "--system", "archer2"]) == 5
    assert main(["event", "remove", identity[:4]]) == 0
    capsys.readouterr()
    assert main(["event", "list"]) == 5
    assert "mlhpc event add" in capsys.readouterr().out


def test_an_event_of_a_system_without_records_is_noted_with_a_doubt(dropped, capsys):
    assert main(["event", "add", "--system", "cirus", "new kernel"]) == 0
    assert "nothing was ever recorded on cirus (did you mean 'cirrus'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "--system", "a", "--on", "yesterday", "x"], "--on 'yesterday' is no date"),
        (["add", "--system", "a:b", "--partition", "c", "x"], "name two partitions"),
        (["add", "--system", "a", " "], "an event needs a system and a text"),
        (["remove", "abc"], "no event's id starts with 'abc'"),
        (["remove", ""], "no event's id starts with ''"),
    ],
)
def test_wrong_words_are_refused(words, said, state_dir, capsys):
    assert main(["event", *words]) == 4
    assert said in capsys.readouterr().err
    assert not (state_dir / "events").exists()


def test_a_drop_is_told_with_its_event_and_what_to_type_next(dropped, capsys):
    day = iso(time.time_ns() - 10 * DAY)
    main(["event", "add", "--system", "cirrus", "--on", day, "driver 570 to 580"])
    capsys.readouterr()
    assert main(["changes"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("2 series are watched, since ")
    assert "cirrus:standard  rate: 7." in text
    assert "% worse, 100" in text
    assert ": driver 570 to 580\n" in text
    assert "  changed there: driver 570 -> 580\n" in text
    assert "  next: mlhpc history 'resnet50[name=test_a,ranks=1]' --system cirrus --metric rate\n" in text
    assert "archer2" not in text
    assert main(["changes", "--system", "archer2"]) == 0
    assert "1 series is watched, the level of none has changed" in capsys.readouterr().out
    assert main(["changes", "--since", "2d"]) == 0


def test_what_became_slower_in_one_night_for_one_reason_is_one_paragraph(state_dir, capsys):
    environments = [{"driver": "570"}] * 30 + [{"driver": "580"}]
    for number in range(12):
        store(
            state_dir,
            nights(DROP, environments=environments, benchmark=f"b{number:02}"),
            session=f"s{number}",
        )
    assert main(["changes"]) == 1
    text = capsys.readouterr().out
    assert [text.count(words) for words in ("% worse", "  since 20", "driver 570 -> 580", "  next: ")] == [
        10,
        1,
        1,
        1,
    ]
    assert "and 2 more series; --json has them all\n" in text


def test_changes_as_json_are_complete(dropped, capsys):
    assert main(["changes", "--json"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["system"], found["metric"], found["better"]) == ("cirrus", "rate", "higher")
    assert found["worse_by"] == pytest.approx(0.07, abs=0.01)
    assert found["causes"] == [{"name": "driver", "before": "570", "after": "580"}]
    assert set(found["at"]) == {"record", "time", "commit", "nodes"}


def test_without_any_nightly_run_there_is_nothing_to_change(state_dir, capsys):
    store(state_dir, [record(1, purpose="manual")])
    assert main(["changes"]) == 5
    assert "no nightly run of the default branch is recorded" in capsys.readouterr().out


def test_a_history_shows_nights_levels_changes_and_events_in_order(dropped, capsys):
    day = iso(time.time_ns() - 15 * DAY)
    main(["event", "add", "--system", "cirrus", "--on", day, "new kernel"])
    capsys.readouterr()
    assert main(["history", "RESNET"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cirrus:standard  rate (samples/s, higher is better)  resnet50[name=test_a,ranks=1]"
    assert "  40 nights, 92." in lines[1]
    assert sum(line.startswith("  20") for line in lines) == 20
    kernel = next(number for number, line in enumerate(lines) if "new kernel" in line)
    drop = next(number for number, line in enumerate(lines) if "% worse" in line)
    assert 2 < kernel < drop
    assert lines[drop + 1] == "     changed there: driver 570 -> 580"


def test_a_test_is_found_by_its_id_and_nights_by_their_time(dropped, capsys):
    assert main(["history", record().node_id, "--system", "cirrus", "--since", "5d", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == record().benchmark
    assert len(found["points"]) == 5
    assert len(found["changes"]) == 1


def test_runs_that_are_not_watched_are_shown_if_asked(state_dir, capsys):
    store(state_dir, [record(1, purpose="manual"), record(2, attempt=1)])
    assert main(["history", "resnet50"]) == 5
    assert "2 figures are recorded, none of a night that is watched" in capsys.readouterr().err
    assert main(["history", "resnet50", "--all"]) == 0
    text = capsys.readouterr().out
    assert "passed, manual" in text
    assert "passed, re-run 1" in text


def test_what_is_not_there_is_refused_with_what_is(dropped, capsys):
    assert main(["history", "cosmoflow[x=2]"]) == 4
    assert "did you mean 'cosmoflow[x=1]'?" in capsys.readouterr().err
    assert main(["history", "resnet", "--metric", "speed"]) == 4
    assert "no metric 'speed'; --metric takes rate" in capsys.readouterr().err


def test_an_unjudged_metric_is_shown_by_its_name(state_dir, capsys):
    loss = Metric("loss", 1.0, "1", "none")
    store(state_dir, [record(number, measurement=measurement(more=(loss,))) for number in range(3)])
    assert main(["history", "resnet", "--metric", "loss"]) == 0
    assert "  loss (1)  " in capsys.readouterr().out


def test_hostile_names_reach_no_terminal(state_dir, capsys):
    evil = "\x1b]0;x\x07 </script>\n"
    store(
        state_dir, nights(DROP, benchmark=f"b{evil}", nodes=(evil,), environments=[{"d": evil}], commit=evil)
    )
    main(["event", "add", "--system", "cirrus", f"x{evil}"])
    main(["changes"])
    main(["history", "b"])
    main(["event", "list"])
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err


def test_influx_without_an_address_says_how_to_give_one(state_dir, capsys, monkeypatch):
    monkeypatch.delenv("MLHPC_INFLUX_URL", raising=False)
    assert main(["changes", "--from", "influx"]) == 4
    assert "MLHPC_INFLUX_URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([float("nan")], ""), ([1.0], "▅"), ([0.0, 0.0], "▅▅"), ([1, float("nan"), 2], "▁ █"),
     ([100.0, 100.1, 99.9], "▅▅▄"), ([1e308, -1e308], "▅▅")],
)  # fmt: skip
def test_a_sparkline_shows_noise_as_small_as_it_is(values, expected):
    assert rendering.sparkline(values) == expected
