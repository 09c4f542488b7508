"""A drill on a real Kubernetes: faults are planted in pods, nothing is sent, and neither objects nor files are left."""

import hashlib
import json
import subprocess
import sys

import pytest
from running_suites import LIMIT_S, wait_for

pytestmark = pytest.mark.servers

TESTS = """
@train("cosmoflow", nodes=2, steps=3, owner="@hpc/training")
def test_training(run):
    pass

@program(["/bin/sh", "-c", "touch {begun}; sleep {seconds}; echo rate: 4"], RATE, owner="@hpc/storage")
def test_copy(run):
    pass

@program("echo rate: 4", RATE, owner="@hpc/storage", kubernetes={{"agent": False}})
def test_bare(run):
    pass
"""


def digest(folder):
    """Return a digest of each file below *folder*, but of the folder that pytest makes for its own modules."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def site(pod_suite):
    """Return what writes a suite whose program takes so long, with a channel that nobody listens at."""

    def write(seconds=0):
        pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
        pod_suite.tests(TESTS.format(begun=pod_suite.folder / "begun", seconds=seconds))
        hook = "{type: webhook, url: 'http://127.0.0.1:9/${NO_SUCH_TOKEN}'}"
        (pod_suite.folder / "alerts.yaml").write_text(f"channels:\n  team: {hook}\n")
        return pod_suite

    return write


def drill(suite, *words):
    """Start a drill in the folder of *suite*."""
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", "alert", "drill", "test_faults.py"]
    argv += ["--system", suite.system, "--state-dir", str(suite.state), "--nights", "1", "--json", *words]
    return subprocess.Popen(argv, cwd=suite.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_faults_are_planted_in_pods_and_the_site_is_as_it_was(site):
    suite = site()
    suite.run(environment={"MLHPC_PURPOSE": "nightly"}).expect(0, passed=3)
    before = (
        digest(suite.state),
        {path: one for path, one in digest(suite.folder).items() if "begun" not in path},
    )
    process = drill(suite, "--fault", "slow-rank=50%", "--fault", "lying-exit")
    out, err = process.communicate(timeout=2 * LIMIT_S)
    assert process.returncode == 1, out + err
    found = json.loads(out)
    slow, lying = found["faults"]
    names = {
        name: f"test_faults.py::test_{name}[{suite.system}:part]" for name in ("training", "copy", "bare")
    }
    assert found["lost"] == []
    assert slow["planted"] == [names["training"]]
    assert (slow["noticed"], slow["not_noticed"]) == (
        None, [f"{names['training']} passed: of 17 nights that the judge needs, 17 nights are missing"],
    )  # fmt: skip
    assert lying["tests"] == {names["training"]: 1, names["copy"]: 1, names["bare"]: 1}
    assert {tuple(one["channels"]) for one in lying["alerts"]} == {("team",)}
    after = (
        digest(suite.state),
        {path: one for path, one in digest(suite.folder).items() if "begun" not in path},
    )
    assert after == before
    wait_for(
        lambda: suite.objects("pods", "jobs", "secrets", "services") == []
    )  # deleted pods end in their grace period


def test_pods_of_a_killed_drill_are_deleted_by_reap(site):
    suite = site(seconds=600)
    process = drill(suite, "--fault", "lying-exit")
    wait_for((suite.folder / "begun").exists)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_for(lambda: "removed" in suite.reap(code=None))
    wait_for(lambda: suite.objects("pods", "jobs", "secrets", "services") == [])
    assert not (suite.state / "drills").exists() or not list((suite.state / "drills").iterdir())
