"""Ensembles are checked before anything is submitted: M x P against the devices, and what contradicts them; no torch."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of
from pytest_mlhpc.worker.workloads.fields import bagging

TRAINING = {workload.name: workload for workload in WORKLOADS if "bagging" in workload.fields}


def texts(devices: int = 4, **changes) -> list[str]:
    return [f"{field}: {text}" for field, text in bagging.wrong({"devices": devices, **changes})]


def test_every_training_has_the_field_unset():
    assert set(TRAINING) == {"cosmoflow", "deepcam", "resnet50", "language_model"}
    for workload in TRAINING.values():
        values = parameters_of(workload, "smoke")
        assert values["bagging"] is None
        assert bagging.wrong({**values, "devices": 3}) == ()
        assert bagging.expected(values) == ()


@pytest.mark.parametrize("pair", [(4, 1), (2, 2), (1, 4), [2, 2]])
def test_m_times_p_may_be_the_devices(pair):
    assert texts(bagging=pair) == []
    assert bagging.expected({"bagging": pair}) == bagging.METRICS


@pytest.mark.parametrize("pair", [(2, 1), (4, 4), (1, 1)])
def test_m_times_p_other_than_the_devices_is_refused(pair):
    m, p = pair

    assert texts(bagging=pair) == [
        f"bagging: bagging=({m}, {p}) is {m * p} devices, the run has devices=4: make them equal"
    ]


@pytest.mark.parametrize(
    "pair", [(), (4,), (2, 2, 1), (0, 4), (-2, -2), (2.0, 2), ("2", 2), (True, 4), (None, 4)]
)
def test_what_is_no_pair_of_numbers_is_refused(pair):
    assert texts(bagging=pair) == [
        f"bagging: bagging={pair!r} is no pair (M, P) of whole numbers of at least 1: base models, and devices of each"
    ]


def test_a_cold_cache_and_other_ways_to_share_contradict_it():
    found = texts(bagging=(2, 2), cache="cold", parallel={"replicate": 4, "shard": 1})

    assert [text.partition(":")[0] for text in found] == ["cache", "parallel"]
    assert "come from the page cache from the second time on" in found[0]
    assert "leave parallel or bagging out" in found[1]


def test_a_test_that_declares_an_ensemble_gets_it_in_key_and_metrics(declare_probe):
    spec, run = declare_probe("resnet50", 4, bagging=(2, 2))

    assert "bagging=[2,2]" in spec.benchmark
    assert set(bagging.METRICS) <= set(spec.expected_metrics)
    assert list(run.parameters["bagging"]) == [2, 2]
    assert run.parameters["global_batch"] == 32


def test_keys_of_other_trainings_know_nothing_of_it(declare_probe):
    spec, _ = declare_probe("resnet50", 4)

    assert "bagging" not in spec.benchmark


def test_a_test_whose_devices_do_not_fit_is_refused_at_collection(declare_probe):
    with pytest.raises(SpecError, match=r"bagging=\(2, 2\) is 4 devices, the run has devices=3"):
        declare_probe("resnet50", 3, bagging=(2, 2))


def test_training_until_a_quality_is_no_ensemble(declare_probe):
    with pytest.raises(SpecError, match="bagging"):
        declare_probe("cosmoflow", 4, bagging=(2, 2), until="quality", data="files")
