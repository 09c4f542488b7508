from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils.data import Dataset

from pytest_mlhpc.worker import loader
from pytest_mlhpc.worker.accelerators.cpu import Cpu
from pytest_mlhpc.worker.data.sampler import ShardedSampler


class Numbers(Dataset):
    """Sample i is i, and says which process read it."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index]), torch.tensor(os.getpid()), 0.5


@pytest.mark.parametrize(
    ("asked", "source", "cores", "device", "chosen"),
    [
        (None, "memory", 64, "cuda", 0),
        (None, "device", 64, "cuda", 0),
        (None, "files", 1, "cpu", 1),
        (None, "files", 2, "cpu", 2),
        (None, "files", 64, "cpu", 8),
        (None, "files", 4, "cuda", 3),
        (None, "files", 64, "cuda", 8),
        (0, "files", 64, "cuda", 0),
        (3, "memory", 2, "cpu", 3),
    ],
)
def test_loader_processes_follow_cores_and_source(asked, source, cores, device, chosen):
    assert loader.choose_workers(asked, source, cores, device) == chosen


def test_batches_are_whole_and_add_up_the_seconds_of_reading():
    batches = list(loader.batches(Numbers(), ShardedSampler(10, 0, 1, 0), loader.Shape(4, 0, pin=False)))

    assert [inputs.shape for inputs, _, _ in batches] == [(4, 1), (4, 1)]
    assert [read_s for _, _, read_s in batches] == [2.0, 2.0]


@pytest.mark.servers
def test_loader_processes_read_outside_this_one_and_end_with_the_iterator():
    batches = loader.batches(Numbers(), ShardedSampler(10, 0, 1, 0), loader.Shape(5, 2, pin=False))

    read = list(batches)
    del batches

    assert sorted(torch.cat([inputs for inputs, _, _ in read]).flatten().tolist()) == list(range(10))
    assert os.getpid() not in torch.cat([targets for _, targets, _ in read]).tolist()


def test_the_no_io_twin_repeats_a_few_batches_for_ever():
    cpu = Cpu(0, "test")
    sampler = ShardedSampler(10, 0, 1, 0, repeat=True)

    batches = list(itertools.islice(loader.device_batches(Numbers(), sampler, 3, cpu), 5))

    assert batches[0][0] is batches[2][0]
    assert batches[0][0] is not batches[1][0]
    assert all(read_s == 0.0 for _, _, read_s in batches)


def test_a_batch_written_in_place_is_the_batch_that_torch_makes():
    samples = [(torch.rand(3, 2), torch.tensor(label), 0.5) for label in (1, 2, 3)]

    made, wanted = loader.collate_in_place(samples, pin=False), loader.collate(samples)

    torch.testing.assert_close(made[0], wanted[0])
    torch.testing.assert_close(made[1], wanted[1])
    assert made[2] == wanted[2] == 1.5
