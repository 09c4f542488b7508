"""DeepCAM (MLPerf HPC): segmentation of extreme weather in climate images of 16 channels."""

import pytest


@pytest.mark.train("deepcam")
@pytest.mark.parametrize("data", ["memory", "files"])
def test_deepcam(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
