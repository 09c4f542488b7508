"""What is refused before it is submitted, and in which words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_mlhpc.jobs.packing import MARGIN_S
from pytest_mlhpc.provision.slurm.client import PartitionLimits, QosLimits
from pytest_mlhpc.provision.slurm.limits import beyond, longest
from pytest_mlhpc.provision.slurm.options import SlurmSettings

NODE = SimpleNamespace(max=8, devices=0, cores=16)
PARTITION = SimpleNamespace(id="site:part", nodes=NODE)


def spec(nodes=1, time_s=60.0, ranks=1, workload="command"):
    return SimpleNamespace(nodes=nodes, time_limit_s=time_s, ranks=ranks, workload=workload)


def refused(wanted, limits=None, qos=None, **settings) -> str:
    return beyond(wanted, PARTITION, SlurmSettings(**settings), limits, qos)


def part(**what) -> PartitionLimits:
    return PartitionLimits(**{"name": "cpu", "up": True, **what})


def test_what_is_within_all_limits_is_not_refused():
    limits, qos = part(max_nodes=8, max_time_s=3600, total_nodes=8), QosLimits("q", 3600, 8)
    assert refused(spec(8, 3600 - MARGIN_S), limits, qos, max_time_s=3600.0) == ""


@pytest.mark.parametrize(
    ("nodes", "limits", "qos", "text"),
    [
        (9, None, None, "9 nodes are wanted, but systems.yaml: site:part: nodes.max is 8"),
        (3, part(max_nodes=2), None, "3 nodes are wanted, but MaxNodes of Slurm's partition cpu is 2"),
        (3, part(total_nodes=2), None, "3 nodes are wanted, but nodes of Slurm's partition cpu is 2"),
        (3, part(), QosLimits("short", max_nodes=2), "3 nodes are wanted, but the limit of QoS short is 2"),
    ],
)
def test_too_many_nodes_are_refused_by_the_limit_that_says_so(nodes, limits, qos, text):
    assert refused(spec(nodes), limits, qos) == text


@pytest.mark.parametrize(
    ("limits", "qos", "settings", "what"),
    [
        (None, None, {"max_time_s": 100.0}, "systems.yaml: site:part: slurm.max_time is 100 s"),
        (part(max_time_s=100), None, {}, "MaxTime of Slurm's partition cpu is 100 s"),
        (part(), QosLimits("short", max_time_s=100), {}, "MaxWall of QoS short is 100 s"),
    ],
)
def test_too_long_is_refused_by_the_limit_that_says_so(limits, qos, settings, what):
    assert (
        refused(spec(time_s=60), limits, qos, **settings)
        == f"120 s are needed (time_limit and margin), but {what}"
    )


def test_a_partition_that_is_down_is_told():
    assert refused(spec(), part(up=False)) == "Slurm's partition cpu is down"


def test_without_an_answer_of_slurm_only_systems_yaml_counts():
    assert refused(spec(8, 1e6)) == ""


def test_more_ranks_than_a_node_has_cores_are_refused_but_for_programs():
    assert (
        refused(spec(2, ranks=34, workload="resnet50"))
        == "17 ranks on each node are wanted, which has 16 cores"
    )
    assert refused(spec(2, ranks=34)) == ""


def test_the_longest_allocation_is_the_least_of_what_is_known():
    assert longest(SlurmSettings(), None, None) is None
    assert longest(SlurmSettings(max_time_s=9.0), part(max_time_s=7), QosLimits("q", 8)) == 7
