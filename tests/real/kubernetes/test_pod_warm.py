"""Ranks of short runs that share a pod on the real cluster: a process that has imported torch forks them, unless the partition says no."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from running_suites import GATED, wait_for

from pytest_mlhpc.node.batch import warm

pytestmark = [pytest.mark.servers, pytest.mark.slow]

TRAININGS = """
@pytest.mark.parametrize("turn", range({number}))
@train("cosmoflow", time_limit=600)
def test_training(run, turn):
    pass
"""


def warm_processes(pod: str) -> list[int]:
    """Return the processes that fork ranks in *pod*, by their numbers on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            forks = entry.name.isdigit() and warm.__name__.encode() in (entry / "cmdline").read_bytes()
            if forks and f"MLHPC_POD_NAME={pod}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def interpreters(result) -> list[str]:
    trained = [record for record in result.records if "::test_between[" not in record["node_id"]]
    return [record["measurement"]["environment"]["interpreter"] for record in trained]


def test_ranks_that_share_a_pod_are_forked_also_after_the_warm_process_was_killed(pod_suite):
    first = TRAININGS.format(number=1).replace("test_training", "test_first")
    gated = GATED.format(
        folder=pod_suite.folder, name="between"
    )  # no rank runs then, which looks like what forks it
    pod_suite.tests(first + gated + TRAININGS.format(number=2))
    session = pod_suite.begin("between", options=["--mlhpc-pack"])
    pod = pod_suite.pod("Running")["metadata"]["name"]
    (warm_process,) = warm_processes(pod)
    os.kill(warm_process, signal.SIGKILL)
    pod_suite.go()
    result = session.end()
    result.expect(0, passed=4)
    assert len({record["job_id"] for record in result.records}) == 1
    assert interpreters(result) == ["warm"] * 3
    wait_for(lambda: not warm_processes(pod))


def test_a_partition_may_keep_its_ranks_from_being_forked(pod_suite):
    pod_suite.tests(TRAININGS.format(number=2))
    pod_suite.partition({"warm": False})
    result = pod_suite.run("--mlhpc-pack")
    result.expect(0, passed=2)
    assert interpreters(result) == ["fresh", "fresh"]
