"""Nodes that probes find unfit: noted, told to the runs once they are gone round, and known to whoever adopts the allocation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pod_worlds import ID

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.base import LineArrived
from pytest_mlhpc.provision.kubernetes.placing import note_unfit, noted_unfit, unfit_messages
from pytest_mlhpc.vet.settings import Settings


def vetted(world):
    """Return what the runs were told of vetting."""
    messages = [event.message for event in world.all_of(LineArrived)]
    return [message.body for message in messages if message.kind == "vetted"]


@pytest.fixture
def plan(world):
    return world.submit()


def note(plan, number, **unfit):
    """Note a round of an allocation: its pods' nodes, and what their probes reported; return the file."""
    views = [SimpleNamespace(node=node, unfit=text) for node, text in unfit.items()]
    note_unfit(SimpleNamespace(plan=plan, round=number, views=views))
    return Path(plan.directory) / "unfit.jsonl"


def test_an_unfit_node_is_told_to_the_run_before_the_next_round(world):
    world.submitted().pod(unfit="its GPU does not answer")
    assert world.follow(2) == []
    (body,) = vetted(world)
    found = {"n1": "its GPU does not answer"}
    assert body.items() >= {"unfit": found, "probed": found, "fit": [], "warnings": {}}.items()


@pytest.mark.parametrize(
    ("rounds", "unfit", "text"),
    [
        (0, {"n1": "dead"}, "n1: dead; provisioned once, no more (kubernetes: reprovision)"),
        (1, {"n1": "dead", "n2": "dead too"}, "n2: dead too, before that n1; provisioned 2 times"),
    ],
)
def test_nodes_are_found_unfit_a_limited_number_of_times(world_of, rounds, unfit, text):
    world = world_of(reprovision=rounds).submitted()
    for number, (node, why) in enumerate(unfit.items()):
        world.pod(f"pod-{number}", f"-r{number}-x" if number else "-x", unfit=why, node=node)
        world.follow(2)
    error = world.end().error
    assert (error.outcome, error.nodes, text in str(error)) == ("unfit_nodes", (), True)
    assert vetted(world)[-1]["unfit"] == unfit


def test_who_adopts_an_allocation_is_told_of_its_unfit_nodes_and_goes_round_them(world):
    world.submitted().pod(unfit="dead")
    world.follow(2)
    world.events.clear()
    world.adopt(world.plan(), "-r1")
    world.follow(1)
    assert [body["unfit"] for body in vetted(world)] == [{"n1": "dead"}]
    assert world.provisioner._allocations[ID].excluded == ("n1",)


def test_a_run_without_unfit_nodes_is_told_nothing(world):
    world.submitted().pod(running=True)
    world.follow(1)
    assert vetted(world) == []


def test_only_the_first_run_is_told_that_probes_found_it(plan):
    runs = (*plan.runs, replace(plan.runs[0], run_id="run-b"))
    plan = replace(plan, runs=runs, vetting=Settings(level="deep"))
    note(plan, 0, n1="dead", n2="")
    first, other = unfit_messages(plan)
    assert first.run_id == "run-a"
    assert first.body["probed"] == other.body["unfit"] == {"n1": "dead"}
    assert "probed" not in other.body
    assert first.body["level"] == other.body["level"] == "deep"


def test_the_rounds_are_noted_one_after_the_other(plan):
    note(plan, 0, n1="dead")
    first, second = map(json.loads, note(plan, 1, n2="dead too").read_text().splitlines())
    assert first == {"round": 0, "node": "n1", "text": "dead"}
    assert second == {"round": 1, "node": "n2", "text": "dead too"}


@pytest.mark.parametrize("damage", ["{", "[]", "7", '{"node": "n9"}', "\ufffd" * 9, "[" * 100_000])
def test_a_damaged_note_is_left_out(plan, damage):
    with note(plan, 0, n1="dead").open("a") as file:
        file.write(f"{damage}\n")
    note(plan, 1, n2="dead too")
    assert noted_unfit(plan) == {"n1": "dead", "n2": "dead too"}


def test_a_note_that_cannot_be_written_is_a_full_disk(plan):
    (Path(plan.directory) / "unfit.jsonl").mkdir()
    with pytest.raises(ProvisionError, match="disk_full"):
        note(plan, 0, n1="dead")
