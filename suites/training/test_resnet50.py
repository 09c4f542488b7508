"""ResNet-50 v1.5: image classification; the workload that everybody has a figure of."""

from pytest_mlhpc import train


@train("resnet50")
def test_resnet50(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
