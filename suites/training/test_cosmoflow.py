"""CosmoFlow (MLPerf HPC): 3-D convolutions that predict cosmological parameters from a dark-matter volume."""

import pytest

from pytest_mlhpc import train


@train("cosmoflow")
@pytest.mark.parametrize("data", ["memory", "files"])
def test_cosmoflow(run, baseline):
    assert run["loss"].last < run["loss"].first
    assert run >= baseline
