"""`mlhpc alert drill` with real sessions on this machine: who notices which fault, and that the site's own files stay as they are."""

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys

import pytest
from drilled_suites import digest
from full_disk import small_disk
from http_sink import HttpSink
from mail_sink import MailSink
from nights_of import DAY, HOUR, store
from running_suites import LIMIT_S, wait_for

from pytest_mlhpc.store.store import read_records

SUITE = """
import os, pathlib, sys, time
from pytest_mlhpc import Metric, program, train

RATE = Metric("rate", r"rate: (\\S+)", "items/s")

@program([sys.executable, "-c", "print('rate: 100')"], RATE, owner="@hpc/storage")
def test_copy(run):
    assert run["rate"].value == 100
"""
TRAINING = """
from pytest_mlhpc import train

@train("nbody", owner="@hpc/training")
def test_nbody(run):
    pass

@train("cosmoflow", owner="@hpc/training", steps=4)
def test_cosmoflow(run):
    pass
"""
#: The program waits until the drill's session is killed.
GATED = """
import sys
from pytest_mlhpc import Metric, program

WAIT = "import time; open({begun!r}, 'w').close(); time.sleep(600)"

@program([sys.executable, "-c", WAIT], Metric("rate", r"rate: (\\S+)", "items/s"), judge=False)
def test_wait(run):
    pass
"""


