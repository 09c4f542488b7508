"""Collectives are counted whichever thread begins them."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from pytest_mlhpc.node.worker import distributed


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduce_here_and_in_a_thread() -> None:
    """Begin a collective of four floats in this thread, and one of eight in another."""
    dist.all_reduce(torch.zeros(4))
    thread = threading.Thread(target=dist.all_reduce, args=(torch.zeros(8),))
    thread.start()
    thread.join()


@pytest.mark.usefixtures("one_rank")
def test_collectives_of_this_and_of_other_threads_are_noted_once_each_and_not_afterwards():
    function = dist.all_reduce
    with distributed.noted() as collectives:
        reduce_here_and_in_a_thread()
    reduce_here_and_in_a_thread()
    assert collectives == [("all_reduce", 16), ("all_reduce", 32)]
    assert dist.all_reduce is function


def test_figures_are_number_and_bytes_of_each_kind():
    found = distributed.figures([("all_reduce", 16), ("all_gather", 4), ("all_reduce", 32)])
    gathered = [("all_gather_count", 1.0, "1"), ("all_gather_bytes", 4.0, "B")]
    reduced = [("all_reduce_count", 2.0, "1"), ("all_reduce_bytes", 48.0, "B")]
    assert [(one.name, one.value, one.unit) for one in found] == [*gathered, *reduced]
