"""How ranks may share a training is checked before anything is submitted; no torch."""

import pytest
from tables import table

from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.fields import parallel
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

VALUES = parameters_of(WORKLOADS[0], "smoke")
TABLES = table("parallel_fields")


def texts(devices: int = 4, **changes) -> list[str]:
    """Return what is refused; fields of other modules need no right value here."""
    found = parallel.wrong({**VALUES, "devices": devices, "warmup": 16, **changes})
    return [f"{field}: {text}" for field, text in found]


def both(replicate: object, shard: object) -> dict[str, object]:
    return {"replicate": replicate, "shard": shard}


@pytest.mark.parametrize(("replicate", "shard"), [(4, 1), (1, 4), (2, 2)])
def test_all_ways_to_share_one_or_four_devices_are_fine(replicate, shard):
    assert texts(parallel=both(replicate, shard)) == texts(1, parallel=both(1, 1)) == []
    assert parallel.wrong({**VALUES, "parallel": both(3, 5)}) == ()  # the node that trains does not ask again
    assert parallel.layout({"parallel": both(replicate, shard)}) == parallel.MeshLayout(replicate, shard)
    assert parallel.layout({"parallel": None}) is parallel.layout({}) is None


@pytest.mark.parametrize(("value", "text"), TABLES["layouts"])
def test_a_layout_that_cannot_be_is_refused_with_the_reason(value, text):
    assert f"parallel: {text}" in texts(parallel=value)
    if "the test has" not in text:
        with pytest.raises(ValueError, match=r"replicate|shard|key"):
            parallel.layout({"parallel": value})


@pytest.mark.parametrize(("changes", "text"), TABLES["shards"])
def test_what_shards_cannot_have_is_refused_and_replicas_have_it(changes, text):
    (found,) = texts(parallel=both(2, 2), **changes)
    assert text in found
    assert texts(parallel=both(4, 1), **changes) == []


@pytest.mark.parametrize(("changes", "text"), TABLES["modes"])
def test_what_other_modes_cannot_have_is_refused(changes, text):
    (found,) = texts(**changes)
    assert text in found


@pytest.mark.parametrize("changes", [{"gradient_compression": "bf16"}, {"bucket_mb": 5.0}])
def test_one_device_exchanges_no_gradients(changes):
    (found,) = texts(1, **changes)
    assert "means nothing on one device" in found
    assert texts(2, **changes) == []


@pytest.mark.parametrize(("changes", "text"), TABLES["groups"])
def test_groups_that_cannot_normalise_together_are_refused(changes, text):
    (found,) = texts(**changes)
    assert found.startswith("batch_norm_group: ")
    assert text in found


@pytest.mark.parametrize("asked", [2, "all"])
def test_one_device_has_no_group_to_normalise_with(asked):
    (found,) = texts(1, batch_norm_group=asked)
    assert "means nothing on one device" in found


@pytest.mark.parametrize(
    ("asked", "ranks", "together"),
    [(None, 4, 1), (1, 4, 1), (2, 4, 2), (4, 4, 4), ("all", 4, 4), ("all", 6, 6)],
)
def test_a_group_is_as_many_ranks_as_asked(asked, ranks, together):
    assert parallel.batch_norm_ranks({"batch_norm_group": asked}, ranks) == together
    assert texts(ranks, batch_norm_group=asked) == []
    assert texts(1, batch_norm_group=1) == []


@pytest.mark.parametrize("asked", [4, "all"])
def test_all_ranks_of_one_mpi_normalise_together(asked):
    assert texts(batch_norm_group=asked, backend="mpi") == []


def test_compression_that_fits_is_taken():
    assert texts(1, gradient_compression="none") == []
    assert texts(gradient_compression="none", parallel=both(1, 4)) == []
    assert texts(gradient_compression="powersgd", warmup=2) == []
