"""Provisioning again: nodes that probes find unfit are avoided and reported, also after adoption."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from pod_worlds import ID

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.provisioner import LineArrived
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.provision.kubernetes.creation import note_unfit, read_unfit, unfit_messages
from pytest_mlhpc.provision.kubernetes.reconciler import NO_ROOM_RETRY_S


def vetted(world):
    """Return the runs' messages about vetting."""
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


def test_an_unfit_node_is_reported_to_the_run_before_the_next_round(world):
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


def test_an_adopted_allocation_reports_its_unfit_nodes_and_avoids_them(world):
    world.submitted().pod(unfit="dead")
    world.follow(2)
    world.events.clear()
    world.adopt(world.plan(), "-r1")
    world.follow(1)
    assert [body["unfit"] for body in vetted(world)] == [{"n1": "dead"}]
    assert world.provisioner._allocations[ID].excluded == ("n1",)


def test_a_run_without_unfit_nodes_gets_no_message(world):
    world.submitted().pod(running=True)
    world.follow(1)
    assert vetted(world) == []


def test_only_the_first_runs_message_says_that_probes_found_it(plan):
    runs = (*plan.runs, replace(plan.runs[0], run_id="run-b"))
    plan = replace(plan, runs=runs, vetting=VetSettings(level="deep"))
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
    assert read_unfit(plan) == {"n1": "dead", "n2": "dead too"}


def test_a_note_that_cannot_be_written_is_reported(plan):
    (Path(plan.directory) / "unfit.jsonl").mkdir()
    with pytest.raises(ProvisionError, match="not_writable"):
        note(plan, 0, n1="dead")


# --- pods without room at their kubelet


TEXT = "rejected: OutOfcpu: Node didn't have enough resource: cpu"


@pytest.fixture
def submitted(world):
    return world.submitted()


def test_it_is_made_again_after_a_while_and_runs(submitted):
    submitted.pod(crowded=True)
    for seconds, jobs in ((NO_ROOM_RETRY_S - 1, [""]), (4, ["-r1"])):
        assert (submitted.follow(seconds), submitted.jobs()) == ([], jobs)
    submitted.pod("pod-2", "-r1-x", running=True)
    submitted.print("started", "end", uid="pod-2")
    assert submitted.end().error is None
    assert submitted.states().count("running") == 1, "it waited until then"
    assert submitted.provisioner._allocations == {}


def test_it_is_not_made_again_for_ever(submitted):
    for suffix, seconds, following in (("", NO_ROOM_RETRY_S, "-r1"), ("-r1", 3 * NO_ROOM_RETRY_S, "-r2")):
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
    assert (submitted.follow(NO_ROOM_RETRY_S + 4), submitted.jobs()) == ([], ["-r1"])
