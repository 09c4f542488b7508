"""Ensembles whose base models are trained in pods."""

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SUITE = """
from pytest_mlhpc import train

@train("cosmoflow", nodes=2, bagging=(2, 1), steps=6, warmup=1, global_batch=4, judge=False,
                   kubernetes={"kind": "pods"})
def test_two_base_models(run):
    assert run["base_models"].value == 2
    assert run["base_models_failed"].value == 0
"""


@pytest.mark.parametrize("launcher", ["torchrun", "podrun"])
def test_a_base_model_in_each_of_two_pods(pod_suite, launcher):
    pod_suite.tests(SUITE)
    pod_suite.partition({"launcher": launcher})
    pod_suite.start().end().expect(0, passed=1)
