"""Ranks that train on several pods: by torchrun and by podrun, with data of each pod's own, and when one of them dies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pods import Pods, run_plan

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

RUN, NEXT = "run-0001", "run-0002"
TESTS = Path(__file__).parents[1]


def tiny(name: str = RUN, **changes) -> RunPlan:
    variables = {
        "MLHPC_WORKLOAD_MODULE": "tiny_workload",
        "PYTHONPATH": f"{TESTS / 'worker'}:{TESTS / 'real/slurm'}",
        **changes.pop("variables", {}),
    }
    fields = {
        "workload": "tiny", "parameters": {"global_batch": 8}, "nodes": 2, "ranks": 2, "launcher": "torchrun", "argv": (),
        "time_limit_s": 200.0, "steps": 4, "warmup_steps": 1,
    }  # fmt: skip
    return run_plan(name, **{**fields, "variables": variables, **changes})


@pytest.fixture
def pods(tmp_path):
    made: list[Pods] = []

    def make(*runs, **changes) -> Pods:
        made.append(Pods(tmp_path, *runs, **{"pods": 2, **changes}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def measured(group: Pods) -> list[Message]:
    return [item for item in group.messages() if isinstance(item, Message) and item.kind == "measurement"]


def test_torchrun_on_two_pods_and_then_ranks_by_podrun_each_measure_once(pods):
    group = pods(tiny(), tiny(NEXT, launcher="podrun"))
    group.start()
    assert group.ends(280) == {0: 0, 1: 0}
    assert group.told() == [(run, kind) for run in (RUN, NEXT) for kind in ("started", "measurement", "end")]
    assert [item.body["ranks"] for item in measured(group)] == [2, 2]


def test_every_pod_makes_a_synthetic_set_of_its_own(pods):
    resnet = next(one for one in WORKLOADS if one.name == "resnet50")
    parameters = parameters_of(resnet, "smoke", global_batch=4, image_size=32, classes=2)
    run = tiny(workload="resnet50", parameters=parameters, variables={}, data_source="files", steps=2)
    group = pods(run)
    group.start()
    assert group.ends(280) == {0: 0, 1: 0}
    assert group.told() == [(RUN, "started"), (RUN, "measurement"), (RUN, "end")]
    made = [sorted(path.name for path in (group.work(rank) / "data").iterdir()) for rank in (0, 1)]
    assert made[0] == made[1]
    assert made[0]


def test_a_rank_that_is_killed_on_the_other_pod_is_named_with_pod_and_node(pods):
    parameters = {"global_batch": 8, "how": "killed", "rank": 1, "ignore_sigterm": False}
    group = pods(tiny(parameters=parameters, variables={"MLHPC_WORKLOAD_MODULE": "broken_workload"}))
    group.start()
    assert group.ends(280) == {0: 0, 1: 0}
    failure = group.failure()
    assert failure["outcome"] == "worker_killed"
    assert failure["text"].startswith("rank 1 on p-1 (node node1) was killed by SIGKILL")


@pytest.mark.parametrize(("own_disk", "first"), [("", [0]), ("1", [0, 2])])
def test_ranks_that_share_a_disk_make_a_set_once(own_disk, first):
    from pytest_mlhpc.worker.prepare import goes_first

    groups = [Group(rank, rank % 2, 4) for rank in range(4)]
    assert [group.rank for group in groups if goes_first(group, {"MLHPC_OWN_DISK": own_disk})] == first


def test_an_agent_of_torchrun_has_its_pods_number():
    from pytest_mlhpc.worker import elastic

    environ = {"MLHPC_RANKS_FROM": "pods", "MLHPC_TASK_POD": "1"}
    elastic.take_place(environ)
    assert environ == {"PET_NODE_RANK": "1", "MLHPC_TASK_POD": "1"}
    assert sys.executable
