"""The real compliance checker accepts logs of our runs, and rejects those in which a violation was planted."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml
from trained_runs import events, record

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.papers.mlperf.logs import check_file

MARK = ":::MLLOG "
ONE_REJECTED = "1 log by the rules of hpc 3.0.0: 0 accepted, 1 rejected\n"


@pytest.fixture
def log_of(store, tmp_path, mlhpc):
    """Return what stores runs and writes their logs by the command."""

    def write(*records, division="closed"):
        store(*records)
        words = ["--since", "2020-01-01", "--org", "EPCC", "--division", division]
        mlhpc("papers", "mlperf", "log", *words, "--output", tmp_path / "logs")
        return tmp_path / "logs" / "result_0.txt"

    return write


@pytest.fixture
def empty_log(tmp_path):
    path = tmp_path / "result_0.txt"
    path.write_text("")
    return path


PLANTED = yaml.safe_load(Path(__file__).with_name("planted.yaml").read_text(encoding="utf-8"))


def plant(path, key, change):
    """Change fields of the lines of a *key*, have them later by so many minutes, or leave them out (None)."""
    lines = []
    for text in path.read_text().splitlines():
        line = json.loads(text.removeprefix(MARK))
        if line["key"] == key:
            if change is None:
                continue
            line["time_ms"] += change.get("minutes", 0) * 60_000
            line |= {name: value for name, value in change.items() if name != "minutes"}
        lines.append(f"{MARK}{json.dumps(line)}\n")
    path.write_text("".join(lines))


def small(workload="cosmoflow", number=1, **changes):
    """Return a run on a small synthetic set, as it is made for tests."""
    return record(number, workload, data_kind="synthetic", told=events(workload, counts=(64, 16)), **changes)


def test_a_log_of_a_cosmoflow_run_is_accepted_as_closed(log_of, mlhpc):
    path = log_of(small(device_type="cpu"))
    printed = mlhpc("papers", "mlperf", "check", path)
    assert printed.out == f"{path}: accepted\n1 log by the rules of hpc 3.0.0: 1 accepted, 0 rejected\n"
    assert printed.err == ""


@pytest.mark.parametrize(("run", "division"), [(small("deepcam"), "open"), (record(1, "deepcam"), "closed")])
def test_a_log_of_a_deepcam_run_is_accepted_as_closed_only_on_the_whole_set(log_of, mlhpc, run, division):
    path = log_of(run, division=division)
    assert f"{path}: accepted\n" in mlhpc("papers", "mlperf", "check", path.parent).out


def test_a_log_of_a_deepcam_run_on_fewer_samples_is_rejected_as_closed(log_of, mlhpc):
    out = mlhpc("papers", "mlperf", "check", log_of(small("deepcam")), code=1).out
    assert [count for count in (121266, 15158) if f"failed test: v['value'] == {count}" not in out] == []


@pytest.mark.parametrize(("key", "change", "reason"), PLANTED.values(), ids=PLANTED)
def test_a_planted_violation_is_rejected_with_the_checkers_reason(log_of, mlhpc, key, change, reason):
    path = log_of(small())
    plant(path, key, change)
    out = mlhpc("papers", "mlperf", "check", path, code=1).out
    assert out.startswith(f"{path}: rejected\n")
    assert re.search(reason, out), out
    assert out.endswith(ONE_REJECTED)


def test_of_a_folder_every_log_is_checked_and_one_rejected_decides(log_of, mlhpc):
    path = log_of(small(), small(number=2))
    second = path.with_name("result_1.txt")
    plant(second, "run_stop", None)
    out = mlhpc("papers", "mlperf", "check", path.parent, code=1).out
    assert (f"{path}: accepted\n" in out, f"{second}: rejected\n" in out) == (True, True)
    assert out.endswith("2 logs by the rules of hpc 3.0.0: 1 accepted, 1 rejected\n")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("hello\n", id="prose"),
        pytest.param(f"{MARK}{{torn", id="torn"),
        pytest.param(f"{MARK}[]\n", id="list"),
        pytest.param("\x00" * 100, id="zeros"),
    ],
)
def test_a_file_that_is_no_log_is_rejected(empty_log, mlhpc, text):
    empty_log.write_text(text)
    assert f"{empty_log}: rejected\n  " in mlhpc("papers", "mlperf", "check", empty_log, code=1).out


def test_a_log_that_is_named_twice_counts_once(empty_log, mlhpc):
    assert ONE_REJECTED in mlhpc("papers", "mlperf", "check", empty_log.parent, empty_log, code=1).out


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("result_0.txt", "result_0.txt: cannot be read: No such file or directory"),
        (".", " holds no logs (result_0.txt ...)"),
    ],
)
def test_where_there_is_no_log_nothing_is_checked(tmp_path, mlhpc, path, reason):
    err = mlhpc("papers", "mlperf", "check", tmp_path / path, code=2).err
    assert (f"{tmp_path}" in err, reason in err) == (True, True)


def test_a_checker_that_does_not_end_is_no_verdict(empty_log):
    with pytest.raises(MlhpcError, match="came to no verdict within 0 s"):
        check_file(empty_log, limit_s=0.001)


def test_without_the_checker_it_says_what_to_install(empty_log, mlhpc, monkeypatch):
    find = importlib.util.find_spec
    hidden = lambda name, *more: None if name == "mlperf_logging" else find(name, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    err = mlhpc("papers", "mlperf", "check", empty_log, code=2).err
    assert "mlperf-logging, which is not installed: pip install 'pytest-mlhpc[mlperf]'" in err


@pytest.mark.parametrize("option", ["--usage", "--ruleset"])
def test_rules_that_the_checker_does_not_have_are_a_wrong_option(empty_log, mlhpc, option):
    err = mlhpc("papers", "mlperf", "check", empty_log, option, "9.9", code=2).err
    assert f"the compliance checker has no such {option}: invalid choice: '9.9'" in err
