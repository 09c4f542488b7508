"""What is refused before it is submitted, and with which text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pytest_mlhpc.jobs.packing import MARGIN_S
from pytest_mlhpc.provision.slurm.client import PartitionLimits, QosLimits
from pytest_mlhpc.provision.slurm.limits import beyond, longest
from pytest_mlhpc.provision.slurm.options import SlurmSettings

PARTITION = SimpleNamespace(id="site:part", nodes=SimpleNamespace(max=8, devices=0, cores=16))


def part(**limits):
    return PartitionLimits(**{"name": "cpu", "up": True, **limits})


WIDE, LONG = part(max_nodes=8, max_time_s=3600, total_nodes=8), QosLimits("q", 3600, 8)
TIME = "120 s are needed (time_limit and margin), but "


@pytest.mark.parametrize(
    ("spec", "limits", "qos", "settings", "text"),
    [
        pytest.param({"nodes": 8, "time_limit_s": 3600 - MARGIN_S}, WIDE, LONG, {"max_time_s": 3600.0}, "", id="within all limits"),
        pytest.param({"nodes": 8, "time_limit_s": 1e6}, None, None, {}, "", id="without an answer of Slurm"),
        ({"nodes": 9}, None, None, {}, "9 nodes are wanted, but systems.yaml: site:part: nodes.max is 8"),
        ({"nodes": 3}, part(max_nodes=2), None, {}, "3 nodes are wanted, but MaxNodes of Slurm's partition cpu is 2"),
        ({"nodes": 3}, part(total_nodes=2), None, {}, "3 nodes are wanted, but nodes of Slurm's partition cpu is 2"),
        ({"nodes": 3}, part(), QosLimits("short", max_nodes=2), {}, "3 nodes are wanted, but the limit of QoS short is 2"),
        ({}, None, None, {"max_time_s": 100.0}, f"{TIME}systems.yaml: site:part: slurm.max_time is 100 s"),
        ({}, part(max_time_s=100), None, {}, f"{TIME}MaxTime of Slurm's partition cpu is 100 s"),
        ({}, part(), QosLimits("short", max_time_s=100), {}, f"{TIME}MaxWall of QoS short is 100 s"),
        ({}, part(up=False), None, {}, "Slurm's partition cpu is down"),
        ({"nodes": 2, "ranks": 34, "workload": "resnet50"}, None, None, {}, "17 ranks on each node are wanted, which has 16 cores"),
        pytest.param({"nodes": 2, "ranks": 34}, None, None, {}, "", id="a program may have more processes than cores"),
    ],
)  # fmt: skip
def test_what_goes_beyond_a_limit_is_refused_by_the_limit_that_says_so(spec, limits, qos, settings, text):
    fields = {"nodes": 1, "time_limit_s": 60.0, "ranks": 1, "workload": "command", **spec}
    assert beyond(SimpleNamespace(**fields), PARTITION, SlurmSettings(**settings), limits, qos) == text


def test_the_longest_allocation_is_the_least_of_what_is_known():
    assert longest(SlurmSettings(), None, None) is None
    assert longest(SlurmSettings(max_time_s=9.0), part(max_time_s=7), QosLimits("q", 8)) == 7
