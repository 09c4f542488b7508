"""The real compliance checker accepts logs of our runs, and rejects those in which a violation was planted."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
from trained_runs import FACTS, events, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.mlperf.checking import check_file

MARK = ":::MLLOG "


@pytest.fixture
def log_of(store, tmp_path, capsys):
    """Return what stores one run and writes its log by the command."""

    def write(*records, division="closed"):
        store(*records)
        words = ["--since", "2020-01-01", "--org", "EPCC", "--division", division]
        assert main(["mlperf", "log", *words, "--output", str(tmp_path / "logs")]) == 0
        capsys.readouterr()
        return tmp_path / "logs" / "result_0.txt"

    return write


def planted(path, change):
    """Let *change* have each line's object; what it returns stands in its place, nothing where it returns None."""
    lines = [json.loads(line.removeprefix(MARK)) for line in path.read_text().splitlines()]
    changed = [one for line in lines if (one := change(line)) is not None]
    assert changed != lines or len(changed) != len(lines)
    path.write_text("".join(f"{MARK}{json.dumps(line)}\n" for line in changed))


def without(key):
    return lambda line: None if line["key"] == key else line


def with_value(key, value):
    return lambda line: {**line, "value": value} if line["key"] == key else line


def without_metadata(key, name):
    def change(line):
        if line["key"] != key:
            return line
        return {**line, "metadata": {key: one for key, one in line["metadata"].items() if key != name}}

    return change


def later(key, minutes):
    return lambda line: (
        {**line, "time_ms": line["time_ms"] + minutes * 60_000} if line["key"] == key else line
    )


def small(**changes):
    """Return a run on a small synthetic set, as it is made for tests."""
    return record(data_kind="synthetic", device_type="cpu", told=events(counts=(64, 16)), **changes)


def test_a_log_of_a_cosmoflow_run_is_accepted_as_closed(log_of, capsys):
    path = log_of(small())
    assert main(["mlperf", "check", str(path)]) == 0
    told = capsys.readouterr()
    assert told.out == f"{path}: accepted\n1 logs by the rules of hpc 3.0.0: 1 accepted, 0 rejected\n"
    assert told.err == ""


def test_a_log_of_a_deepcam_run_is_accepted_as_open(log_of, capsys):
    run = record(1, "deepcam", data_kind="synthetic", told=events("deepcam", counts=(64, 16)))
    path = log_of(run, division="open")
    assert main(["mlperf", "check", str(path.parent)]) == 0
    assert f"{path}: accepted\n" in capsys.readouterr().out


