"""ResNet-50 on four real ranks (gloo, CPU), as replicas, shards and both: the same losses, though two samples are a rank's batch.

Batch normalisation of two samples enlarges rounding from step to step, so that in float32 nobody could tell a defect from
it after the first update. These runs are in float64, in which what is told (float32) stays the same for all their steps.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from parallel_ranks import measured
from parallel_runs import LAYOUTS, RANKS, losses, shared
from probe_ranks import free_port
from rank_helpers import ROOT

pytestmark = pytest.mark.servers

#: Losses are told in float32, which rounds by 6e-8; gradients that are off by a thousandth change the next loss by more.
TOLD = 1e-6


def run_of(layout, steps=4):
    replicate, shard = LAYOUTS[layout]
    run = shared(
        "resnet50", steps, parallel={"replicate": replicate, "shard": shard}, image_size=32, classes=4, learning_rate=0.01
    )  # fmt: skip
    variables = {"MLHPC_WORKLOAD_MODULE": "resnet50_double"}
    return dataclasses.replace(run, workload="resnet50_double", variables=variables)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    runs = {layout: run_of(layout) for layout in LAYOUTS}
    return measured(tmp_path_factory.mktemp("batch-norm"), runs, RANKS, ROOT, free_port())


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
def test_shards_with_batch_normalisation_learn_what_replicas_learn(told, layout):
    assert losses(told, layout) == pytest.approx(losses(told, "replicated"), rel=TOLD)


def test_these_losses_tell_updates_apart(told):
    """Else equal losses would say nothing of gradients: the second loss is that of the first update."""
    found = losses(told, "replicated")
    assert len(found) == 6
    assert all(abs(after / before - 1) > 1000 * TOLD for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_normalises_by_its_own_samples(told, layout):
    """As MLPerf's reference does: with statistics of all samples the ranks' losses would be others."""
    own = [report["losses"] for report in told[layout]]
    alike = [report["losses"] for report in told["replicated"]]
    assert own == [pytest.approx(one, rel=TOLD) for one in alike]
    assert len({tuple(one) for one in own}) == RANKS
