"""`mlhpc papers mlperf report`: results, breakdown, prediction, scaling and published results, from what was recorded."""

import dataclasses
import json
import re

import pytest
from trained_runs import EVALUATED, SAMPLES, events, record, run_at, sweep, with_value

from pytest_mlhpc.papers.mlperf.results import references
from pytest_mlhpc.papers.mlperf.sheets import data_of
from pytest_mlhpc.papers.mlperf.sheets import make_sheets as sheets_of
from pytest_mlhpc.papers.mlperf.trained import sort_out


@pytest.fixture
def report(mlhpc):
    """Return what prints a report."""
    return lambda *words, code=0: mlhpc(
        "papers", "mlperf", "report", "--since", "2020-01-01", *words, code=code
    )


@pytest.fixture
def sheets(report):
    """Return what reports the tables as data."""
    return lambda *words: json.loads(report("--json", *words).out)["sheets"]


def test_repeated_runs_are_one_row_with_their_olympic_mean(store, sheets):
    store(*(run_at(number, 2, epoch_s=float(number)) for number in (1, 2, 3, 6)))
    (row,) = sheets()["results"]["rows"]
    assert (row["benchmark"], row["devices"], row["global batch"], row["runs"]) == ("test_quality", 2, 32, 4)
    assert row["time to train [s]"] == 5 + 4 * 2.5 + 4  # staging, training of the middle ones, evaluation
    assert (row["training epochs"], row["target"], row["division"]) == (4, 0.124, "neither")


def test_runs_that_staged_in_other_ways_can_be_told_apart(store, sheets):
    ways = (None, "files", "archives")
    settings = [{"staging": way} if way else {} for way in ways]
    store(*(run_at(number, 2, parameters=one) for number, one in enumerate(settings, 1)))
    found = sheets()
    assert {row["staging"] for row in found["results"]["rows"]} == set(ways)
    scales = {row["scale"] for row in found["breakdown"]["rows"]}
    assert scales == {f"2 devices, batch 32{more}" for more in ("", ", staging=files", ", staging=archives")}
    notes = " ".join(found["results"]["notes"])
    assert all(f"batch 32, staging={way}: no result" in notes for way in ways[1:])


def test_runs_without_a_result_say_why(store, sheets):
    store(run_at(1, 2), run_at(2, 2, reached=False))
    found = sheets()["results"]
    (row,) = found["rows"]
    assert (row["time to train [s]"], row["did not converge"]) == (None, 1)
    place = "test_quality on cirrus:standard, 2 devices, batch 32"
    assert f"{place}: no result, 2 of the 3 runs" in found["notes"][1]


def test_time_is_broken_down_and_adds_up(store, sheets):
    store(run_at(1, 2, epoch_s=10.0))
    (row,) = sheets()["breakdown"]["rows"]
    seconds = {"staging": 5, "training": 40, "evaluation": 4}
    assert {part: row[f"{part} [s]"] for part in (*seconds, "other")} == {**seconds, "other": 0}
    shares = {part: pytest.approx(100 * took / 49) for part, took in seconds.items()}
    assert {part: row[f"{part} [%]"] for part in seconds} == shares


def test_evaluations_within_a_training_epoch_count_once(store, sheets):
    told = list(events(epochs=1, epoch_s=10.0, eval_s=2.0))
    place = {event.key: at for at, event in enumerate(told)}
    stop = dataclasses.replace(told[place["epoch_stop"]], time_ns=told[place["eval_stop"]].time_ns)
    told.insert(place["eval_stop"] + 1, stop)
    del told[place["epoch_stop"]]
    store(record(1, told=tuple(told)))
    (row,) = sheets()["breakdown"]["rows"]
    assert (row["training [s]"], row["evaluation [s]"], row["other [s]"]) == (10, 2, 0)


def test_departures_name_their_rules_and_whom_they_bind(store, sheets):
    store(run_at(1, 2))
    first, second = sheets()["departures"]["rows"]
    assert [(row["rule"], row["binds"]) for row in (first, second)] == [
        ("data_set", "both"),
        ("runs", "both"),
    ]
    assert first["departure"].startswith("synthetic data; 1,024 training samples, not 524,288")
    assert "Training and Test Sets" in first["where the rule stands"]
    assert second["departure"] == "1 of 10 runs"


