"""Ranks of short runs that share a pod on the real cluster: a process that has imported torch forks them, unless the partition says no."""

import pytest
from running_suites import text_of

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SUITE = text_of(__file__, "../warm_ranks.py.txt")
LIMIT_S = 1200.0


def interpreters(records):
    found = [
        record["measurement"]["environment"] for record in records if record["benchmark"].count("training")
    ]
    return [environment["interpreter"] for environment in found]


@pytest.fixture
def several(pod_suite):
    """A suite on pods whose ranks the launcher of the partition may leave to the agent."""
    pod_suite.tests(SUITE)
    return pod_suite


def test_trainings_that_share_a_pod_are_forked_also_after_the_death_of_the_warm_process(several):
    result = several.start("--mlhpc-pack").end(LIMIT_S)
    result.expect(0, passed=5)
    assert interpreters(result.records)[:2] == ["warm", "warm"]
    assert interpreters(result.records)[-1] == "warm"
    assert several.objects("pods", "jobs") == []


def test_a_partition_may_keep_its_trainings_from_being_forked(several):
    several.partition({"warm": False})
    result = several.start("--mlhpc-pack", "-k", "before").end(LIMIT_S)
    result.expect(0, passed=2)
    assert interpreters(result.records) == ["fresh", "fresh"]
