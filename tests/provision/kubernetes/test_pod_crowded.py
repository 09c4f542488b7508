"""Pods that a kubelet has no room for, though the scheduler thought so: provisioned again after a while, a few times."""

from __future__ import annotations

import pytest
from pod_worlds import ID, World

from pytest_mlhpc.provision.kubernetes.attending import CROWDED_S


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    found = World(tmp_path, monkeypatch)
    found.submit()
    found.sync()
    return found


def jobs(world: World) -> list[str]:
    return [name for kind, name in world.api.objects if kind == "Job"]


def test_it_is_made_again_after_a_while_and_runs(world):
    world.pod(crowded=True)
    assert world.follow(CROWDED_S - 1) == []
    assert jobs(world) == [f"mlhpc-{ID}"]
    assert world.follow(4) == []
    assert jobs(world) == [f"mlhpc-{ID}-r1"]
    world.pod("pod-2", name=f"mlhpc-{ID}-r1-x", running=True)
    world.say("started", "end", uid="pod-2")
    (end,) = world.follow()
    assert end.error is None
    assert world.states().count("running") == 1, "it waited until then"
    assert world.provisioner._allocations == {}


def test_it_is_not_made_again_for_ever(world):
    for at, seconds in enumerate((CROWDED_S, 3 * CROWDED_S), 1):
        world.pod(f"pod-{at}", name=f"mlhpc-{ID}{f'-r{at - 1}' if at > 1 else ''}-x", crowded=True)
        assert world.follow(seconds + 3) == []
        assert jobs(world) == [f"mlhpc-{ID}-r{at}"]
    world.pod("pod-3", name=f"mlhpc-{ID}-r2-x", crowded=True)
    (end,) = world.follow()
    assert str(end.error) == (
        "rejected: OutOfcpu: Node didn't have enough resource: cpu; provisioned 3 times, no more "
        "(kubernetes: reprovision) (node n1)"
    )
    assert world.api.objects == {}


def test_without_reprovisioning_it_ends_at_once(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, reprovision=0)
    world.submit()
    world.sync()
    world.pod(crowded=True)
    (end,) = world.follow()
    assert str(end.error) == "rejected: OutOfcpu: Node didn't have enough resource: cpu (node n1)"


def test_who_adopts_it_makes_it_again_as_well(world):
    plan = world.plan()
    world.pod(crowded=True)
    world.follow(1)
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}")
    world.sync()
    world.job()
    world.pod(crowded=True)
    assert world.follow(CROWDED_S + 4) == []
    assert jobs(world) == [f"mlhpc-{ID}-r1"]
