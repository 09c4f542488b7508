"""How ranks may share a training is checked before anything is submitted; no torch."""

from __future__ import annotations

import pytest

from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of
from pytest_mlhpc.worker.workloads.fields import parallel

TRAINING = {workload.name: workload for workload in WORKLOADS if "parallel" in workload.fields}


def texts(devices: int = 4, *, warmup: int = 16, **changes) -> list[str]:
    """Return what is refused; fields of other modules need no right value here."""
    values = {
        **parameters_of(TRAINING["cosmoflow"], "smoke"),
        "devices": devices,
        "warmup": warmup,
        **changes,
    }
    return [f"{field}: {text}" for field, text in parallel.wrong(values)]


def both(replicate: object, shard: object) -> dict[str, object]:
    return {"replicate": replicate, "shard": shard}


def test_every_training_has_the_fields_unset_and_nothing_else_has_them():
    assert set(TRAINING) == {"cosmoflow", "deepcam", "resnet50", "language_model"}
    for workload in TRAINING.values():
        assert [workload.fields[name].default for name in parallel.FIELDS] == [None] * len(parallel.FIELDS)
    assert parallel.layout({"parallel": None}) is parallel.layout({}) is None


@pytest.mark.parametrize(("replicate", "shard"), [(4, 1), (1, 4), (2, 2)])
def test_all_ways_to_share_one_or_four_devices_are_fine(replicate, shard):
    assert texts(parallel=both(replicate, shard)) == texts(1, parallel=both(1, 1)) == []
    assert parallel.layout({"parallel": both(replicate, shard)}) == parallel.Layout(replicate, shard)


def test_the_node_that_trains_does_not_ask_again_for_devices():
    values = parameters_of(TRAINING["cosmoflow"], "smoke", parallel=both(3, 5))
    assert parallel.wrong(values) == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (both(2, 4), "replicate=2 x shard=4 are 8 devices, the test has devices=4"),
        (both(1, 1), "replicate=1 x shard=1 are 1 devices, the test has devices=4"),
        ({"replicate": 4}, "shard is missing"),
        ({}, "replicate is missing"),
        ({"replicas": 4, "shard": 1}, "unknown key 'replicas' (did you mean 'replicate'?)"),
        ({**both(4, 1), 7: 1}, "unknown key 7"),
        (both(0, 4), "replicate=0 is not a number of at least 1"),
        (both(-2, -2), "shard=-2 is not a number of at least 1"),
        (both(4, True), "shard=True is not a number of at least 1"),
        (both("4", 1), "replicate='4' is not a number of at least 1"),
        (both(None, 1), "replicate=None is not a number of at least 1"),
        (both(1.0, 4), "replicate=1.0 is not a number of at least 1"),
        ([2, 2], "expected a mapping of replicate and shard, found [2, 2]"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(value, text):
    assert f"parallel: {text}" in texts(parallel=value)
    if "devices=" not in text:
        with pytest.raises(ValueError, match=r"replicate|shard|key"):
            parallel.layout({"parallel": value})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"channels_last": True}, "channels_last: torch cannot shard weights that are laid out"),
        ({"precision": "fp16"}, "precision: scaling losses of fp16 over shards is not supported; use bf16"),
        ({"gradient_compression": "bf16"}, "gradient_compression: gradient_compression is of replicas (DDP)"),
        ({"bucket_mb": 10.0}, "bucket_mb: bucket_mb is of replicas (DDP)"),
    ],
)
def test_what_shards_cannot_have_is_refused_and_replicas_have_it(changes, text):
    (found,) = texts(parallel=both(2, 2), **changes)
    assert text in found
    assert texts(parallel=both(4, 1), **changes) == []


SHARDED = {"parallel": both(1, 4)}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({**SHARDED, "until": "quality"}, "parallel: ranks may evaluate different numbers of batches"),
        ({**SHARDED, "compile": "default"}, "compile: sharded models are not compiled"),
        ({"gradient_compression": "bf16", "cuda_graphs": True}, "gradient_compression: a graph cannot hold"),
        ({"gradient_compression": "powersgd", "warmup": 1}, "powersgd begins after 2 steps"),
    ],
)
def test_what_other_modes_cannot_have_is_refused(changes, text):
    (found,) = texts(**changes)
    assert text in found


@pytest.mark.parametrize("changes", [{"gradient_compression": "bf16"}, {"bucket_mb": 5.0}])
def test_one_device_exchanges_no_gradients(changes):
    (found,) = texts(1, **changes)
    assert "means nothing on one device" in found
    assert texts(2, **changes) == []


def test_compression_that_fits_is_taken():
    assert texts(1, gradient_compression="none") == []
    assert texts(gradient_compression="none", parallel=both(1, 4)) == []
    assert texts(gradient_compression="powersgd", warmup=2) == []
