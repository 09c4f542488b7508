"""Why is a training as fast as it is? Peaks of the device, kernels of a step, exchange of gradients, reading of samples.

`mlhpc roofline` draws the first two together (docs/roofline.md).
"""

import pytest

TRAININGS = pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50", "language_model"])


@pytest.mark.job("peaks")
def test_peaks(run, baseline):
    assert run >= baseline


@pytest.mark.job("kernels")
@TRAININGS
def test_kernels(run, baseline):
    assert run >= baseline


@pytest.mark.job("gradients", devices=2)
@TRAININGS
def test_gradients(run, baseline):
    assert run >= baseline


@pytest.mark.job("reading")
@pytest.mark.parametrize("of", ["cosmoflow", "deepcam", "resnet50"])
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_reading(run, baseline):
    assert run >= baseline
