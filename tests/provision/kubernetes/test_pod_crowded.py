"""Pods that a kubelet has no room for, though the scheduler thought so: provisioned again after a while, a few times."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.kubernetes.attending import CROWDED_S

TEXT = "rejected: OutOfcpu: Node didn't have enough resource: cpu"


@pytest.fixture
def submitted(world):
    return world.submitted()


def test_it_is_made_again_after_a_while_and_runs(submitted):
    submitted.pod(crowded=True)
    for seconds, jobs in ((CROWDED_S - 1, [""]), (4, ["-r1"])):
        assert (submitted.follow(seconds), submitted.jobs()) == ([], jobs)
    submitted.pod("pod-2", "-r1-x", running=True)
    submitted.print("started", "end", uid="pod-2")
    assert submitted.end().error is None
    assert submitted.states().count("running") == 1, "it waited until then"
    assert submitted.provisioner._allocations == {}


def test_it_is_not_made_again_for_ever(submitted):
    for suffix, seconds, following in (("", CROWDED_S, "-r1"), ("-r1", 3 * CROWDED_S, "-r2")):
        submitted.pod(f"pod{suffix}", f"{suffix}-x", crowded=True)
        assert (submitted.follow(seconds + 3), submitted.jobs()) == ([], [following])
    submitted.pod("pod-r2", "-r2-x", crowded=True)
    error = submitted.end().error
    assert str(error) == f"{TEXT}; provisioned 3 times, no more (kubernetes: reprovision) (node n1)"
    assert submitted.api.objects == {}


def test_without_reprovisioning_it_ends_at_once(world_of):
    world = world_of(reprovision=0).submitted()
    world.pod(crowded=True)
    assert str(world.end().error) == f"{TEXT} (node n1)"


def test_who_adopts_it_makes_it_again_as_well(submitted):
    submitted.pod(crowded=True)
    submitted.follow(1)
    submitted.adopt(submitted.plan())
    submitted.sync()
    submitted.job()
    submitted.pod(crowded=True)
    assert (submitted.follow(CROWDED_S + 4), submitted.jobs()) == ([], ["-r1"])