def test_a_log_of_a_deepcam_run_on_fewer_samples_is_rejected_as_closed(log_of, capsys):
    path = log_of(record(1, "deepcam", data_kind="synthetic", told=events("deepcam", counts=(64, 16))))
    assert main(["mlperf", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "failed test: v['value'] == 121266" in out
    assert "failed test: v['value'] == 15158" in out


def test_a_log_of_a_deepcam_run_on_the_whole_set_is_accepted_as_closed(log_of):
    path = log_of(record(1, "deepcam"))
    assert main(["mlperf", "check", str(path)]) == 0


#: What is planted -> the line changed, and the checker's reason.
PLANTED = {
    "the target was not reached": (with_value("eval_error", 0.3), r"Failed checks for eval_error : v\['value'\] <= 0.124"),
    "no evaluation": (without("eval_error"), r"Required AT_LEAST_ONE occurrence of 'eval_error' but found 0"),
    "a figure of no training epoch": (without_metadata("eval_error", "epoch_num"), r"CHECK for 'eval_error' failed.*failed test: 'epoch_num' in v\['metadata'\]"),
    "another optimizer": (with_value("opt_name", "Adam"), r"CHECK for 'opt_name' failed.*failed test: v\['value'\] in \['sgd', 'SGD'\]"),
    "no learning rate": (without("opt_base_learning_rate"), r"Required EXACTLY_ONE occurrence of 'opt_base_learning_rate' but found 0"),
    "no end": (without("run_stop"), r"Required EXACTLY_ONE occurrence of 'run_stop' but found 0"),
    "an end without a status": (without_metadata("run_stop", "status"), r"CHECK for 'run_stop' failed.*failed test: 'status' in v\['metadata'\]"),
    "half an hour of initialisation": (later("init_stop", 31), r"CHECK for 'init_stop' failed.*failed test: ll.timestamp - s\['first_init_start'\] < \(30\*60\*1e3\)"),
    "a cache of which nothing is said": (without("cache_clear"), r"Required AT_LEAST_ONE occurrence of 'cache_clear' but found 0"),
    "a status that there is not": (with_value("submission_status", "sold"), r"CHECK for 'submission_status' failed.*failed test: v\['value'\] in \['cloud', 'onprem'"),
    "a clock that starts before initialisation ends": (without("init_stop"), r"CHECK for 'run_start' failed.*s\['init_stopped'\] == True"),
    "an empty batch": (with_value("global_batch_size", 0), r"CHECK for 'global_batch_size' failed.*failed test: v\['value'\] > 0"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_rejected_with_the_checkers_reason(log_of, capsys, change, reason):
    path = log_of(small())
    planted(path, change)
    assert main(["mlperf", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: rejected\n")
    assert re.search(reason, out), out
    assert out.endswith("1 logs by the rules of hpc 3.0.0: 0 accepted, 1 rejected\n")


def test_a_run_that_did_not_tell_its_schedule_is_rejected(log_of, capsys):
    facts = {key: one for key, one in FACTS["cosmoflow"].items() if "decay" not in key}
    path = log_of(record(told=events(facts=facts)))
    assert main(["mlperf", "check", str(path)]) == 1
    assert "'opt_learning_rate_decay_factor' but found 0" in capsys.readouterr().out


def test_a_division_that_there_is_not_ends_the_checker_and_is_rejected(log_of, capsys):
    path = log_of(small())
    planted(path, with_value("submission_division", "ajar"))
    assert main(["mlperf", "check", str(path)]) == 1
    assert "the checker cannot read it and ended with FileNotFoundError" in capsys.readouterr().out


def test_of_a_folder_every_log_is_checked_and_one_rejected_decides(log_of, capsys):
    path = log_of(*(small(number=number) for number in (1, 2)))
    planted(path.with_name("result_1.txt"), without("run_stop"))
    assert main(["mlperf", "check", str(path.parent)]) == 1
    out = capsys.readouterr().out
    assert f"{path}: accepted\n" in out
    assert f"{path.with_name('result_1.txt')}: rejected\n" in out
    assert out.endswith("2 logs by the rules of hpc 3.0.0: 1 accepted, 1 rejected\n")


@pytest.mark.parametrize(
    "text",
    ["", "hello\n", f"{MARK}{{torn", f"{MARK}[]\n", "\x00" * 100],
    ids=["empty", "prose", "torn", "list", "zeros"],
)
def test_a_file_that_is_no_log_is_rejected(tmp_path, capsys, text):
    path = tmp_path / "result_0.txt"
    path.write_text(text)
    assert main(["mlperf", "check", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}: rejected\n  " in out


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path, capsys):
    assert main(["mlperf", "check", str(tmp_path / "result_0.txt")]) == 4
    assert "result_0.txt: cannot be read: No such file or directory" in capsys.readouterr().err


def test_a_folder_without_logs_is_a_usage_error(tmp_path, capsys):
    assert main(["mlperf", "check", str(tmp_path)]) == 4
    assert f"{tmp_path} holds no logs (result_0.txt ...)" in capsys.readouterr().err


def test_a_checker_that_does_not_end_is_no_verdict(log_of):
    path = log_of(small())
    with pytest.raises(MlhpcError, match="came to no verdict within 0 s"):
        check_file(path, limit_s=0.001)


def test_without_the_checker_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    (tmp_path / "result_0.txt").write_text("")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "mlperf_logging" else found(name, *more),
    )
    assert main(["mlperf", "check", str(tmp_path)]) == 4
    assert (
        "mlperf-logging, which is not installed: pip install 'pytest-mlhpc[mlperf]'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["--usage", "--ruleset"])
def test_rules_that_the_checker_does_not_have_are_a_wrong_option(tmp_path, capsys, option):
    (tmp_path / "result_0.txt").write_text("")
    assert main(["mlperf", "check", str(tmp_path), option, "9.9"]) == 4
    assert f"the compliance checker has no such {option}: invalid choice: '9.9'" in capsys.readouterr().err


def test_a_log_that_is_named_twice_counts_once(tmp_path, capsys):
    (tmp_path / "result_0.txt").write_text("")
    assert main(["mlperf", "check", str(tmp_path), str(tmp_path / "result_0.txt")]) == 1
    assert "1 logs by the rules of hpc 3.0.0: 0 accepted, 1 rejected" in capsys.readouterr().out