def test_predictions_stand_beside_their_error_on_scales_held_back(store, sheets):
    store(*(run_at(number, devices) for number, devices in enumerate((1, 2, 4))))
    found = sheets("--devices", "8,16")
    predicted = [(row["devices"], row["epoch time is"]) for row in found["predictions"]["rows"]]
    assert predicted == [(8, "fitted"), (16, "fitted")]
    assert [row["devices"] for row in found["held_back"]["rows"]] == [1, 2, 4]
    assert "of 3 scales." in found["held_back"]["notes"][1]


def test_scaling_is_strong_at_one_batch_and_weak_at_one_batch_of_a_device(store, sheets):
    store(run_at(1, 1, 32, epoch_s=32.0), run_at(2, 4, 32, epoch_s=16.0), run_at(3, 4, 128, epoch_s=10.0))
    found = sheets()

    def shown(sheet, *columns):
        return [tuple(row[name] for name in columns) for row in found[sheet]["rows"]]

    assert shown("strong_scaling", "devices", "speed-up", "efficiency [%]") == [(1, 1, 100), (4, 2, 50)]
    weak = [(32, 1, 100), (32, 4, pytest.approx(80))]
    assert shown("weak_scaling", "batch of a device", "devices", "efficiency [%]") == weak


@pytest.mark.parametrize(("workload", "count"), [("cosmoflow", 26), ("deepcam", 14)])
def test_published_results_stand_beside_ours_with_their_source(store, sheets, workload, count):
    store(record(1, workload, data_kind="synthetic", told=events(workload, counts=(SAMPLES, EVALUATED))))
    found = sheets()[f"published_{workload}"]
    assert [row["whose"] for row in found["rows"]] == ["ours"] + ["published"] * count
    assert len(references(workload)) == count
    for row in found["rows"][1:]:
        assert row["source"]
        assert row["minutes to train"] or row["samples/s of a device"]
    why = "Not to be compared with published results: test_quality on cirrus:standard: synthetic data"
    assert why in found["notes"][0]


@pytest.mark.parametrize(
    ("workload", "where", "minutes", "per_device"),
    [
        ("cosmoflow", ("ABCI", "closed", 512), 34.42, None),
        ("cosmoflow", ("Fugaku", "open", 16384), 30.07, None),
        ("deepcam", ("H100, v3.0", "", 16), None, 81.9),
    ],
)
def test_what_is_published_is_what_the_sources_say(workload, where, minutes, per_device):
    found = [one for one in references(workload) if (one.system, one.division, one.devices) == where]
    assert (minutes, per_device) in [(one.minutes, one.per_device) for one in found]


def test_text_and_markdown_hold_every_sheet(store, sheets, report):
    store(*(run_at(number, devices) for number, devices in enumerate((1, 2, 4))))
    titles = [sheet["title"] for sheet in sheets().values()]
    assert len(titles) == 7
    text, markdown = report().out, report("--format", "markdown").out
    assert all(f"{title}\n{'-' * len(title)}\n" in text for title in titles)
    assert all(f"## {title}\n" in markdown for title in titles)


def test_names_obey_nothing_that_shows_them(store, report):
    store(run_at(1, 2, system="a|b\x1b[31m<i>"))
    out = report("--format", "markdown").out
    assert [text in out for text in ("\x1b", r"a\|b", "&lt;i&gt;")] == [False, True, True]


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), 10**400, -1, "many", None, [1]], ids=str)
@pytest.mark.parametrize(
    "key", ["train_samples", "quality_target", "eval_error", "global_batch_size", "eval_samples"]
)
def test_figures_that_are_none_end_no_report(key, odd):
    stored = record(1, told=with_value(key, odd))
    found = sort_out([stored, record(2)])
    assert [run.record for run in found.runs] == [stored.id, record(2).id]
    data = json.loads(json.dumps(data_of(sheets_of(found), {}), allow_nan=False))
    assert data["sheets"]["results"]["rows"]


def test_events_at_times_that_no_clock_tells_are_left_out():
    *before, stop = events()
    (why,) = sort_out([record(1, told=(*before, dataclasses.replace(stop, time_ns=10**40)))]).left_out
    assert why.endswith("an event has an impossible time")


def test_re_runs_do_not_count(store, sheets):
    store(run_at(1, 2), run_at(2, 2, attempt=1))
    assert sheets()["results"]["rows"][0]["runs"] == 1


def test_runs_of_other_systems_and_benchmarks_can_be_left_out(store, sheets):
    store(run_at(1, 2), run_at(2, 2, system="archer2"), record(3, "deepcam"))
    (row,) = sheets("--system", "archer2")["results"]["rows"]
    assert row["machine"] == "archer2:standard"
    assert set(sheets("--benchmark", "deepcam")) >= {"results", "published_deepcam"}


