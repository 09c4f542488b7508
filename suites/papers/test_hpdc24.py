"""The CPU runs of Rae, Lee, Richings and Weiland, HPDC'24: ranks that share nodes, on two and four of them.

16 ranks on each of two nodes for ResNet-50 and CosmoFlow, 8 on each of four for DeepCAM.
"""

from pytest_mlhpc import train


@train("resnet50", nodes=2, devices_per_node=16, requires="cpu")
def test_resnet50_with_16_ranks_a_node(run, baseline):
    assert run >= baseline


@train("cosmoflow", nodes=2, devices_per_node=16, requires="cpu")
def test_cosmoflow_with_16_ranks_a_node(run, baseline):
    assert run >= baseline


@train("deepcam", nodes=4, devices_per_node=8, requires="cpu")
def test_deepcam_with_8_ranks_a_node(run, baseline):
    assert run >= baseline
