"""`mlhpc papers mlperf log` writes what records say, and nothing that they do not."""

import itertools
import json
import os
import sys

import pytest
from cli_calls import refusals
from trained_runs import BEGUN, FACTS, SECOND, events, record, with_value

from pytest_mlhpc.node.protocol.schema import RunEvent
from pytest_mlhpc.papers.mlperf.logs import write_logs
from pytest_mlhpc.papers.mlperf.results import departures
from pytest_mlhpc.papers.mlperf.trained import trained

RUN = events()
FIRST_ID = "01890000-0000-7000-8000-000000000001"
#: A run without events.
SILENT = {"verdict": "target_missed", "measurement": None}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def logged(mlhpc, folder):
    """Return what writes logs by the command."""
    words = ["--since", "2020-01-01", "--org", "EPCC", "--division", "open", "--output", folder]
    return lambda *more, code=0: mlhpc("papers", "mlperf", "log", *words, *more, code=code)


def lines(folder, number=0):
    text = (folder / f"result_{number}.txt").read_text()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]


def value(folder, key, number=0):
    (found,) = [line["value"] for line in lines(folder, number) if line["key"] == key]
    return found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_each_run_becomes_one_log_oldest_first(store, folder, logged):
    store(record(2), record(1), record(3))
    out = logged().out
    assert names(folder) == ["result_0.txt", "result_1.txt", "result_2.txt"]
    assert [value(folder, "mlhpc_record", number)[-1] for number in range(3)] == ["1", "2", "3"]
    assert out.count("reached its target") == 3
    assert "olympic mean of 3 runs: 41 s" in out


def test_every_line_is_one_of_mlperf_logging_in_the_order_of_time(store, folder, logged):
    store(record())
    logged()
    text = (folder / "result_0.txt").read_text()
    assert all(line.startswith(":::MLLOG {") for line in text.splitlines())
    written = lines(folder)
    times = [line["time_ms"] for line in written]
    assert (times, times[0]) == (sorted(times), BEGUN * 1000 // SECOND)
    assert {line["event_type"] for line in written} == {"POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"}
    assert {line["metadata"]["file"] for line in written} == {"pytest_mlhpc/papers/mlperf/logs.py"}


def test_a_log_holds_what_the_record_knows_and_who_submits(store, folder, logged):
    store(record(devices=8, nodes=2))
    logged("--platform", "Cirrus", "--status", "onprem")
    expected = {
        "submission_org": "EPCC", "submission_platform": "Cirrus", "submission_status": "onprem",
        "submission_division": "open", "submission_benchmark": "cosmoflow", "number_of_nodes": 2,
        "accelerators_per_node": 4, "number_of_ranks": 8, "global_batch_size": 32, "seed": 1, "opt_name": "SGD",
        "cache_clear": True, "train_samples": 524_288, "opt_weight_decay": 0.0,
    }  # fmt: skip
    assert {key: value(folder, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"devices": 8, "nodes": 2, "device_type": "cpu"}, {"accelerators_per_node": 0}),
        ({"cache": "unknown"}, {"cache_clear": False}),
    ],
    ids=["a CPU is no accelerator", "a cache that was not cleared"],
)
def test_a_log_says_of_a_run_only_what_is_so(store, folder, logged, changes, expected):
    store(record(**changes))
    logged()
    assert {key: value(folder, key) for key in expected} == expected


def test_what_a_run_did_not_tell_is_left_out(store, folder, logged):
    facts = {key: one for key, one in FACTS["cosmoflow"].items() if key != "opt_base_learning_rate"}
    store(record(told=events(facts=facts)))
    logged()
    assert "opt_base_learning_rate" not in (folder / "result_0.txt").read_text()


def test_departures_are_lines_of_the_log_and_of_what_is_printed(store, folder, logged):
    store(record(data_kind="synthetic", told=events(counts=(64, 16))))
    out = logged().out
    expected = ["synthetic data", "64 training samples, not 524,288", "16 evaluation samples, not 65,536"]
    found = [line for line in lines(folder) if line["key"] == "mlhpc_departure"]
    assert [(line["value"], line["metadata"]["rule"]) for line in found] == [
        (text, "data_set") for text in expected
    ]
    assert f"data_set: {'; '.join(expected)}" in out
    assert "by the rules these runs belong in no division of MLPerf; their logs say open" in out


def test_ten_faultless_runs_belong_in_the_closed_division(store, logged):
    store(*(record(number, parameters={"seed": number}) for number in range(1, 11)))
    out = logged().out
    assert "departures" not in out
    assert "by the rules these runs belong in the closed division; their logs say open" in out


def test_the_newest_runs_can_be_chosen_and_no_others(store, folder, logged):
    store(record(1), record(2), record(3))
    logged("--last", "2")
    assert [value(folder, "mlhpc_record", number)[-1] for number in (0, 1)] == ["2", "3"]


def test_results_are_replaced_only_if_asked_to(store, folder, logged):
    store(record(1), record(2))
    logged()
    assert "holds result_0.txt already; --replace" in logged(code=2).err
    logged("--replace", "--last", "1")
    assert names(folder) == ["result_0.txt"]


def test_runs_of_several_benchmarks_are_listed_and_none_is_written(store, folder, logged):
    store(record(1), record(2, "deepcam"))
    err = logged(code=2).err
    texts = (
        "choose by --system and --benchmark",
        *(f"cirrus:standard  test_quality: {name} " for name in FACTS),
    )
    assert [text for text in texts if text not in err] == []
    assert not folder.exists()
    logged("--benchmark", "deepcam")


