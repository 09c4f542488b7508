"""The real compliance checker accepts logs of our runs, and rejects those in which a violation was planted."""

import importlib.util
import json
import re

import pytest
from trained_runs import events, record

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.mlperf.checking import check_file

MARK = ":::MLLOG "
ONE_REJECTED = "1 logs by the rules of hpc 3.0.0: 0 accepted, 1 rejected\n"


@pytest.fixture
def log_of(store, tmp_path, mlhpc):
    """Return what stores runs and writes their logs by the command."""

    def write(*records, division="closed"):
        store(*records)
        words = ["--since", "2020-01-01", "--org", "EPCC", "--division", division]
        mlhpc("mlperf", "log", *words, "--output", tmp_path / "logs")
        return tmp_path / "logs" / "result_0.txt"

    return write


@pytest.fixture
def empty_log(tmp_path):
    path = tmp_path / "result_0.txt"
    path.write_text("")
    return path


def plant(path, change):
    """Replace each line's object by what *change* makes of it; None leaves the line out."""
    lines = [json.loads(line.removeprefix(MARK)) for line in path.read_text().splitlines()]
    changed = [one for line in lines if (one := change(line)) is not None]
    assert changed != lines
    path.write_text("".join(f"{MARK}{json.dumps(line)}\n" for line in changed))


def without(key):
    return lambda line: None if line["key"] == key else line


def with_value(key, value):
    return lambda line: {**line, "value": value} if line["key"] == key else line


def without_metadata(key, name):
    def change(line):
        metadata = {key: one for key, one in line["metadata"].items() if key != name}
        return {**line, "metadata": metadata} if line["key"] == key else line

    return change


def later(key, minutes):
    delay_ms = minutes * 60_000
    return lambda line: {**line, "time_ms": line["time_ms"] + delay_ms} if line["key"] == key else line


def small(workload="cosmoflow", number=1, **changes):
    """Return a run on a small synthetic set, as it is made for tests."""
    return record(number, workload, data_kind="synthetic", told=events(workload, counts=(64, 16)), **changes)


def test_a_log_of_a_cosmoflow_run_is_accepted_as_closed(log_of, mlhpc):
    path = log_of(small(device_type="cpu"))
    printed = mlhpc("mlperf", "check", path)
    assert printed.out == f"{path}: accepted\n1 logs by the rules of hpc 3.0.0: 1 accepted, 0 rejected\n"
    assert printed.err == ""


@pytest.mark.parametrize(("run", "division"), [(small("deepcam"), "open"), (record(1, "deepcam"), "closed")])
def test_a_log_of_a_deepcam_run_is_accepted_as_closed_only_on_the_whole_set(log_of, mlhpc, run, division):
    path = log_of(run, division=division)
    assert f"{path}: accepted\n" in mlhpc("mlperf", "check", path.parent).out


def test_a_log_of_a_deepcam_run_on_fewer_samples_is_rejected_as_closed(log_of, mlhpc):
    out = mlhpc("mlperf", "check", log_of(small("deepcam")), code=1).out
    assert "failed test: v['value'] == 121266" in out
    assert "failed test: v['value'] == 15158" in out


