"""Ensembles are checked before anything is submitted: M x P against the devices, and what contradicts them; no torch."""

import pytest

from pytest_mlhpc.errors import SpecError
from pytest_mlhpc.node.worker.workloads import fields
from pytest_mlhpc.node.worker.workloads.fields import parallel


def texts(devices: int = 4, **changes) -> list[str]:
    return [f"{field}: {text}" for field, text in parallel.wrong({"devices": devices, **changes})]


@pytest.mark.parametrize("pair", [(4, 1), (2, 2), (1, 4), [2, 2]])
def test_m_times_p_may_be_the_devices(pair):
    assert texts(bagging=pair) == []
    assert parallel.expected({"bagging": pair}) == parallel.BAGGING_METRICS


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        ([(2, 1), (1, 2)], "is 2 devices, the run has 4: make them equal"),
        ([(4, 4)], "is 16 devices, the run has 4: make them equal"),
        (
            [(), (4,), (2, 2, 1), (0, 4), (-2, -2), (2.0, 2), ("2", 2), (True, 4), (None, 4)],
            "is no pair (M, P) of whole numbers of at least 1: base models, and devices of each",
        ),
    ],
    ids=["less than the devices", "more than the devices", "no pair of numbers"],
)
def test_m_times_p_that_is_not_the_devices_is_refused(pairs, text):
    assert [texts(bagging=pair) for pair in pairs] == [
        [f"bagging: bagging={pair!r} {text}"] for pair in pairs
    ]


def test_a_cold_cache_contradicts_it():
    (found,) = texts(bagging=(2, 2), cache="cold", parallel={"replicate": 1, "shard": 2})
    assert "cache: a bootstrap sample" in found
    assert "come from the page cache from the second time on" in found


@pytest.mark.parametrize(
    ("asked", "devices", "each"),
    [(None, 4, 4), ((2, 2), 4, 2), ([1, 4], None, 4), ((4,), 4, 4), (None, None, None)],
)
def test_one_model_is_trained_by_the_devices_of_a_base_model_or_all(asked, devices, each):
    assert parallel.devices_of_one({"bagging": asked, "devices": devices}) == each


def test_a_test_that_declares_an_ensemble_gets_it_in_key_and_metrics(declare_probe):
    spec, run = declare_probe("resnet50", 4, bagging=(2, 2))
    assert "bagging=[2,2]" in spec.definition
    assert set(parallel.BAGGING_METRICS) <= set(spec.expected_metrics)
    assert list(run.parameters["bagging"]) == [2, 2]
    assert run.parameters["global_batch"] == 32
    assert "bagging" not in declare_probe("resnet50", 4)[0].definition


@pytest.mark.parametrize("layout", [None, {"replicate": 1, "shard": 2}])
def test_an_ensemble_that_is_trained_until_a_quality_tells_its_rounds(layout):
    asked = {"bagging": (2, 2), "until": "quality", "data": "files", "devices": 4, "parallel": layout}
    assert fields.wrong(asked) == ()
    expected = {*parallel.BAGGING_METRICS, parallel.BAGGING_ROUNDS, "time_to_train", "epochs", "quality"}
    assert expected <= set(fields.expected(asked))


@pytest.mark.parametrize(
    ("workload", "devices", "asked", "text"),
    [
        ("resnet50", 3, {}, r"bagging=\(2, 2\) is 4 devices, the run has 3"),
        ("resnet50", 4, {"parallel": {"replicate": 1, "shard": 4}}, "are 4 devices, a base model has 2"),
        (
            "cosmoflow",
            4,
            {"until": "quality", "data": "files", "staging": "files"},
            "would each copy the set",
        ),
    ],
    ids=["other devices", "shards of all devices", "staging by each base model"],
)
def test_a_declaration_that_contradicts_itself_is_refused(declare_probe, workload, devices, asked, text):
    with pytest.raises(SpecError, match=text):
        declare_probe(workload, devices, bagging=(2, 2), **asked)