def test_a_run_without_events_has_no_log_but_counts(store, logged):
    store(record(1), record(2, **SILENT))
    printed = logged()
    assert (
        f"no log: record {FIRST_ID[:-1]}2 (target_missed) ended before it recorded any event" in printed.err
    )
    assert "no result: 2 of the 3 runs that an olympic mean takes" in printed.out


@pytest.mark.parametrize(
    ("verdict", "why"),
    [("node_failure", "not the run's fault: node_failure"), ("worker_exit", "broken: worker_exit")],
)
def test_a_run_that_was_ended_is_left_out_by_name(store, logged, verdict, why):
    store(record(1, verdict=verdict, measurement=None), record(2))
    assert f"left out: {FIRST_ID}: {why}\n" in logged().err


def telling(*told):
    return [record(told=told)]


def stating(**facts):
    return [record(told=events(facts={**FACTS["cosmoflow"], **facts}))]


@pytest.mark.parametrize(
    ("records", "words", "code", "why"),
    [
        pytest.param([], ["--benchmark", "x"], 0, "no run to a quality target is recorded in", id="no runs"),
        pytest.param([], ["--benchmark", "x"], 0, "with --benchmark x", id="no runs of a benchmark"),
        pytest.param([], [], 0, 'until="quality"', id="how to make a run"),
        pytest.param([record(1, **SILENT)], [], 0, "none of these 1 runs recorded its events",
                     id="no run with events"),
        pytest.param([record(benchmark="test_a", definition="resnet50 devices=2 nodes=1", **SILENT)],
                     [], 0, "ended before it recorded any event", id="no benchmark of MLPerf"),
        pytest.param(telling(*RUN[:-1], RunEvent("epoch_stop", BEGUN + 900 * SECOND), RUN[-1]),
                     [], 0, "epoch_stop without epoch_start", id="a phase that stops twice"),
        pytest.param(telling(*RUN, RunEvent("run_start", BEGUN + 901 * SECOND)),
                     [], 0, "there are 2 run_start, not one", id="two runs in one"),
        pytest.param(telling(RUN[0], *RUN), [], 0, "init_start twice without init_stop", id="init_start twice"),
        pytest.param(stating(number_of_nodes=64),
                     [], 2, "contradicts itself: its event number_of_nodes says 64, the record 1", id="an event against its record"),
        pytest.param(stating(**{"a\nb": 1}), [], 2, f"record {FIRST_ID}", id="a key of two lines"),
        pytest.param(stating(**{"": 1}), [], 2, f"record {FIRST_ID}", id="an empty key"),
        pytest.param(stating(submission_org=1), [], 2, f"record {FIRST_ID}", id="a key of ours"),
        pytest.param(stating(é=1), [], 2, f"record {FIRST_ID}", id="a key beyond ASCII"),
    ],
)  # fmt: skip
def test_what_makes_no_log_is_refused_with_the_reason(store, folder, logged, records, words, code, why):  # noqa: PLR0917 - a row
    store(*records)
    assert why in logged(*words, code=code).err
    assert not folder.exists()


@refusals(__file__)
def test_a_usage_error_says_what_is_wrong(store, tmp_path, monkeypatch, refused, command, why):  # noqa: PLR0917
    monkeypatch.chdir(tmp_path)
    store(record())
    assert why in refused(command)
    assert not (tmp_path / "logs").exists()


def test_without_the_library_it_says_what_to_install(store, logged, monkeypatch):
    store(record())
    monkeypatch.setitem(sys.modules, "mlperf_logging", None)
    why = "mlperf-logging, which is not installed: pip install 'pytest-mlhpc[mlperf]'"
    assert why in logged(code=2).err


def test_a_folder_that_cannot_be_written_is_named(store, folder, logged):
    store(record())
    folder.write_text("")
    assert f"{folder / 'result_0.txt'}: cannot be written" in logged(code=4).err


def test_replacing_logs_leaves_other_files_alone(store, folder, logged, mlhpc):
    store(record(1), record(2))
    folder.mkdir()
    for name in ("result_notes.txt", "result_7.txt", "result_0.txt.new"):
        (folder / name).write_text("mine")
    logged("--replace")
    assert names(folder) == ["result_0.txt", "result_1.txt", "result_notes.txt"]
    mlhpc("papers", "mlperf", "check", folder)


def replace_and_die(folder, changes):
    """Replace logs; end without a word at the change of the disk after so many *changes*."""
    left = changes

    def count(event, arguments):
        nonlocal left
        if event in ("os.rename", "os.remove") and "result_" in str(arguments[0]):
            left -= 1
            if left < 0:
                os._exit(9)

    try:
        sys.addaudithook(count)
        write_logs(folder, ["new"] * 2, replace=True)
    finally:
        os._exit(0)


def test_whenever_replacing_dies_no_set_is_of_old_and_new_logs(tmp_path):
    for deaths in itertools.count():
        folder = tmp_path / str(deaths)
        folder.mkdir()
        for number in range(3):
            (folder / f"result_{number}.txt").write_text("old")
        pid = os.fork()
        if pid == 0:
            replace_and_die(folder, deaths)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert len({path.read_text() for path in folder.glob("result_?.txt")}) < 2
        if code == 0:
            break
    assert deaths >= 7  # two logs are made, three go, two get their names
    assert names(folder) == ["result_0.txt", "result_1.txt"]


def test_the_target_that_is_printed_is_that_of_the_runs(store, logged):
    store(record(told=with_value("quality_target", 0.5)))
    assert "mean absolute error, target 0.5\n" in logged().out


def test_the_target_of_a_run_without_events_is_that_of_its_record():
    found = departures(trained(record(parameters={"target": 0.5}, **SILENT)))
    wrong = "the target was 0.5 of mean absolute error, not 0.124"
    assert {wrong, "it ended before mean absolute error <= 0.5"} <= {one.text for one in found}
