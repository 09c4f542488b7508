"""Levels that nights have settled: which are proposed for git, and how they are accepted."""

import contextlib
import subprocess
import time

import pytest
import yaml
from nights_of import DAY, nights, quiet, store

from pytest_mlhpc.history.events import new_event
from pytest_mlhpc.history.judge_inputs import settled_entries
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.store.record import Epoch

TEN = quiet(10)


@pytest.fixture
def found(state_dir, tmp_path):
    """Return the settled levels of all series: metric of a benchmark -> value."""

    def look(events=()):
        with contextlib.closing(LocalSource(state_dir)) as source:
            book = BaselineBook(tmp_path / "baselines", state_dir)
            entries = settled_entries(source, book, events, default_branch="main", now_ns=time.time_ns())
            return {key.benchmark: (round(entry.value), entry.runs) for key, entry in entries}

    return look


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        (TEN, {}, (100, 8)),
        (TEN[:7], {}, None),
        (TEN, {"purpose": "manual"}, None),
        (TEN, {"branch": "try"}, None),
        (TEN, {"fingerprint": "machine"}, None),
        (TEN, {"judged": ()}, None),
        (TEN, {"verdict": "no_baseline"}, (100, 8)),
    ],
    ids=[
        "ten nights",
        "seven nights",
        "sessions of developers are no nights",
        "nor are those of other branches",
        "this machine has provisional baselines",
        "what no test judges",
        "nights that failed for lack of a baseline count",
    ],
)
def test_what_has_eight_nights_and_no_baseline_is_settled(found, state_dir, values, fields, expected):
    store(state_dir, nights(values, **fields))
    assert found().get("suites/test_a.py::test_a") == expected


def test_only_nights_of_the_present_epoch_count(found, state_dir):
    store(state_dir, nights(TEN, last_ns=time.time_ns() - 20 * DAY))
    store(
        state_dir, nights(TEN[:3], definition="resnet50 steps=20", benchmark="suites/test_a.py::test_a"), "s2"
    )
    assert found() == {}


def test_an_event_of_the_partition_begins_anew(found, state_dir):
    store(state_dir, nights(TEN))
    now_ns = time.time_ns()
    event = new_event("cirrus", "standard", "new switch", at_ns=now_ns - 5 * DAY, by="ops", now_ns=now_ns)
    assert found([event]) == {}


@pytest.fixture
def project(tmp_path, state_dir, monkeypatch):
    """A checkout with ten nights of one series and without baselines; its origin is beside it."""
    root, origin = tmp_path / "project", tmp_path / "origin.git"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(root)]
    for command in (
        ["git", "init", "-q", "--bare", str(origin)],
        ["git", "-C", str(origin), "config", "receive.advertisePushOptions", "true"],
        ["git", "init", "-q", "-b", "main", str(root)],
        [*git, "remote", "add", "origin", str(origin)],
        [*git, "commit", "-q", "--allow-empty", "-m", "begin"],
    ):
        subprocess.run(command, check=True)
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(name, "a")
    for name in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@b")
    monkeypatch.chdir(root)
    store(state_dir, nights(TEN))
    return root


def accepted(project):
    return (project / "baselines/cirrus.yaml").read_text()


def test_propose_writes_them_with_the_reason_and_pushes_them(mlhpc, project, state_dir):
    said = mlhpc(
        "baseline", "propose", "--branch", "new", "--reason", "first nights", "--state-dir", state_dir
    )
    assert "settled: suites/test_a.py::test_a rate: 99.85 samples/s (median of 8 nights)" in said.out
    assert "pushed " in said.out
    assert 'reason: "first nights (settled by 8 nights)"' in accepted(project)
    assert yaml.safe_load(accepted(project))["system"] == "cirrus"
    again = mlhpc(
        "baseline", "propose", "--branch", "new", "--reason", "first nights", "--state-dir", state_dir
    )
    assert "settled" not in again.out


def test_a_session_is_accepted_with_the_level_of_its_nights_not_with_its_own_run(mlhpc, project, state_dir):
    session = "01890000-0000-7000-8000-000000000009"
    said = mlhpc("baseline", "accept", session, "--reason", "fine", "--state-dir", state_dir)
    assert "(median of 8 runs)" in said.out
    with contextlib.closing(LocalSource(state_dir)) as source:
        (epoch,) = {point.night.epoch for one in source.series() for point in one.points}
    (entry,) = BaselineBook(project / "baselines", state_dir).entries("cirrus").values()
    assert (entry.epoch, entry.runs, entry.reason) == (Epoch(*epoch), 8, "fine (settled by 8 nights)")


def test_a_test_is_accepted_by_the_name_of_its_function(mlhpc, project, state_dir):
    said = mlhpc("baseline", "accept", "test_a", "--reason", "fine", "--state-dir", state_dir)
    assert "accepted: suites/test_a.py::test_a rate: " in said.out
    typo = mlhpc("baseline", "accept", "test_aa", "--reason", "fine", "--state-dir", state_dir, code=2).err
    assert "no such test or record (did you mean 'test_a'?)" in typo


def test_a_function_of_that_name_in_two_files_is_not_guessed(mlhpc, project, state_dir):
    store(state_dir, nights(TEN[:1], benchmark="suites/test_b.py::test_a"), "s2")
    said = mlhpc("baseline", "accept", "test_a", "--reason", "fine", "--state-dir", state_dir, code=2).err
    assert "'test_a' is a test in several files: suites/test_a.py::test_a, suites/test_b.py::test_a" in said
