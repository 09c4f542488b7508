import itertools
import os

import pytest
import torch
from torch.utils.data import Dataset

from pytest_mlhpc.node.worker import prepare
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.data.source import ShardedSampler


class Numbers(Dataset):
    """Sample i is i, and names the process that read it."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index]), torch.tensor(os.getpid()), 0.5


def batches_of(size, workers):
    return prepare.batches_of(Numbers(), ShardedSampler(10, 0, 1, 0), prepare.Shape(size, workers, pin=False))


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
    assert prepare.choose_workers(asked, source, cores, device) == chosen


def test_batches_are_whole_and_add_up_the_seconds_of_reading():
    found = [(inputs.shape, read_s) for inputs, _, read_s in batches_of(4, 0)]

    assert found == [((4, 1), 2.0), ((4, 1), 2.0)]


@pytest.mark.servers
def test_loader_processes_read_outside_this_one_and_end_with_the_iterator():
    inputs, readers, _ = zip(*batches_of(5, 2), strict=True)
    assert sorted(torch.cat(inputs).flatten().tolist()) == list(range(10))
    assert os.getpid() not in torch.cat(readers).tolist()


def test_the_no_io_twin_repeats_a_few_batches_for_ever():
    sampler = ShardedSampler(10, 0, 1, 0, repeat=True)
    endless = prepare.device_batches(Numbers(), sampler, 3, Cpu(0, "test"))
    first, second, third = itertools.islice(endless, 3)
    assert first[0] is third[0] is not second[0]
    assert first[2] == second[2] == 0.0


def test_a_batch_written_in_place_is_the_batch_that_torch_makes():
    samples = [(torch.rand(3, 2), torch.tensor(label), 0.5) for label in (1, 2, 3)]

    in_place, of_torch = prepare.collate_in_place(samples, pin=False), prepare.collate(samples)

    torch.testing.assert_close(in_place, of_torch)
    assert in_place[2] == 1.5
