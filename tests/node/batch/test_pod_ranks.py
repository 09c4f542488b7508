"""Ranks that train on several pods: by torchrun and by podrun, with data of each pod's own, and when one of them dies."""

import sys

import pytest
from pods import run_plan

from pytest_mlhpc.node import torchrun
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.prepare import goes_first
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

#: A rank without torch that has begun; the second one is killed, and the first waits for ever.
RANK = """
import os, signal, threading
from pytest_mlhpc.node.protocol.channel import RankChannel
channel = RankChannel.from_environment()
channel.started({"torch": "none"})
if channel.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def trained(module_pods, tmp_path_factory):
    """Return two pods that have trained: once to the end, and once until a rank was killed."""
    folder = tmp_path_factory.mktemp("rank")
    (folder / "rank.py").write_text(RANK)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder}/rank.py\n")
    python.chmod(0o755)
    resnet = next(one for one in WORKLOADS if one.name == "resnet50")
    parameters = parameters_of(resnet, "smoke", global_batch=4, image_size=32, classes=2)
    two = {"workload": "resnet50", "argv": (), "nodes": 2, "ranks": 2, "steps": 2, "warmup_steps": 1}
    group = module_pods(
        run_plan("whole", parameters=parameters, launcher="torchrun", data_source="files", **two),
        run_plan("killed", launcher="podrun", python=str(python), **two),
        pods=2,
    )
    group.start()
    assert group.ends() == {0: 0, 1: 0}
    return group


@pytest.mark.servers
def test_torchrun_on_two_pods_measures_once(trained):
    assert [kind for run, kind in trained.kinds() if run == "whole"] == ["started", "measurement", "end"]
    (measurement,), (end,) = trained.bodies("measurement"), trained.bodies("end", "whole")
    assert (measurement["ranks"], end["exit"]) == (2, [0, 0])


@pytest.mark.servers
def test_every_pod_makes_a_synthetic_set_of_its_own(trained):
    made = [sorted(path.name for path in (trained.work(rank) / "data").iterdir()) for rank in (0, 1)]
    assert made[0] == made[1]
    assert made[0]


@pytest.mark.servers
def test_a_rank_that_is_killed_on_the_other_pod_is_named_with_pod_and_node(trained):
    assert [kind for run, kind in trained.kinds() if run == "killed"] == ["started", "failed", "end"]
    failure = trained.failure("killed")
    assert failure["outcome"] == "worker_killed"
    assert failure["text"].startswith("rank 1 on p-1 (node node1) was killed by SIGKILL")


@pytest.mark.parametrize(("own_disk", "first"), [("", [0]), ("1", [0, 2])])
def test_ranks_that_share_a_disk_make_a_set_once(own_disk, first):
    groups = [Group(rank, rank % 2, 4) for rank in range(4)]
    assert [group.rank for group in groups if goes_first(group, {"MLHPC_OWN_DISK": own_disk})] == first


@pytest.mark.parametrize(
    ("environ", "taken"),
    [
        ({"MLHPC_RANKS_FROM": "pods", "MLHPC_TASK_POD": "1"}, {"PET_NODE_RANK": "1", "MLHPC_TASK_POD": "1"}),
        ({"MLHPC_RANKS_FROM": "slurm", "SLURM_NODEID": "1"}, {"PET_NODE_RANK": "1", "SLURM_NODEID": "1"}),
    ],
)
def test_an_agent_of_torchrun_has_its_pods_or_nodes_number_and_its_ranks_do_not_ask(environ, taken):
    torchrun.take_place(environ)
    assert environ == taken