@pytest.fixture
def project(tmp_path, state_dir, monkeypatch):
    """A project of one benchmark, which is the folder of the call."""
    folder = tmp_path / "project"
    (folder / "suites").mkdir(parents=True)
    (folder / "suites/test_io.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in ("CI_DEFAULT_BRANCH", "CI_COMMIT_BRANCH", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def history(project, state_dir):
    """Thirty nights of the benchmark, of which one was really run."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "suites",
        "--system",
        "local:cpu",
    ]
    subprocess.run(words, check=True, capture_output=True, timeout=LIMIT_S)
    (one,) = read_records(state_dir)
    choose = random.Random(7)  # noqa: S311 - the same each time
    (rate,) = [metric for metric in one.measurement.metrics if metric.name == "rate"]
    others = tuple(metric for metric in one.measurement.metrics if metric.name != "rate")
    for night in range(1, 31):
        figure = dataclasses.replace(rate, value=100 * choose.gauss(1, 0.002), samples=())
        measured = dataclasses.replace(one.measurement, metrics=(*others, figure))
        number = f"01890000-0000-7000-8000-{night:012d}"
        at_ns = one.created_ns - night * DAY + HOUR
        store(state_dir, [dataclasses.replace(one, id=number, session=number, created_ns=at_ns, purpose="nightly",
                                              branch="main", verdict="passed", measurement=measured)], number)  # fmt: skip
    return state_dir


@pytest.fixture
def drilled(mlhpc):
    """Return what drills on this machine: its report as data."""

    def drill(*words, code=0):
        printed = mlhpc("alert", "drill", "--system", "local:cpu", "--json", *words, code=code)
        return json.loads(printed.out), printed.err

    return drill


def test_who_is_told_is_shown_and_neither_state_nor_project_nor_channels_are_touched(
    project, history, drilled
):
    with HttpSink() as hook, MailSink() as mail:
        (project / "alerts.yaml").write_text(
            f"channels:\n  team: {{type: webhook, url: '{hook.url}/hook', token: '${{NO_SUCH_TOKEN}}', kinds: [failure]}}\n"
            f"  operators: {{type: smtp, host: 127.0.0.1, port: {mail.port}, security: none, sender: a@example.org,\n"
            "    to: [b@example.org], owners: ['@hpc/storage']}\n"
        )
        before = digest(history, project)
        found, _ = drilled("--fault", "lying-exit", "--fault", "missing-night", "--nights", "2")
        assert digest(history, project) == before
        assert (hook.requests, mail.mails, mail.sessions) == ([], [], 0)
    lying, missing = found["faults"]
    assert [(one["fault"], one["noticed"], len(one["planted"])) for one in found["faults"]] == [
        ("lying-exit", 1, 1), ("missing-night", 1, 1),
    ]  # fmt: skip
    assert lying["tests"] == {"suites/test_io.py::test_copy[local:cpu]": 1}
    assert {tuple(one["channels"]) for one in lying["alerts"]} == {("team", "operators")}
    assert [one["owners"] for one in missing["alerts"]] == [["@hpc/storage"]]
    assert [one["channels"] for one in missing["alerts"]] == [["operators"]]


def test_faults_that_no_test_can_have_are_said_to_be_planted_nowhere(project, history, mlhpc):
    (project / "alerts.yaml").write_text("channels: {}\n")
    faults = [word for name in ("slow-steps", "slow-rank=50%") for word in ("--fault", name)]
    printed = mlhpc("alert", "drill", "--system", "local:cpu", *faults, "--nights", "1")
    assert "slow-steps=10%: no test of these suites trains in a loop whose steps can be slowed" in printed.out
    assert "slow-rank=50%: no training of these suites has two ranks" in printed.out


def test_delays_are_planted_into_trainings_alone_and_too_few_nights_are_counted(project, state_dir, mlhpc):
    (project / "suites/test_training.py").write_text(TRAINING)
    printed = mlhpc(
        "alert", "drill", "--system", "local:cpu", "--fault", "slow-reading=50%", "--nights", "1", code=1
    )
    assert "there is no alerts.yaml in this folder" in printed.err
    (row,) = [line for line in printed.out.splitlines() if line.startswith("slow-reading=50%  ")]
    assert row.split()[1:4] == ["1", "test", "none"]
    assert (
        "test_cosmoflow[local:cpu] passed: of 17 nights that the judge needs, 17 nights are missing"
        in printed.out
    )
    assert not state_dir.exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--fault", "slow-step"], "'slow-step' is no fault (did you mean 'slow-steps'?)"),
        (["--fault", "slow-steps=0%"], "a size is a share of a step's time above 0, such as slow-steps=10%"),
        (["--fault", "slow-steps=much"], "a size is a share of a step's time above 0"),
        (["--fault", "lying-exit=10%"], "lying-exit has no size"),
        (["suites/no_such"], "suites/no_such: there is no such file or folder"),
        (["/"], "name suites relative to this folder"),
        (["--system", "no-such"], "no-such"),
        (["--config", "no-such.yaml"], "no-such.yaml"),
    ],
)  # fmt: skip
def test_what_cannot_be_drilled_is_refused_before_anything_runs(project, state_dir, mlhpc, words, why):
    system = [] if "--system" in words else ["--system", "local:cpu"]
    assert why in mlhpc("alert", "drill", *system, *words, code=2).err
    assert not state_dir.exists()


def test_a_suite_that_cannot_be_collected_is_refused_with_pytests_words(project, state_dir, mlhpc):
    (project / "suites/test_io.py").write_text("import no_such_module_of_ours\n")
    error = mlhpc("alert", "drill", "--system", "local:cpu", code=2).err
    assert "the suites cannot be drilled: pytest ended with 2" in error
    assert "No module named 'no_such_module_of_ours'" in error
    assert not state_dir.exists()


def test_a_session_in_which_nothing_was_measured_is_said_and_is_tried_later(project, state_dir, drilled):
    (project / "systems.yaml").write_text(
        "schema: 1\nsystems: {local: {partitions: {cpu: {scheduler: local, launcher: plain, accelerator: cpu,"
        " environments: {default: {python: /no/such/python}}}}}}\n"
    )
    (project / "suites/test_io.py").write_text(TRAINING)
    found, _ = drilled("--fault", "lying-exit", code=75)
    assert found["faults"] == []


@pytest.mark.parametrize("mounted", [True, False])
def test_a_full_disk_is_named_and_nothing_is_left(project, history, tmp_path, mlhpc, mounted):
    folder = tmp_path / "small"
    with small_disk(folder, mounted=mounted) as disk:
        state = folder / "state"
        shutil.copytree(history / "records", state / "records")
        before = digest(state)
        with disk.full(0):
            printed = mlhpc("alert", "drill", "--system", "local:cpu", "--state-dir", state, code=4)
        assert "the copy for the drill cannot be made" in printed.err
        assert digest(state) == before


@pytest.fixture
def begun(project, state_dir, tmp_path):
    """Start a drill whose program waits, as a process; return that once the program runs."""
    mark = tmp_path / "begun"
    (project / "suites/test_io.py").write_text(GATED.format(begun=str(mark)))
    words = [sys.executable, "-m", "pytest_mlhpc.cli", "alert", "drill", "--system", "local:cpu"]
    with (tmp_path / "drill.out").open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file)
    wait_for(mark.exists)
    yield process
    process.kill()
    process.wait(LIMIT_S)


def test_a_drill_that_is_interrupted_ends_its_session_and_leaves_nothing(begun, state_dir):
    begun.send_signal(signal.SIGINT)
    assert begun.wait(LIMIT_S) == 130
    assert not state_dir.exists()


@pytest.mark.parametrize("next_one", ["reap", "drill"])
def test_what_a_killed_drill_left_is_removed_by_reap_and_by_the_next_drill(
    begun, project, state_dir, mlhpc, next_one
):
    (folder,) = (state_dir / "drills").iterdir()
    assert "drills" not in mlhpc("reap", "--dry-run").err
    begun.kill()
    begun.wait(LIMIT_S)
    wait_for(lambda: "would be removed" in mlhpc("reap", "--dry-run").err)  # its session has ended
    (project / "suites/test_io.py").write_text(SUITE)
    words = {
        "reap": ["reap"],
        "drill": ["alert", "drill", "--system", "local:cpu", "--fault", "lying-exit", "--nights", "1"],
    }
    assert f"{folder}: left by a drill that was killed; removed" in mlhpc(*words[next_one]).err
    assert not folder.exists()
