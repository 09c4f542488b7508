"""Why is a training as fast as it is? Peaks of the device, kernels of a step, exchange of gradients, reading of samples.

`mlhpc papers roofline` draws the first two together (docs/roofline.md).
"""

import pytest

from pytest_mlhpc import roofline

TRAININGS = pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50", "language_model"])


@roofline("peaks")
def test_peaks(run, baseline):
    assert run >= baseline


@roofline("kernels")
@TRAININGS
def test_kernels(run, baseline):
    assert run >= baseline


@roofline("gradients", devices_per_node=2)
@TRAININGS
def test_gradients(run, baseline):
    assert run >= baseline


@roofline("reading")
@pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50"])
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_reading(run, baseline):
    assert run >= baseline
