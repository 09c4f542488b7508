"""`mlhpc mlperf report`: results, breakdown, prediction, scaling and published results, from what was recorded."""

from __future__ import annotations

import dataclasses
import json

import pytest
from trained_runs import events, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.mlperf.reference import references
from pytest_mlhpc.mlperf.render import json_of
from pytest_mlhpc.mlperf.sheets import sheets as sheets_of
from pytest_mlhpc.mlperf.source import sort_out

SAMPLES, EVALUATED = 1024, 64


def reported(*words):
    return main(["mlperf", "report", "--since", "2020-01-01", *words])


def sheets(capsys, *words):
    assert reported("--format", "json", *words) == 0
    return json.loads(capsys.readouterr().out)["sheets"]


def run_at(number, devices, batch=32, *, epochs=4, epoch_s=None, **changes):
    took = epoch_s or SAMPLES / batch * (0.01 + 0.001 * batch / devices)
    told = events(
        epochs=epochs,
        epoch_s=took,
        eval_s=1.0,
        counts=(SAMPLES, EVALUATED),
        reached=changes.pop("reached", True),
    )
    fields = {"devices": devices, "data_kind": "synthetic", **changes}
    parameters = {"global_batch": batch, **fields.pop("parameters", {})}
    return record(number, parameters=parameters, told=told, **fields)


def test_repeated_runs_are_one_row_with_their_olympic_mean(store, capsys):
    store(*(run_at(number, 2, epoch_s=float(number)) for number in (1, 2, 3, 6)))
    (row,) = sheets(capsys)["results"]["rows"]
    assert (row["benchmark"], row["devices"], row["global batch"], row["runs"]) == ("test_quality", 2, 32, 4)
    assert row["time to train [s]"] == 5 + 4 * 2.5 + 4  # staging, training of the middle ones, evaluation
    assert (row["training epochs"], row["target"], row["division"]) == (4, 0.124, "neither")


def test_runs_that_staged_in_other_ways_can_be_told_apart(store, capsys):
    ways = (None, "files", "archives")
    store(
        *(run_at(number, 2, parameters={"staging": way} if way else {}) for number, way in enumerate(ways, 1))
    )
    found = sheets(capsys)
    assert {row["staging"] for row in found["results"]["rows"]} == set(ways)
    scales = {row["scale"] for row in found["breakdown"]["rows"]}
    assert scales == {f"2 devices, batch 32{more}" for more in ("", ", staging=files", ", staging=archives")}
    notes = " ".join(found["results"]["notes"])
    assert all(f"batch 32, staging={way}: no result" in notes for way in ways[1:])


def test_runs_without_a_result_say_why(store, capsys):
    store(run_at(1, 2), run_at(2, 2, reached=False))
    found = sheets(capsys)["results"]
    assert found["rows"][0]["time to train [s]"] is None
    assert found["rows"][0]["did not converge"] == 1
    assert (
        "test_quality on cirrus:standard, 2 devices, batch 32: no result, 2 of the 3 runs"
        in found["notes"][1]
    )


def test_time_is_broken_down_and_adds_up(store, capsys):
    store(run_at(1, 2, epoch_s=10.0))
    (row,) = sheets(capsys)["breakdown"]["rows"]
    assert [row[f"{part} [s]"] for part in ("staging", "training", "evaluation", "other")] == [5, 40, 4, 0]
    assert [row[f"{part} [%]"] for part in ("staging", "training", "evaluation")] == pytest.approx(
        [500 / 49, 4000 / 49, 400 / 49]
    )


def test_evaluations_within_a_training_epoch_count_once(store, capsys):
    told = list(events(epochs=1, epoch_s=10.0, eval_s=2.0))
    stop = next(event for event in told if event.key == "epoch_stop")
    told.remove(stop)
    end = next(event for event in told if event.key == "eval_stop")
    told.insert(told.index(end) + 1, type(stop)(stop.key, end.time_ns, None, stop.metadata))
    store(record(1, told=tuple(told)))
    (row,) = sheets(capsys)["breakdown"]["rows"]
    assert (row["training [s]"], row["evaluation [s]"], row["other [s]"]) == (10, 2, 0)


def test_departures_name_their_rules_and_whom_they_bind(store, capsys):
    store(run_at(1, 2))
    rows = sheets(capsys)["departures"]["rows"]
    assert [(row["rule"], row["binds"]) for row in rows] == [("data_set", "both"), ("runs", "both")]
    assert rows[0]["departure"].startswith("synthetic data; 1,024 training samples, not 524,288")
    assert rows[1]["departure"] == "1 of 10 runs"
    assert "Training and Test Sets" in rows[0]["where the rule stands"]


def test_predictions_stand_beside_their_error_on_scales_held_back(store, capsys):
    store(*(run_at(number, devices) for number, devices in enumerate((1, 2, 4))))
    found = sheets(capsys, "--devices", "8,16")
    assert [row["devices"] for row in found["predictions"]["rows"]] == [8, 16]
    assert all(row["epoch time is"] == "fitted" for row in found["predictions"]["rows"])
    assert [row["devices"] for row in found["held_back"]["rows"]] == [1, 2, 4]
    assert "of 3 scales." in found["held_back"]["notes"][1]


