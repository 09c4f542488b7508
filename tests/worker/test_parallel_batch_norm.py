"""ResNet-50 and DeepCAM on four real ranks (gloo, CPU), as replicas, shards and both: the same losses of two samples a rank.

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


#: Sizes that train in a second.
SMALL = {
    "resnet50": {"image_size": 32, "classes": 4, "learning_rate": 0.01},
    "deepcam": {"height": 32, "width": 48, "width_multiplier": 0.125, "middle_blocks": 1},
}


def run_of(name, layout, steps=4):
    replicate, shard = LAYOUTS[layout]
    run = shared(name, steps, parallel={"replicate": replicate, "shard": shard}, **SMALL[name])
    variables = {"MLHPC_WORKLOAD_MODULE": f"{name}_double"}
    return dataclasses.replace(run, workload=f"{name}_double", variables=variables)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    runs = {f"{name}-{layout}": run_of(name, layout) for name in SMALL for layout in LAYOUTS}
    return measured(tmp_path_factory.mktemp("batch-norm"), runs, RANKS, ROOT, free_port())


@pytest.mark.parametrize("layout", ["sharded", "hybrid"])
@pytest.mark.parametrize("name", SMALL)
def test_shards_with_batch_normalisation_learn_what_replicas_learn(told, name, layout):
    assert losses(told, f"{name}-{layout}") == pytest.approx(losses(told, f"{name}-replicated"), rel=TOLD)


@pytest.mark.parametrize("name", SMALL)
def test_these_losses_tell_updates_apart(told, name):
    """Else equal losses would say nothing of gradients: the second loss is that of the first update."""
    found = losses(told, f"{name}-replicated")
    assert len(found) == 6
    assert all(abs(after / before - 1) > 1000 * TOLD for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SMALL)
def test_each_rank_normalises_by_its_own_samples(told, name, layout):
    """As MLPerf's reference does: with statistics of all samples the ranks' losses would be others."""
    own = [report["losses"] for report in told[f"{name}-{layout}"]]
    alike = [report["losses"] for report in told[f"{name}-replicated"]]
    assert own == [pytest.approx(one, rel=TOLD) for one in alike]
    assert len({tuple(one) for one in own}) == RANKS
