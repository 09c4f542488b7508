"""Two nodes, two ranks on each: does training scale beyond a node?

Two partitions that differ in their ``launcher`` tell whether both ways of starting ranks do as well.
"""

from pytest_mlhpc import train


@train("cosmoflow", nodes=2, devices_per_node=2, requires="-wse")
def test_cosmoflow_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline


@train("resnet50", nodes=2, devices_per_node=2, requires="-wse")
def test_resnet50_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
