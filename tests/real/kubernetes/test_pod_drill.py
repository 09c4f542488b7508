"""A drill on a real Kubernetes: faults are planted in pods, nothing is sent, and neither objects nor files are left."""

import json

import pytest
from drilled_suites import digest, drill, nothing_planted, write_site
from running_suites import LIMIT_S, wait_for

pytestmark = pytest.mark.servers

BARE = """
@program("echo rate: 4", RATE, owner="@hpc/storage", kubernetes={"agent": False})
def test_bare(run):
    pass
"""


@pytest.fixture
def suite(pod_suite):
    """The suite with at most two nodes."""
    pod_suite.partition({"nodes": {"max": 2}}, kind="pods")
    return pod_suite


def test_faults_are_planted_in_pods_and_the_site_is_as_it_was(suite):
    write_site(suite, more=BARE)
    suite.run(environment={"MLHPC_PURPOSE": "nightly"}).expect(0, passed=3)
    before = digest(suite.state, suite.folder)
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
    assert digest(suite.state, suite.folder) == before
    wait_for(
        lambda: suite.objects("pods", "jobs", "secrets", "services") == []
    )  # deleted pods end in their grace period


def test_pods_of_a_killed_drill_are_deleted_by_reap(suite):
    begun = write_site(suite, seconds=600, more=BARE)
    process = drill(suite, "--fault", "lying-exit")
    wait_for(begun.exists)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    wait_for(lambda: "removed" in suite.reap(code=None))
    wait_for(lambda: suite.objects("pods", "jobs", "secrets", "services") == [])
    assert nothing_planted(suite)
