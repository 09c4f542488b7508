"""`mlhpc mlperf log` writes what records say, and nothing that they do not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from trained_runs import BEGUN, FACTS, SECOND, events, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.mlperf.rules import departures
from pytest_mlhpc.mlperf.trained import trained
from pytest_mlhpc.results.schema import Event

SINCE = ["--since", "2020-01-01"]
WHO = ["--org", "EPCC", "--division", "open"]


def logged(folder, *words):
    return main(["mlperf", "log", *SINCE, *WHO, "--output", str(folder), *words])


def lines(path):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def value(path, key):
    (found,) = [line["value"] for line in lines(path) if line["key"] == key]
    return found


def test_each_run_becomes_one_log_oldest_first(store, tmp_path, capsys):
    store(record(2), record(1), record(3))
    assert logged(tmp_path / "logs") == 0
    paths = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in paths] == ["result_0.txt", "result_1.txt", "result_2.txt"]
    assert [value(path, "mlhpc_record")[-1] for path in paths] == ["1", "2", "3"]
    out = capsys.readouterr().out
    assert out.count("reached its target") == 3
    assert "olympic mean of 3 runs: 41 s" in out


def test_every_line_is_one_of_mlperf_logging_in_the_order_of_time(store, tmp_path):
    store(record())
    assert logged(tmp_path / "logs") == 0
    path = tmp_path / "logs" / "result_0.txt"
    assert all(line.startswith(":::MLLOG {") for line in path.read_text().splitlines())
    told = lines(path)
    assert [line["time_ms"] for line in told] == sorted(line["time_ms"] for line in told)
    assert told[0]["time_ms"] == BEGUN * 1000 // SECOND
    assert {line["event_type"] for line in told} == {"POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"}
    assert all(line["metadata"]["file"] == "pytest_mlhpc/mlperf/writing.py" for line in told)


def test_a_log_holds_what_the_record_knows_and_who_submits(store, tmp_path):
    store(record(devices=8, nodes=2))
    assert logged(tmp_path / "logs", "--platform", "Cirrus", "--status", "onprem") == 0
    path = tmp_path / "logs" / "result_0.txt"
    expected = {
        "submission_org": "EPCC", "submission_platform": "Cirrus", "submission_status": "onprem",
        "submission_division": "open", "submission_benchmark": "cosmoflow", "number_of_nodes": 2,
        "accelerators_per_node": 4, "number_of_ranks": 8, "global_batch_size": 32, "seed": 1, "opt_name": "SGD",
        "cache_clear": True, "train_samples": 524_288, "opt_weight_decay": 0.0,
    }  # fmt: skip
    assert {key: value(path, key) for key in expected} == expected


def test_a_cpu_has_no_accelerators(store, tmp_path):
    store(record(devices=8, nodes=2, device_type="cpu"))
    assert logged(tmp_path / "logs") == 0
    assert value(tmp_path / "logs" / "result_0.txt", "accelerators_per_node") == 0


def test_a_cache_that_was_not_cleared_is_not_said_to_have_been(store, tmp_path):
    store(record(cache="unknown"))
    assert logged(tmp_path / "logs") == 0
    assert value(tmp_path / "logs" / "result_0.txt", "cache_clear") is False


def test_what_a_run_did_not_tell_is_left_out(store, tmp_path):
    facts = {key: one for key, one in FACTS["cosmoflow"].items() if key != "opt_base_learning_rate"}
    store(record(told=events(facts=facts)))
    assert logged(tmp_path / "logs") == 0
    assert "opt_base_learning_rate" not in (tmp_path / "logs" / "result_0.txt").read_text()


def test_departures_are_lines_of_the_log_and_of_what_is_printed(store, tmp_path, capsys):
    store(record(data_kind="synthetic", told=events(counts=(64, 16))))
    assert logged(tmp_path / "logs") == 0
    found = [line for line in lines(tmp_path / "logs" / "result_0.txt") if line["key"] == "mlhpc_departure"]
    assert [line["value"] for line in found] == [
        "synthetic data",
        "64 training samples, not 524,288",
        "16 evaluation samples, not 65,536",
    ]
    assert {line["metadata"]["rule"] for line in found} == {"data_set"}
    out = capsys.readouterr().out
    assert (
        "data_set: synthetic data; 64 training samples, not 524,288; 16 evaluation samples, not 65,536" in out
    )
    assert "by the rules these runs belong in no division of MLPerf; their logs say open" in out


def test_ten_faultless_runs_belong_in_the_closed_division(store, tmp_path, capsys):
    store(*(record(number, parameters={"seed": number}) for number in range(1, 11)))
    assert logged(tmp_path / "logs") == 0
    out = capsys.readouterr().out
    assert "departures" not in out
    assert "by the rules these runs belong in the closed division; their logs say open" in out


def test_the_newest_runs_can_be_chosen_and_no_others(store, tmp_path):
    store(record(1), record(2), record(3))
    assert logged(tmp_path / "logs", "--last", "2") == 0
    assert [value(path, "mlhpc_record")[-1] for path in sorted((tmp_path / "logs").iterdir())] == ["2", "3"]


def test_results_are_replaced_only_when_told_to(store, tmp_path, capsys):
    store(record(1), record(2))
    assert logged(tmp_path / "logs") == 0
    assert logged(tmp_path / "logs") == 4
    assert "holds result_0.txt already; --replace" in capsys.readouterr().err
    assert logged(tmp_path / "logs", "--replace", "--last", "1") == 0
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["result_0.txt"]


def test_runs_of_several_benchmarks_are_listed_and_none_is_written(store, tmp_path, capsys):
    store(record(1), record(2, "deepcam"))
    assert logged(tmp_path / "logs") == 4
    err = capsys.readouterr().err
    assert "choose by --system and --benchmark" in err
    assert "cirrus:standard  cosmoflow[" in err
    assert "cirrus:standard  deepcam[" in err
    assert not (tmp_path / "logs").exists()
    assert logged(tmp_path / "logs", "--benchmark", "deepcam") == 0


def test_without_runs_nothing_is_written_and_it_says_how_to_make_one(tmp_path, capsys):
    assert logged(tmp_path / "logs", "--benchmark", "x") == 5
    err = capsys.readouterr().err
    assert "no run to a quality target is recorded in" in err
    assert "with --benchmark x" in err
    assert 'until="quality"' in err
    assert not (tmp_path / "logs").exists()


def test_a_run_that_told_nothing_has_no_log_but_counts(store, tmp_path, capsys):
    store(record(1), record(2, verdict="target_missed", measurement=None))
    assert logged(tmp_path / "logs") == 0
    told = capsys.readouterr()
    assert (
        "no log: record 01890000-0000-7000-8000-000000000002 (target_missed) ended before it told" in told.err
    )
    assert "no result: 2 of the 3 runs that an olympic mean takes" in told.out


def test_runs_of_which_none_told_anything_write_nothing(store, tmp_path, capsys):
    store(record(1, verdict="target_missed", measurement=None))
    assert logged(tmp_path / "logs") == 5
    assert "none of these 1 runs told what happened" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    ("verdict", "why"),
    [("node_failure", "not the run's fault: node_failure"), ("worker_exit", "broken: worker_exit")],
)
def test_a_run_that_was_ended_is_left_out_by_name(store, tmp_path, capsys, verdict, why):
    store(record(1, verdict=verdict, measurement=None), record(2))
    assert logged(tmp_path / "logs") == 0
    assert f"left out: 01890000-0000-7000-8000-000000000001: {why}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "text"),
    [
        (
            lambda run: (*run[:-1], Event("epoch_stop", BEGUN + 900 * SECOND), run[-1]),
            "epoch_stop without epoch_start",
        ),
        (lambda run: (*run, Event("run_start", BEGUN + 901 * SECOND)), "there are 2 run_start, not one"),
        (lambda run: (run[0], *run), "init_start twice without init_stop"),
    ],
    ids=["a phase that stops twice", "two runs", "init_start twice"],
)
def test_a_run_whose_events_contradict_themselves_is_left_out_by_name(store, tmp_path, capsys, told, text):
    store(record(1, told=told(events())))
    assert logged(tmp_path / "logs") == 5
    assert text in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_an_event_that_says_otherwise_than_the_record_is_refused(store, tmp_path, capsys):
    facts = {**FACTS["cosmoflow"], "number_of_nodes": 64}
    store(record(told=events(facts=facts)))
    assert logged(tmp_path / "logs") == 4
    assert "contradicts itself: its event number_of_nodes says 64, the record 1" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("key", ["a\nb", "", "submission_org", "é"])
def test_an_event_that_would_make_a_false_line_is_refused(store, tmp_path, capsys, key):
    store(record(told=events(facts={**FACTS["cosmoflow"], key: 1})))
    assert logged(tmp_path / "logs") == 4
    assert "record 01890000-0000-7000-8000-000000000001" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_a_workload_that_is_no_benchmark_of_mlperf_hpc_is_refused(store, tmp_path, capsys):
    store(
        record(
            benchmark="resnet50[] devices=2 name=test_a nodes=1", measurement=None, verdict="target_missed"
        )
    )
    assert logged(tmp_path / "logs") == 5
    assert "ended before it told anything" in capsys.readouterr().err


def test_without_the_library_it_says_what_to_install(store, tmp_path, capsys, monkeypatch):
    store(record())
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    assert logged(tmp_path / "logs") == 4
    assert (
        "mlperf-logging, which is not installed: pip install 'pytest-mlhpc[mlperf]'"
        in capsys.readouterr().err
    )


def test_a_folder_that_cannot_be_written_is_named(store, tmp_path, capsys):
    store(record())
    (tmp_path / "file").write_text("")
    assert logged(tmp_path / "file" / "logs") == 3
    assert f"{tmp_path / 'file' / 'logs' / 'result_0.txt'}: cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--last", "0"], ["--last", "-3"], ["--since", "yesterday"]])
def test_odd_options_are_usage_errors(store, tmp_path, words):
    store(record())
    assert logged(tmp_path / "logs", *words) == 4


@pytest.mark.parametrize("words", [["--org", " "], ["--org", "a\nb"], ["--platform", ""]])
def test_who_submits_has_a_name(store, tmp_path, capsys, words):
    store(record())
    assert logged(tmp_path / "logs", *words) == 4
    assert f"{words[0]} {words[1]!r}: must be a name" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_replacing_logs_leaves_other_files_alone(store, tmp_path):
    store(record(1), record(2))
    (tmp_path / "logs").mkdir()
    for name in ("result_notes.txt", "result_7.txt", "result_0.txt.new"):
        (tmp_path / "logs" / name).write_text("mine")
    assert logged(tmp_path / "logs", "--replace") == 0
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "result_0.txt", "result_1.txt", "result_notes.txt",
    }  # fmt: skip
    assert main(["mlperf", "check", str(tmp_path / "logs")]) == 0


#: Replaces a set of logs in a process that ends without a word at one of its changes of the disk.
REPLACING = """
import os, sys
from pathlib import Path
from pytest_mlhpc.mlperf.writing import write_logs
left = int(sys.argv[2])
def count(event, arguments):
    global left
    if event in ("os.rename", "os.remove") and "result_" in str(arguments[0]):
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(count)
write_logs(Path(sys.argv[1]), ["new"] * 2, replace=True)
"""


def test_whenever_replacing_dies_no_set_is_of_old_and_new_logs(tmp_path):
    for deaths in range(20):
        folder = tmp_path / str(deaths)
        folder.mkdir()
        for number in range(3):
            (folder / f"result_{number}.txt").write_text("old")
        code = subprocess.run([sys.executable, "-c", REPLACING, folder, str(deaths)], check=False).returncode
        assert len({path.read_text() for path in folder.glob("result_?.txt")}) < 2
        if code == 0:
            break
    assert code == 0
    assert deaths >= 7  # two logs are made, three go, two get their names
    assert sorted(path.name for path in folder.iterdir()) == ["result_0.txt", "result_1.txt"]


def test_the_target_that_is_told_is_that_of_the_runs(store, tmp_path, capsys):
    told = tuple(Event(one.key, one.time_ns, 0.5) if one.key == "quality_target" else one for one in events())
    store(record(told=told))
    assert logged(tmp_path / "logs") == 0
    assert "mean absolute error, target 0.5\n" in capsys.readouterr().out


def test_the_target_of_a_run_that_told_nothing_is_that_of_its_record():
    found = trained(record(parameters={"target": 0.5}, verdict="target_missed", measurement=None))
    assert not isinstance(found, str)
    texts = [one.text for one in departures(found)]
    assert "the target was 0.5 of mean absolute error, not 0.124" in texts
    assert "it ended before mean absolute error <= 0.5" in texts
