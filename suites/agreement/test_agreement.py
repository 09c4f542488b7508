"""Does the device compute what it should? Loss and gradients of one step, against the same step on the CPU in float64.

It fails where a device is further from float64 than rounding explains. Nothing in it is judged against a baseline.
"""

import pytest

from pytest_mlhpc import workload


@workload("agreement", requires="-wse")  # torch computes nothing there by itself
@pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50", "language_model"])
def test_agreement(run):
    assert run["gradient_error"].value < 1
