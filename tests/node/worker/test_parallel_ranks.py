"""Four real ranks (gloo, CPU) that share one training as replicas, shards and both: the same losses, other messages.

Batch normalisation of two samples enlarges rounding from step to step, so that in float32 nobody could tell a defect from it
after the first update. ResNet-50 and DeepCAM therefore run in float64. Their losses are reported in float32.
"""

import dataclasses
import itertools
import re

import pytest
from parallel_runs import (
    LAYOUTS,
    NORMALISED,
    NORMALISED_RUNS,
    RANKS,
    gradients,
    losses,
    measure,
    measure_all,
    normalised,
    traffic,
)

from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group

pytestmark = pytest.mark.servers

#: float32 rounds a loss by 6e-8; gradients that are off by a thousandth change the next loss by more.
ROUNDING = 1e-6


@pytest.fixture(scope="session")
def reports(rank_server, tmp_path_factory):
    return measure_all(rank_server, tmp_path_factory.mktemp("parallel"))


def test_ranks_are_replicas_by_default(reports):
    assert losses(reports, "unset") == losses(reports, "replicated")
    assert len(losses(reports, "unset")) == 6


@pytest.mark.parametrize(
    ("name", "other", "tolerance"),
    [
        ("sharded", "replicated", 1e-5), ("hybrid", "replicated", 1e-5), ("sharded-adam", "replicated-adam", 1e-5),
        ("sharded-adamw", "replicated-adamw", 1e-5), ("sharded-cosmoflow", "replicated-cosmoflow", 1e-5),
        ("sharded-accumulating", "replicated-accumulating", 1e-5),
        ("sharded-bf16", "replicated-bf16", 2e-3),  # bf16 rounds
        ("sent-fp16", "replicated", 1e-3), ("sent-powersgd", "replicated", 0.05), ("in-small-buckets", "replicated", 1e-5),
        *((f"{layout}-{name}", f"replicated-{name}", ROUNDING) for name, layout in NORMALISED_RUNS),
    ],
)  # fmt: skip
def test_one_layout_learns_what_the_other_learns(reports, name, other, tolerance):
    assert losses(reports, name) == pytest.approx(losses(reports, other), rel=tolerance)


@pytest.mark.parametrize("name", NORMALISED)
def test_losses_of_normalised_models_tell_updates_apart(reports, name):
    """Else equal losses would say nothing of gradients: the second loss is that of the first update."""
    found = losses(reports, f"replicated-{name}")
    assert len(found) == 3
    assert all(abs(after / before - 1) > 1000 * ROUNDING for before, after in itertools.pairwise(found))


@pytest.mark.parametrize(("name", "layout"), NORMALISED_RUNS)
def test_each_rank_normalises_by_its_own_samples(reports, name, layout):
    """As MLPerf's reference does: with statistics of all samples the ranks' losses would be others."""
    own, replicas = (
        [report["losses"] for report in reports[f"{one}-{name}"]] for one in (layout, "replicated")
    )
    assert own == [pytest.approx(one, rel=ROUNDING) for one in replicas]
    assert len({tuple(one) for one in own}) == RANKS


@pytest.mark.parametrize("name", NORMALISED)
def test_ranks_that_normalise_together_train_as_one_process_with_their_batch(
    reports, name, tmp_path, monkeypatch
):
    """In groups of two, and each by itself, they train otherwise."""
    monkeypatch.chdir(tmp_path)
    whole = dataclasses.replace(normalised(name, None), ranks=1, launcher="plain")
    expected = measure(whole, Group(), open_device("cpu", 0))["losses"]
    assert losses(reports, f"together-all-{name}") == pytest.approx(expected, rel=ROUNDING)
    for other in (f"together-2-{name}", f"replicated-{name}"):
        pairs = zip(losses(reports, other), expected, strict=True)
        assert max(abs(loss / one - 1) for loss, one in pairs) > 100 * ROUNDING


def test_blocks_that_compute_in_bf16_gather_fewer_bytes(reports):
    fp32, bf16 = traffic(reports, "sharded"), traffic(reports, "sharded-bf16")
    assert bf16["all_gather"] < 0.9 * fp32["all_gather"]
    assert bf16["reduce_scatter"] == fp32["reduce_scatter"]  # summed in fp32


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_reports_the_whole_model_and_exposed_communication(reports, name):
    assert len({report["parameters"] for report in (*reports[name], *reports["unset"])}) == 1
    assert [report["rank"] for report in reports[name]] == [0, 1, 2, 3]
    assert all(min(report["exposed_communication_s"], report["arrival_s"]) >= 0 for report in reports[name])


@pytest.mark.parametrize("name", ["unset", "replicated", "replicated-accumulating"])
def test_replicas_exchange_each_gradient_once_a_step(reports, name):
    assert traffic(reports, name) == {"all_reduce": gradients(reports)}


def test_shards_gather_weights_for_both_passes_and_scatter_gradients(reports):
    found, whole = traffic(reports, "sharded"), gradients(reports)
    assert set(found) == {"all_gather", "reduce_scatter"}
    # The first dimension of each weight is filled up to a multiple of the ranks.
    assert whole <= found["reduce_scatter"] <= 1.2 * whole
    assert found["reduce_scatter"] < found["all_gather"] <= 2 * found["reduce_scatter"]


def test_shards_with_replicas_average_their_own_part_between_them(reports):
    found = traffic(reports, "hybrid")
    assert set(found) == {"all_gather", "all_reduce", "reduce_scatter"}
    assert found["all_reduce"] == found["reduce_scatter"] / 2


def test_compressed_gradients_are_fewer_bytes(reports):
    assert traffic(reports, "sent-fp16") == {"all_reduce": gradients(reports) / 2}
    assert 0 < traffic(reports, "sent-powersgd")["all_reduce"] < gradients(reports)


def test_what_a_backend_cannot_compress_is_named(reports):
    failed = [": ".join(report["failed"]) for report in reports["sent-bf16"]]
    assert all(re.match("not_supported: .*gradient_compression=bf16: torch", text) for text in failed)


def test_small_buckets_are_more_messages_of_the_same_gradients(reports):
    small, usual = "in-small-buckets", "replicated"
    assert traffic(reports, small, "count")["all_reduce"] > traffic(reports, usual, "count")["all_reduce"]
    assert traffic(reports, small) == traffic(reports, usual)