def test_scaling_is_strong_at_one_batch_and_weak_at_one_batch_of_a_device(store, capsys):
    store(run_at(1, 1, 32, epoch_s=32.0), run_at(2, 4, 32, epoch_s=16.0), run_at(3, 4, 128, epoch_s=10.0))
    found = sheets(capsys)
    strong, weak = found["strong_scaling"]["rows"], found["weak_scaling"]["rows"]
    assert [(row["devices"], row["speed-up"], row["efficiency [%]"]) for row in strong] == [
        (1, 1, 100),
        (4, 2, 50),
    ]
    assert [(row["batch of a device"], row["devices"], row["efficiency [%]"]) for row in weak] == [
        (32, 1, 100), (32, 4, pytest.approx(80)),
    ]  # fmt: skip


@pytest.mark.parametrize(("workload", "count"), [("cosmoflow", 26), ("deepcam", 14)])
def test_published_results_stand_beside_ours_with_their_source(store, capsys, workload, count):
    store(record(1, workload, data_kind="synthetic", told=events(workload, counts=(SAMPLES, EVALUATED))))
    found = sheets(capsys)[f"published_{workload}"]
    assert [row["whose"] for row in found["rows"]] == ["ours"] + ["published"] * count
    assert len(references(workload)) == count
    assert all(
        row["source"] and (row["minutes to train"] or row["samples/s of a device"])
        for row in found["rows"][1:]
    )
    assert (
        "Not to be compared with published results: test_quality on cirrus:standard: synthetic data"
        in found["notes"][0]
    )


def test_what_is_published_is_what_the_sources_say():
    found = {
        (one.system, one.division, one.devices): one.minutes for one in references("cosmoflow") if one.minutes
    }
    assert found[("ABCI", "closed", 512)] == 34.42
    assert found[("Fugaku", "open", 16384)] == 30.07
    rates = {(one.system, one.devices): one.per_device for one in references("deepcam") if one.per_device}
    assert rates[("H100, v3.0", 16)] == 81.9


def test_text_and_markdown_hold_every_sheet(store, capsys):
    store(*(run_at(number, devices) for number, devices in enumerate((1, 2, 4))))
    titles = [sheet["title"] for sheet in sheets(capsys).values()]
    assert len(titles) == 7
    assert reported() == 0
    text = capsys.readouterr().out
    assert reported("--format", "markdown") == 0
    markdown = capsys.readouterr().out
    assert all(f"{title}\n{'-' * len(title)}\n" in text for title in titles)
    assert all(f"## {title}\n" in markdown for title in titles)


def test_names_obey_nothing_that_shows_them(store, capsys):
    store(run_at(1, 2, system="a|b\x1b[31m<i>"))
    assert reported("--format", "markdown") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert r"a\|b" in out
    assert "&lt;i&gt;" in out


@pytest.mark.parametrize("odd", [float("inf"), float("nan"), 10**400, -1, "many", None, [1]], ids=str)
@pytest.mark.parametrize(
    "key", ["train_samples", "quality_target", "eval_error", "global_batch_size", "eval_samples"]
)
def test_figures_that_are_none_end_no_report(store, capsys, key, odd):
    told = tuple(dataclasses.replace(event, value=odd) if event.key == key else event for event in events())
    stored = record(1, told=told)
    found = sort_out([stored, record(2)])
    assert [run.record for run in found.runs] == [stored.id, record(2).id]
    text = json_of(sheets_of(found), {})
    assert json.loads(text)["sheets"]["results"]["rows"]


def test_events_at_times_that_no_clock_tells_are_left_out():
    told = tuple(
        dataclasses.replace(event, time_ns=10**40) if event.key == "run_stop" else event for event in events()
    )
    (why,) = sort_out([record(1, told=told)]).left_out
    assert why.endswith("an event is at a time that no clock tells")


def test_re_runs_do_not_count(store, capsys):
    store(run_at(1, 2), run_at(2, 2, attempt=1))
    assert sheets(capsys)["results"]["rows"][0]["runs"] == 1


def test_runs_of_other_systems_and_benchmarks_can_be_left_out(store, capsys):
    store(run_at(1, 2), run_at(2, 2, system="archer2"), record(3, "deepcam"))
    assert [row["machine"] for row in sheets(capsys, "--system", "archer2")["results"]["rows"]] == [
        "archer2:standard"
    ]
    assert set(sheets(capsys, "--benchmark", "deepcam")) >= {"results", "published_deepcam"}


def test_of_several_texts_a_benchmark_holds_all(store, capsys):
    store(run_at(1, 2, 32), run_at(2, 4, 32), run_at(3, 4, 64))
    rows = sheets(capsys, "--benchmark", "devices=4", "--benchmark", "global_batch=64")["results"]["rows"]
    assert [(row["devices"], row["global batch"]) for row in rows] == [(4, 64)]


def test_without_runs_there_is_nothing_to_report(tmp_path, capsys):
    assert reported() == 5
    assert "no run to a quality target is recorded in" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "a", "8,,16", "-4", "100000000"])
def test_odd_numbers_of_devices_are_usage_errors(capsys, text):
    with pytest.raises(SystemExit) as ended:
        reported(f"--devices={text}")
    assert ended.value.code == 4
    assert "is no list of numbers of devices such as 8,16,32" in capsys.readouterr().err