def test_of_several_texts_a_benchmark_holds_all(store, sheets):
    store(run_at(1, 2, 32), run_at(2, 4, 32), run_at(3, 4, 64))
    rows = sheets("--benchmark", "devices=4", "--benchmark", "global_batch=64")["results"]["rows"]
    assert [(row["devices"], row["global batch"]) for row in rows] == [(4, 64)]


def test_without_runs_there_is_nothing_to_report(report):
    assert "no run to a quality target is recorded in" in report().out


def window(number, devices, batch, share):
    """Return a run that is a window of steps, of another training."""
    parameters = {"until": None, "global_batch": batch, "kernel_size": 2}
    one = run_at(number, devices, batch, parameters=parameters, communication=share)
    return dataclasses.replace(one, parameters={**one.parameters, **parameters}, verdict="passed")


def test_communication_is_a_share_of_a_step_at_each_scale_with_several_ranks(store, sheets):
    store(*sweep())
    rows = sheets()["communication"]["rows"]
    found = {(row["devices"], row["global batch"]): row["communication [%]"] for row in rows}
    assert found == {
        (devices, batch): pytest.approx(100 * devices / batch) for devices in (2, 4) for batch in (8, 16, 32)
    }


def test_communication_of_repeated_runs_is_their_median_and_never_more_than_a_step(store, sheets):
    store(
        *(run_at(number, 2, communication=share) for number, share in enumerate((0.1, 0.3, 1.7), 1)),
        run_at(9, 4, communication=1.7),
    )
    rows = sheets()["communication"]["rows"]
    assert [(row["communication [%]"], row["runs"]) for row in rows] == [(pytest.approx(30), 3), (100, 1)]


def test_windows_of_steps_tell_communication_too_without_any_run_to_a_quality(store, report):
    store(window(1, 2, 16, 0.1), window(2, 4, 16, 0.2))
    printed = report("--json")
    (name,) = json.loads(printed.out)["sheets"]
    rows = json.loads(printed.out)["sheets"][name]["rows"]
    assert (name, [(row["devices"], row["communication [%]"], row["from"]) for row in rows]) == (
        "communication", [(2, pytest.approx(10), "window"), (4, pytest.approx(20), "window")],
    )  # fmt: skip
    assert "no run to a quality target is recorded" in printed.err


def pictures(report):
    """Return the page's pictures: what each shows -> its markup."""
    page = report("--format", "html").out
    found = r'<svg viewBox="0 0 860 300" role="img" aria-label="([^"]*)">(.*?)</svg>'
    return dict(re.findall(found, page, re.DOTALL))


def test_the_page_draws_communication_over_devices_and_joins_epochs_and_their_time_on_the_batch(
    store, report
):
    store(*sweep())
    drawn = pictures(report)
    assert [*drawn] == [
        "training epochs to the target over global batch", "training epoch, s over global batch",
        "time to train, s over global batch", "communication, % of a step over devices",
    ]  # fmt: skip
    share = drawn["communication, % of a step over devices"]
    assert "<title>global batch 16: 25 at 4</title>" in share
    assert (share.count("<polyline"), share.count("<circle")) == (3, 6)
    time_to_train = drawn["time to train, s over global batch"]
    assert (time_to_train.count('class="point'), time_to_train.count('class="trained')) == (9, 5)
    assert time_to_train.count("predicted</title>") == 5  # of 8 and 16 devices; 16 have no batch of 8


def test_where_it_was_measured_the_joined_picture_is_epochs_times_their_time_and_the_rest(store, report):
    store(*sweep())
    found = {
        name: re.findall(r"<title>(.*?): (\S+) at (\d+)</title>", markup)
        for name, markup in pictures(report).items()
    }
    epochs, each, whole = (
        {(name, batch): float(value) for name, value, batch in found[f"{what} over global batch"]}
        for what in ("training epochs to the target", "training epoch, s", "time to train, s")
    )
    assert len(whole) == 9
    staging = 5
    expected = {
        (name, batch): staging + epochs["any devices", batch] * (each[name, batch] + 1)
        for name, batch in whole
    }  # an evaluation after each epoch takes a second
    assert whole == pytest.approx(expected, rel=2e-3)


def test_a_page_is_safe_whatever_stands_in_names(store, report):
    store(run_at(1, 2, communication=0.1, name="test_<script>alert(1)</script>", system="<b>"))
    page = report("--format", "html").out
    assert ("<script" in page, "<b>" in page, "&lt;b&gt;" in page) == (False, False, True)
