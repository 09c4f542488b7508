"""Pods vet beside each other before their first run, through the hub by which runs are started; whoever dies is named."""

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from pods import both, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.policy import ExpectedNode

pytestmark = pytest.mark.servers

RUN, NEXT = "run-0001", "run-0002"

#: Nothing computes: what is tested is who is asked and told.
LOOK = VetSettings(level="quick", need=2, unknown="warn", no_load=True, budget_s=300.0)


@pytest.fixture
def start(pods):
    """Start pods that vet before their runs of nothing, two unless told otherwise."""

    def make(*runs, vetting=LOOK, count=2):
        group = pods(*runs, pods=count)
        group.plan = replace(group.plan, vetting=vetting)
        group.start()
        return group

    return make


def vetting_of(group, rank):
    """Return the process that vets a pod's node, once it has left its start behind; 0 if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
            children = (folder / "task" / folder.name / "children").read_text().split()
            ours = f"MLHPC_WORK={group.work(rank)}".encode() in environ
            if ours and words[1:3] == [b"-m", b"pytest_mlhpc.node.batch.vetting"] and children:
                return int(folder.name)
    return 0


def test_the_nodes_of_all_pods_are_reported_before_the_first_run(start):
    group = start(both("true"), both("true", NEXT))
    assert group.ends() == {0: 0, 1: 0}
    assert group.kinds() == [
        (RUN, "vetted"), (NEXT, "vetted"), (RUN, "started"), (RUN, "end"), (NEXT, "started"), (NEXT, "end"),
    ]  # fmt: skip
    first, second = group.bodies("vetted")
    assert first["fit"] == second["fit"] == ["node0", "node1"]
    assert first["unfit"] == {}
    assert [node["host"] for node in first["verdict"]["nodes"]] == ["p-0 (node node0)", "p-1 (node node1)"]
    assert "verdict" not in second


def test_no_run_begins_where_nodes_are_unfit_and_all_of_them_are_named(start):
    vetting = replace(LOOK, wanted=ExpectedNode(expect={"numa": "77"}))
    group = start(both("true"), both("true", NEXT), vetting=vetting)
    assert group.ends() == {0: 0, 1: 0}
    assert [kind for _, kind in group.kinds()] == ["vetted", "failed", "end", "vetted", "failed", "end"]
    failure = group.failure()
    assert (failure["outcome"], failure["nodes"]) == ("unfit_nodes", ["node0", "node1"])
    text = "0 of 2 nodes are fit, 2 are needed; p-0 (node node0): [node_problem] numa is"
    assert failure["text"].startswith(text)
    assert list(group.bodies("vetted")[0]["unfit"]) == ["node0", "node1"]


def test_a_pod_whose_vetting_dies_is_named_and_the_other_is_not_blamed(start):
    group = start(both("true"))
    wait_for(lambda: vetting_of(group, 1))
    os.kill(vetting_of(group, 1), signal.SIGKILL)
    assert group.ends() == {0: 0, 1: 0}
    failure = group.failure()
    assert (failure["outcome"], failure["nodes"]) == ("unfit_nodes", ["node1"])
    assert "p-1 (node node1): [node_problem] the node's answers are incomplete" in failure["text"]
    assert group.bodies("vetted")[0]["fit"] == ["node0"]


def test_a_pod_that_goes_while_it_is_vetted_is_named(start):
    group = start(both("true"))
    wait_for(lambda: vetting_of(group, 1))
    group.agents[1].kill()
    assert group.ends()[0] == 0
    failure = group.failure()
    text = "the nodes could not be vetted: pod p-1 (node node1) was lost"
    assert (failure["outcome"], failure["text"][: len(text)]) == ("node_failure", text)
    assert group.bodies("vetted") == []


def test_a_single_pod_is_vetted_by_its_nodes_name(start):
    group = start(run_plan(), count=1, vetting=replace(LOOK, need=1))
    assert (group.ends(), group.kinds()) == ({0: 0}, [(RUN, "vetted"), (RUN, "started"), (RUN, "end")])
    assert group.bodies("vetted")[0]["fit"] == ["node0"]
