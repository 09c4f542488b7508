"""Two nodes, two ranks on each: does training scale beyond a node, and do both ways of starting ranks do as well?"""

import pytest

from pytest_mlhpc import train

LAUNCHERS = pytest.mark.parametrize("launcher", ["srun", "torchrun"])


@train("cosmoflow", nodes=2, devices_per_node=2, requires="-wse")
@LAUNCHERS
def test_cosmoflow_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline


@train("resnet50", nodes=2, devices_per_node=2, requires="-wse")
@LAUNCHERS
def test_resnet50_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
