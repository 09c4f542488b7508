"""Batch normalisation of several ranks (gloo, CPU) is that of one process with the joined batch, to the rounding of float64."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from batch_norm_runs import CASES, GROUPS, RANKS, STEPS, batches, layer, measure_all, passed
from torch import nn

from pytest_mlhpc.node.worker import distributed
from pytest_mlhpc.node.worker.base import open_device
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure

pytestmark = pytest.mark.servers

#: Means of 100 and sums of some hundred values lose three of float64's sixteen digits.
ROUNDING = {"rtol": 1e-11, "atol": 1e-11}


@pytest.fixture(scope="session")
def found(rank_server, tmp_path_factory):
    return measure_all(rank_server, tmp_path_factory.mktemp("batch-norm"))


def joined(case, members):
    """Return what one process finds in each step that has the samples of all *members*, and then without training.

    Without running statistics there is nothing to normalise by then but each rank's own samples, as torch has it.
    """
    model, results = layer(case), []
    for step in range(STEPS + CASES[case][3].get("track_running_stats", True)):
        if step == STEPS:
            model.eval()
        parts = [batches(case, min(step, STEPS - 1))[rank] for rank in members]
        results.append(passed(model, *(torch.cat(column) for column in zip(*parts, strict=True))))
    return results


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", GROUPS)
def test_a_group_is_one_process_with_the_joined_batch(found, ranks, case):
    for first in range(0, RANKS, ranks):
        members = range(first, first + ranks)
        for step, whole in enumerate(joined(case, members)):
            parts = [found[f"{ranks} {case}"][rank][step] for rank in members]
            for name, expected in whole.items():
                of_ranks = [part[name] for part in parts]
                if name in ("out", "input"):
                    torch.testing.assert_close(torch.cat(of_ranks), expected, **ROUNDING)
                elif name.startswith("gradient"):
                    torch.testing.assert_close(sum(of_ranks), expected, **ROUNDING)
                else:
                    for one in of_ranks:
                        torch.testing.assert_close(one, expected, **ROUNDING)


def test_ranks_of_a_group_keep_the_same_statistics_and_other_groups_keep_others(found):
    means = [steps[-1]["0.running_mean"].tolist() for steps in found["2 images"]]
    assert means[0] == means[1] != means[2] == means[3]
    everywhere = [steps[-1]["0.running_mean"].tolist() for steps in found["4 images"]]
    assert all(one == another for one, another in itertools.pairwise(everywhere))


def test_statistics_are_exchanged_once_in_each_pass_and_left_out_where_communication_is(found):
    """Besides: the all-reduce of gradients, and the broadcasts of buffers that replicas do."""
    for usual, silent in found["messages"]:
        assert [usual.count(kind) for kind in ("all_gather", "all_reduce")] == [1, 2]
        assert silent == []


def test_gpus_have_the_layers_that_torch_has_for_them():
    """Without a GPU: which layers there are, with the weights and statistics of those before."""
    gpu = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sequential(nn.BatchNorm2d(3)))
    before = dict(model.state_dict())
    distributed.share_statistics(model, Group(0, 0, 4), gpu, 4)
    assert type(model[1][0]) is nn.SyncBatchNorm
    after = model.state_dict()
    assert {name: value.data_ptr() for name, value in after.items()} == {
        name: value.data_ptr() for name, value in before.items()
    }


@pytest.mark.parametrize(
    ("model", "ranks", "text"),
    [
        (nn.Sequential(nn.Linear(2, 2)), 2, "batch_norm_group: the model has no batch normalisation"),
        (nn.Sequential(nn.BatchNorm1d(2)), 3, "batch_norm_group=3 does not divide the 4 ranks of this run"),
    ],
)
def test_a_run_fails_whose_model_or_ranks_form_no_group(model, ranks, text):
    with pytest.raises(WorkerFailure, match=f"^worker_exit: {text}$"):
        distributed.share_statistics(model, Group(0, 0, 4), open_device("cpu", 0), ranks)


def test_one_rank_normalises_as_ever():
    model = nn.Sequential(nn.BatchNorm1d(2))
    distributed.share_statistics(model, Group(0, 0, 4), open_device("cpu", 0), 1)
    assert type(model[0]) is nn.BatchNorm1d
