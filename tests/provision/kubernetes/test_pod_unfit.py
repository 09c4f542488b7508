"""Nodes that probes find unfit: noted, told to the runs once they are gone round, and known to whoever adopts the allocation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pod_worlds import ID, World

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.base import LineArrived
from pytest_mlhpc.provision.kubernetes.placing import note_unfit, noted_unfit, unfit_messages
from pytest_mlhpc.vet.settings import Settings


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)


def told(world: World) -> list[dict]:
    """Return what the runs were told of vetting."""
    lines = [event.message for event in world.events if isinstance(event, LineArrived)]
    return [message.body for message in lines if message.kind == "vetted"]


def round_of(plan, number: int, **unfit: str) -> SimpleNamespace:
    """Return what note_unfit needs of an allocation: its pods' nodes and what their probes said."""
    views = [SimpleNamespace(node=node, unfit=text) for node, text in unfit.items()]
    return SimpleNamespace(plan=plan, round=number, views=views)


def test_an_unfit_node_is_told_to_the_run_before_the_next_round(world):
    world.submit()
    world.sync()
    world.pod(unfit="its GPU does not answer")
    assert world.follow(2) == []
    (body,) = told(world)
    assert body["unfit"] == body["probed"] == {"n1": "its GPU does not answer"}
    assert (body["fit"], body["warnings"]) == ([], {})


def test_the_nodes_of_the_last_round_are_told_as_well(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, reprovision=1)
    world.submit()
    world.sync()
    world.pod(unfit="dead")
    world.follow(2)
    world.pod("pod-2", name=f"mlhpc-{ID}-r1-x", unfit="dead too", node="n2")
    (end,) = world.follow()
    assert end.error.outcome == "unfit_nodes"
    assert told(world)[-1]["unfit"] == {"n1": "dead", "n2": "dead too"}


def test_a_run_that_was_made_again_often_enough_is_not_made_again_by_its_job(tmp_path, monkeypatch):
    world = World(tmp_path, monkeypatch, reprovision=0)
    world.submit()
    world.sync()
    world.pod(unfit="dead")
    (end,) = world.follow()
    assert end.error.outcome == "unfit_nodes"
    assert "n1: dead; provisioned once, no more (kubernetes: reprovision)" in str(end.error)
    assert end.error.nodes == ()


def test_who_adopts_an_allocation_is_told_of_its_unfit_nodes_and_goes_round_them(world):
    plan = world.submit()
    world.sync()
    world.pod(unfit="dead")
    world.follow(2)
    world.events.clear()
    world.session()
    world.provisioner.adopt(plan, f"ns/jobs/mlhpc-{ID}-r1")
    world.follow(1)
    assert [body["unfit"] for body in told(world)] == [{"n1": "dead"}]
    assert world.provisioner._allocations[ID].excluded == ("n1",)


def test_a_run_without_unfit_nodes_is_told_nothing(world):
    world.submit()
    world.sync()
    world.pod(running=True)
    world.follow(1)
    assert told(world) == []


def test_only_the_first_run_is_told_that_probes_found_it(world):
    plan = world.submit()
    second = replace(plan.runs[0], run_id="run-b")
    plan = replace(plan, runs=(*plan.runs, second), vetting=Settings(level="deep"))
    note_unfit(round_of(plan, 0, n1="dead", n2=""))
    first, other = unfit_messages(plan)
    assert first.run_id == "run-a"
    assert first.body["probed"] == {"n1": "dead"}
    assert "probed" not in other.body
    assert other.body["unfit"] == {"n1": "dead"}
    assert [one.body["level"] for one in (first, other)] == ["deep", "deep"]


def test_the_rounds_are_noted_one_after_the_other(world):
    plan = world.submit()
    note_unfit(round_of(plan, 0, n1="dead"))
    note_unfit(round_of(plan, 1, n2="dead too"))
    lines = (Path(plan.directory) / "unfit.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"round": 0, "node": "n1", "text": "dead"},
        {"round": 1, "node": "n2", "text": "dead too"},
    ]


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"node": "n9"}', "\ufffd" * 9, "[" * 100_000])
def test_a_damaged_note_is_left_out(world, damage):
    plan = world.submit()
    note_unfit(round_of(plan, 0, n1="dead"))
    with (Path(plan.directory) / "unfit.jsonl").open("a") as file:
        file.write(f"{damage}\n")
    note_unfit(round_of(plan, 1, n2="dead too"))
    assert noted_unfit(plan) == {"n1": "dead", "n2": "dead too"}


def test_a_note_that_cannot_be_written_is_a_full_disk(world):
    plan = world.submit()
    (Path(plan.directory) / "unfit.jsonl").mkdir()
    with pytest.raises(ProvisionError, match="disk_full"):
        note_unfit(round_of(plan, 0, n1="dead"))
