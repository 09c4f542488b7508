"""DeepCAM (MLPerf HPC): segmentation of extreme weather in climate images of 16 channels."""

import pytest

from pytest_mlhpc import train


@train("deepcam")
@pytest.mark.parametrize("data", ["memory", "files"])
def test_deepcam(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
