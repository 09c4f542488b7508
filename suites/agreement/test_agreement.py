"""Does the device compute what it should? Loss and gradients of one step, against the same step on the CPU in float64.

It fails where a device is further from float64 than rounding explains. Nothing in it is judged against a baseline.
"""

import pytest


@pytest.mark.job("agreement")
@pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50", "language_model"])
def test_agreement(run):
    assert run["gradient_error"].value < 1
