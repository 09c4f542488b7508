"""Four real ranks (gloo, CPU) that share one training as replicas, shards and both: the same losses, other messages."""

from __future__ import annotations

import pytest
from parallel_ranks import measured
from parallel_runs import LAYOUTS, RANKS, gradients, laid_out, losses, sent, shared, tiny
from probe_ranks import free_port
from rank_helpers import ROOT

pytestmark = pytest.mark.servers


#: A model of volumes, at a size that trains in a second; those with batch normalisation are in test_parallel_batch_norm.py.
VOLUMES = {"dropout": 0.0, "input_size": 16, "layers": 2, "base_channels": 8}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    runs = {"unset": tiny(), **{name: laid_out(name) for name in LAYOUTS}}
    for layout in ("replicated", "sharded"):
        runs[f"{layout}-accumulating"] = laid_out(layout, gradient_accumulation=2)
        replicate, shard = LAYOUTS[layout]
        runs[f"{layout}-cosmoflow"] = shared(
            "cosmoflow", 4, parallel={"replicate": replicate, "shard": shard}, **VOLUMES
        )
        for optimizer in ("adam", "adamw"):
            runs[f"{layout}-{optimizer}"] = laid_out(
                layout, optimizer=optimizer, fused_optimizer=True, learning_rate=1e-3
            )
        runs[f"{layout}-bf16"] = laid_out(layout, precision="bf16")
    for how in ("fp16", "powersgd", "bf16"):
        runs[f"sent-{how}"] = laid_out("replicated", gradient_compression=how)
    runs["in-small-buckets"] = laid_out("replicated", bucket_mb=0.01)
    return measured(tmp_path_factory.mktemp("parallel"), runs, RANKS, ROOT, free_port())


def test_replicas_are_what_ranks_have_where_nothing_is_said(told):
    assert losses(told, "unset") == losses(told, "replicated")
    assert len(losses(told, "unset")) == 6


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
def test_shards_learn_what_replicas_learn(told, layout):
    assert losses(told, layout) == pytest.approx(losses(told, "replicated"), rel=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw", "cosmoflow"])
def test_shards_learn_the_same_with_fused_optimizers_and_of_volumes(told, name):
    assert losses(told, f"sharded-{name}") == pytest.approx(losses(told, f"replicated-{name}"), rel=1e-5)


def test_shards_that_accumulate_learn_what_replicas_learn(told):
    assert losses(told, "sharded-accumulating") == pytest.approx(
        losses(told, "replicated-accumulating"), rel=1e-5
    )


def test_shards_in_bf16_learn_what_replicas_in_bf16_learn_but_for_its_rounding(told):
    assert losses(told, "sharded-bf16") == pytest.approx(losses(told, "replicated-bf16"), rel=2e-3)


def test_blocks_that_compute_in_bf16_gather_fewer_bytes(told):
    fp32, bf16 = sent(told, "sharded"), sent(told, "sharded-bf16")
    assert bf16["all_gather"] < 0.9 * fp32["all_gather"]
    assert bf16["reduce_scatter"] == fp32["reduce_scatter"]  # summed in fp32


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_reports_the_whole_model(told, name):
    counts = {report["parameters"] for report in told[name]}
    assert counts == {report["parameters"] for report in told["unset"]}
    assert [report["rank"] for report in told[name]] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["unset", "replicated", "replicated-accumulating"])
def test_replicas_exchange_each_gradient_once_a_step(told, name):
    assert sent(told, name) == {"all_reduce": gradients(told, "unset")}


def test_shards_gather_weights_for_both_passes_and_scatter_gradients(told):
    found = sent(told, "sharded")
    assert set(found) == {"all_gather", "reduce_scatter"}
    whole = gradients(told, "unset")
    # The first dimension of each weight is filled up to a multiple of the ranks.
    assert whole <= found["reduce_scatter"] <= 1.2 * whole
    assert found["reduce_scatter"] < found["all_gather"] <= 2 * found["reduce_scatter"]


def test_shards_with_replicas_average_their_own_part_between_them(told):
    found = sent(told, "hybrid")
    assert set(found) == {"all_gather", "all_reduce", "reduce_scatter"}
    assert found["all_reduce"] == found["reduce_scatter"] / 2


def test_gradients_sent_in_16_bits_are_half_as_many_bytes_and_teach_the_same(told):
    assert sent(told, "sent-fp16") == {"all_reduce": gradients(told, "unset") / 2}
    assert losses(told, "sent-fp16") == pytest.approx(losses(told, "replicated"), rel=1e-3)


def test_gradients_sent_as_thin_matrices_are_fewer_bytes(told):
    assert 0 < sent(told, "sent-powersgd")["all_reduce"] < gradients(told, "unset")
    assert losses(told, "sent-powersgd") == pytest.approx(losses(told, "replicated"), rel=0.05)


def test_what_a_backend_cannot_compress_is_named(told):
    for outcome, text in (report["failed"] for report in told["sent-bf16"]):
        assert outcome == "not_supported"
        assert "gradient_compression=bf16: torch" in text


def test_small_buckets_are_more_messages_of_the_same_gradients(told):
    assert (
        sent(told, "in-small-buckets", "count")["all_reduce"]
        > sent(told, "replicated", "count")["all_reduce"]
    )
    assert sent(told, "in-small-buckets") == sent(told, "replicated")
    assert losses(told, "in-small-buckets") == pytest.approx(losses(told, "replicated"), rel=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_exposed_communication_is_told_of_every_way(told, name):
    assert all(report["exposed_communication_s"] >= 0 for report in told[name])
    assert min(report["arrival_s"] for report in told[name]) >= 0
