"""A drill on a real cluster: faults are planted in jobs, nothing is sent, and neither jobs nor files are left."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from running_suites import LIMIT_S, wait_for

TESTS = """
@train("cosmoflow", nodes=2, steps=3, owner="@hpc/training")
def test_training(run):
    pass

@program(["/bin/sh", "-c", "touch {begun}; sleep {seconds}; echo rate: 4"], RATE, owner="@hpc/storage")
def test_copy(run):
    pass
"""


def digest(folder):
    """Return a digest of each file below *folder*, but of the folder that pytest makes for its own modules."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def site(suite):
    """Return what writes a suite whose program takes so long, with a channel that nobody listens at."""

    def write(seconds=0):
        suite.tests(TESTS.format(begun=suite.folder.parent / "begun", seconds=seconds))
        hook = "{type: webhook, url: 'http://127.0.0.1:9/${NO_SUCH_TOKEN}'}"
        (suite.folder / "alerts.yaml").write_text(f"channels:\n  team: {hook}\n")
        return suite

    return write


def drill(suite, *words):
    """Start a drill in the folder of *suite*."""
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.cli",
        "alert",
        "drill",
        "test_faults.py",
        "--system",
        suite.system,
    ]
    argv += ["--state-dir", str(suite.state), "--nights", "1", "--json", *words]
    return subprocess.Popen(argv, cwd=suite.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_faults_are_planted_in_jobs_and_the_site_is_as_it_was(site):
    suite = site()
    assert suite.run(environment={"MLHPC_PURPOSE": "nightly"}).code == 0
    before = digest(suite.state), digest(suite.folder)
    own_jobs = {job.id for job in suite.jobs()}
    faults = [word for name in ("slow-rank=50%", "lying-exit", "missing-night") for word in ("--fault", name)]
    process = drill(suite, *faults)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 1, out + err
    slow, lying, _ = json.loads(out)["faults"]
    training, copy = suite.ids("training", "copy")
    assert slow["planted"] == [training]
    assert (slow["noticed"], slow["not_noticed"]) == (
        None, [f"{training} passed: of 17 nights that the judge needs, 17 nights are missing"],
    )  # fmt: skip
    assert lying["tests"] == {copy: 1, training: 1}
    assert {tuple(one["channels"]) for one in lying["alerts"]} == {("team",)}
    assert (digest(suite.state), digest(suite.folder)) == before
    assert {job.state for job in suite.jobs() if job.id not in own_jobs} <= {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    }


def test_a_job_that_is_cancelled_from_outside_is_said_and_its_test_is_no_failure(site):
    suite = site(seconds=300)
    process = drill(suite, "--fault", "lying-exit")
    wait_for((suite.folder.parent / "begun").exists)
    running = [job for job in suite.jobs() if job.state == "RUNNING"]
    (job,) = [one for one in running if "sleep 300" in (Path(one.folder) / "plan.json").read_text()]
    suite.slurm.run("scancel", job.id)
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 75, out + err
    found = json.loads(out)
    (lost,) = [one for one in found["lost"] if one["test"] == suite.ids("copy")[0]]
    assert (lost["fault"], lost["why"].partition(":")[0]) == ("nothing", "cancelled_outside")
    assert not (suite.state / "drills").exists()


def test_jobs_of_a_killed_drill_are_ended_by_the_next_one(site):
    suite = site(seconds=600)
    process = drill(suite, "--fault", "lying-exit")
    wait_for((suite.folder.parent / "begun").exists)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_for(lambda: "removed" in suite.reap(code=None))
    wait_for(lambda: not [job for job in suite.jobs() if job.state in {"PENDING", "RUNNING"}])
    assert not (suite.state / "drills").exists() or not list((suite.state / "drills").iterdir())
