"""Pods vet beside each other before their first run, through the hub by which runs are started; whoever dies is named."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from pods import Pods, run_plan

from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.vet.check import Wanted
from pytest_mlhpc.vet.settings import Settings

pytestmark = pytest.mark.servers

RUN, NEXT = "run-0001", "run-0002"

#: Nothing computes: what is tested is who is asked and told.
LOOK = Settings(level="quick", need=2, unknown="warn", no_load=True, budget_s=30.0)


def both(name: str = RUN, **changes):
    fields = {"nodes": 2, "ranks": 2, "launcher": "podrun", "argv": ("true",)}
    return run_plan(name, **{**fields, **changes})


@pytest.fixture
def pods(tmp_path):
    made: list[Pods] = []

    def make(*runs, vetting: Settings = LOOK, **changes) -> Pods:
        made.append(Pods(tmp_path, *runs, **{"pods": 2, **changes}))
        made[-1].plan = replace(made[-1].plan, vetting=vetting)
        return made[-1]

    yield make
    for one in made:
        one.close()


def vetted(group: Pods) -> list[dict]:
    return [
        dict(item.body) for item in group.messages() if isinstance(item, Message) and item.kind == "vetted"
    ]


def vetting_of(group: Pods, rank: int) -> int:
    """Return the process that vets a pod's node, once it has left its start behind; 0 if there is none."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes().split(b"\0")
            ours = f"MLHPC_WORK={group.work(rank)}".encode() in environ
            if ours and words[1:3] == [b"-m", b"pytest_mlhpc.batch.vetting"] and _has_children(folder):
                return int(folder.name)
    return 0


def _has_children(folder: Path) -> bool:
    return bool((folder / "task" / folder.name / "children").read_text().split())


def test_the_nodes_of_all_pods_are_told_before_the_first_run(pods):
    group = pods(both(), both(NEXT))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert group.told() == [
        (RUN, "vetted"), (NEXT, "vetted"), (RUN, "started"), (RUN, "end"), (NEXT, "started"), (NEXT, "end"),
    ]  # fmt: skip
    first, second = vetted(group)
    assert first["fit"] == second["fit"] == ["node0", "node1"]
    assert first["unfit"] == {}
    assert [node["host"] for node in first["verdict"]["nodes"]] == ["p-0 (node node0)", "p-1 (node node1)"]
    assert "verdict" not in second


def test_no_run_begins_where_nodes_are_unfit_and_all_of_them_are_named(pods):
    group = pods(both(), both(NEXT), vetting=replace(LOOK, wanted=Wanted(expect={"numa": "77"})))
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    assert [kind for _, kind in group.told()] == ["vetted", "failed", "end", "vetted", "failed", "end"]
    failure = group.failure()
    assert failure["outcome"] == "unfit_nodes"
    assert failure["text"].startswith(
        "0 of 2 nodes are fit, 2 are needed; p-0 (node node0): [node_problem] numa is"
    )
    assert failure["nodes"] == ["node0", "node1"]
    assert list(vetted(group)[0]["unfit"]) == ["node0", "node1"]


def test_a_pod_whose_vetting_dies_is_named_and_the_other_is_not_blamed(pods):
    group = pods(both())
    group.start()
    pid = group.await_(lambda: vetting_of(group, 1))
    os.kill(pid, signal.SIGKILL)
    assert group.ends() == {0: 0, 1: 0}
    failure = group.failure()
    assert (failure["outcome"], failure["nodes"]) == ("unfit_nodes", ["node1"])
    assert "p-1 (node node1): [node_problem] the node did not say all" in failure["text"]
    assert vetted(group)[0]["fit"] == ["node0"]


def test_a_pod_that_goes_while_it_is_vetted_is_named(pods):
    group = pods(both())
    group.start()
    group.await_(lambda: vetting_of(group, 1))
    group.agents[1].kill()
    assert group.ends()[0] == 0
    failure = group.failure()
    assert failure["outcome"] == "node_failure"
    assert failure["text"].startswith("the nodes could not be vetted: pod p-1 (node node1) was lost")
    assert vetted(group) == []


def test_a_single_pod_is_vetted_by_its_nodes_name(pods):
    group = pods(run_plan(), pods=1, vetting=replace(LOOK, need=1))
    group.start()
    assert group.ends() == {0: 0}
    assert group.told() == [(RUN, "vetted"), (RUN, "started"), (RUN, "end")]
    assert vetted(group)[0]["fit"] == ["node0"]