#: What is planted -> the line changed, and the checker's reason.
PLANTED = {
    "the target was not reached": (with_value("eval_error", 0.3), r"Failed checks for eval_error : v\['value'\] <= 0.124"),
    "no evaluation": (without("eval_error"), r"Required AT_LEAST_ONE occurrence of 'eval_error' but found 0"),
    "a figure of no training epoch": (without_metadata("eval_error", "epoch_num"), r"CHECK for 'eval_error' failed.*failed test: 'epoch_num' in v\['metadata'\]"),
    "another optimizer": (with_value("opt_name", "Adam"), r"CHECK for 'opt_name' failed.*failed test: v\['value'\] in \['sgd', 'SGD'\]"),
    "no learning rate": (without("opt_base_learning_rate"), r"Required EXACTLY_ONE occurrence of 'opt_base_learning_rate' but found 0"),
    "no schedule": (without("opt_learning_rate_decay_factor"), r"'opt_learning_rate_decay_factor' but found 0"),
    "no end": (without("run_stop"), r"Required EXACTLY_ONE occurrence of 'run_stop' but found 0"),
    "an end without a status": (without_metadata("run_stop", "status"), r"CHECK for 'run_stop' failed.*failed test: 'status' in v\['metadata'\]"),
    "half an hour of initialisation": (later("init_stop", 31), r"CHECK for 'init_stop' failed.*failed test: ll.timestamp - s\['first_init_start'\] < \(30\*60\*1e3\)"),
    "a cache of which nothing is said": (without("cache_clear"), r"Required AT_LEAST_ONE occurrence of 'cache_clear' but found 0"),
    "a status that there is not": (with_value("submission_status", "sold"), r"CHECK for 'submission_status' failed.*failed test: v\['value'\] in \['cloud', 'onprem'"),
    "a clock that starts before initialisation ends": (without("init_stop"), r"CHECK for 'run_start' failed.*s\['init_stopped'\] == True"),
    "an empty batch": (with_value("global_batch_size", 0), r"CHECK for 'global_batch_size' failed.*failed test: v\['value'\] > 0"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_rejected_with_the_checkers_reason(log_of, mlhpc, change, reason):
    path = log_of(small())
    plant(path, change)
    out = mlhpc("mlperf", "check", path, code=1).out
    assert out.startswith(f"{path}: rejected\n")
    assert re.search(reason, out), out
    assert out.endswith(ONE_REJECTED)


def test_a_division_that_there_is_not_ends_the_checker_and_is_rejected(log_of, mlhpc):
    path = log_of(small())
    plant(path, with_value("submission_division", "ajar"))
    out = mlhpc("mlperf", "check", path, code=1).out
    assert "the checker cannot read it and ended with FileNotFoundError" in out


def test_of_a_folder_every_log_is_checked_and_one_rejected_decides(log_of, mlhpc):
    path = log_of(small(), small(number=2))
    second = path.with_name("result_1.txt")
    plant(second, without("run_stop"))
    out = mlhpc("mlperf", "check", path.parent, code=1).out
    assert f"{path}: accepted\n" in out
    assert f"{second}: rejected\n" in out
    assert out.endswith("2 logs by the rules of hpc 3.0.0: 1 accepted, 1 rejected\n")


NO_LOGS = {
    "empty": "",
    "prose": "hello\n",
    "torn": f"{MARK}{{torn",
    "list": f"{MARK}[]\n",
    "zeros": "\x00" * 100,
}


@pytest.mark.parametrize("text", NO_LOGS.values(), ids=NO_LOGS)
def test_a_file_that_is_no_log_is_rejected(empty_log, mlhpc, text):
    empty_log.write_text(text)
    assert f"{empty_log}: rejected\n  " in mlhpc("mlperf", "check", empty_log, code=1).out


def test_a_log_that_is_named_twice_counts_once(empty_log, mlhpc):
    assert ONE_REJECTED in mlhpc("mlperf", "check", empty_log.parent, empty_log, code=1).out


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("result_0.txt", "result_0.txt: cannot be read: No such file or directory"),
        (".", " holds no logs (result_0.txt ...)"),
    ],
)
def test_where_there_is_no_log_nothing_is_checked(tmp_path, mlhpc, path, reason):
    assert f"{tmp_path}" in (err := mlhpc("mlperf", "check", tmp_path / path, code=4).err)
    assert reason in err


def test_a_checker_that_does_not_end_is_no_verdict(empty_log):
    with pytest.raises(MlhpcError, match="came to no verdict within 0 s"):
        check_file(empty_log, limit_s=0.001)


def test_without_the_checker_it_says_what_to_install(empty_log, mlhpc, monkeypatch):
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "mlperf_logging" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    err = mlhpc("mlperf", "check", empty_log, code=4).err
    assert "mlperf-logging, which is not installed: pip install 'pytest-mlhpc[mlperf]'" in err


@pytest.mark.parametrize("option", ["--usage", "--ruleset"])
def test_rules_that_the_checker_does_not_have_are_a_wrong_option(empty_log, mlhpc, option):
    err = mlhpc("mlperf", "check", empty_log, option, "9.9", code=4).err
    assert f"the compliance checker has no such {option}: invalid choice: '9.9'" in err
