"""Two nodes, two ranks on each: does training scale beyond a node, and do both ways of starting ranks do as well?"""

import pytest

LAUNCHERS = pytest.mark.parametrize(
    ("launcher", "name"), [("srun", "by_srun"), ("torchrun", "by_torchrun")], ids=["srun", "torchrun"]
)


@pytest.mark.train("cosmoflow", nodes=2, devices=4)
@LAUNCHERS
def test_cosmoflow_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline


@pytest.mark.train("resnet50", nodes=2, devices=4)
@LAUNCHERS
def test_resnet50_on_two_nodes(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
